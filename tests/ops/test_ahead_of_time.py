"""Every kernel compiles for every GPU that it may meet, and fits there; no GPU is needed.

The ops' launchers are called on the CPU as if a GPU of some architecture were there, and what they
launch is compiled for it, in two processes of their own: in this one kernels are interpreted.
"""

from __future__ import annotations

import concurrent.futures
import functools
import importlib
import multiprocessing
import os
import pkgutil
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tests.ops.attention_cases import make_step

triton = pytest.importorskip("triton")

from pageforge.ops.prefill import hopper  # noqa: E402

pytestmark = pytest.mark.slow

SHARED_BYTES = {
    75: 65_536,
    80: 166_912,
    86: 101_376,
    89: 101_376,
    90: 232_448,
    100: 232_448,
    120: 101_376,
}
"""Shared memory that a block may have, by compute capability."""

IS_ONE_OF_SEVERAL = "PYTEST_XDIST_WORKER" in os.environ

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


class Job(NamedTuple):
    """A call of one of the functions below, on a GPU that is not there."""

    call: str
    arch: int
    dtype: torch.dtype = FP16
    dims: tuple[int, int] = (128, 128)
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        options = "".join(f"-{name}={value}" for name, value in self.options)
        return f"{self.call}-sm{self.arch}-{dtype}-{self.dims[0]}/{self.dims[1]}{options}"


class Kernel(NamedTuple):
    """A kernel that was launched, compiled."""

    name: str
    shared: int  # bytes
    ptx: str
    cubin: bytes


def decode_step(job: Job, **options: Any) -> None:
    """Plans a step, writes new tokens, attends, merges the pieces by a kernel of its own."""
    _decode(job, merged_runs=0, **options)


def decode_in_one(job: Job, **options: Any) -> None:
    """The pieces are merged where they are found."""
    _decode(job, merged_runs=1 << 40, **options)


def _decode(
    job: Job,
    merged_runs: int,
    heads: tuple[int, int] = (32, 8),
    everything: bool = False,
    stages: int | None = None,
    new: torch.dtype | None = None,
    batch_invariant: bool = False,
) -> None:
    from pageforge.ops import decode

    # `compile_job` sets these back, and the next.
    decode.MERGED_RUNS, decode.MERGED_BYTES = merged_runs, 1 << 40
    if stages is not None:
        usual = decode.tiling_for
        decode.tiling_for = lambda *args: usual(*args)._replace(num_stages=stages)
    more: dict[str, Any] = {}
    if everything:
        slopes = torch.rand(heads[0])
        more = {"softcap": 9.0, "alibi_slopes": slopes, "sinks": slopes.to(job.dtype)}
        more |= {"window": 512, "starts": [0, 7]}
    step = make_step([99, 99], heads=heads, dims=job.dims, page_size=16, dtype=job.dtype, **more)
    step.page_table = step.page_table.repeat(1, 999)  # room for rows that are cut
    if everything:
        step.run(batch_invariant=True)
    else:
        newest = [states.to(new or job.dtype) for states in step.take_newest()]
        step.run(new=(newest[0], newest[1]), batch_invariant=batch_invariant)


def prefill(job: Job, everything: bool = False) -> None:
    from pageforge.ops import prefill

    prefill.hopper = None  # `compile_job` sets this back
    more: dict[str, Any] = {}
    if everything:
        slopes = torch.rand(32)
        more = {"softcap": 9.0, "alibi_slopes": slopes, "sinks": slopes.to(job.dtype)}
    _prefill(job, bounded=everything, **more)


def prefill_hopper(job: Job, **options: Any) -> None:
    """By the kernel that is for Hopper alone."""
    _prefill(job, **options)


def _prefill(
    job: Job,
    heads: tuple[int, int] = (32, 8),
    page_size: int = 16,
    bounded: bool = False,
    **more: Any,
) -> None:
    from pageforge.ops.prefill import attend_prefill

    if bounded:
        more |= {"window": 512, "starts": torch.zeros(1, dtype=torch.int32)}
        more["lse"] = torch.zeros(9, heads[0])
    step = make_step([99], heads=heads, dims=job.dims, page_size=page_size, dtype=job.dtype)
    query = torch.zeros(9, heads[0], job.dims[0], dtype=job.dtype)
    out = torch.zeros(9, heads[0], job.dims[1], dtype=job.dtype)
    attend_prefill(
        *(query, step.key_pages, step.value_pages, step.page_table, step.seq_lens),
        *(torch.tensor([0, 9], dtype=torch.int32), out),
        scale=0.1,
        **more,
    )


def cache(job: Job) -> None:
    """All that moves K/V."""
    from pageforge.ops import copy, gather, write
    from pageforge.ops.write_and_gather import ByKernel

    step = make_step([99, 9], heads=(8, 2), dims=job.dims, page_size=16, dtype=job.dtype)
    new = step.take_newest()
    slots = torch.tensor([20, 40])
    write.launch_write_kv(*new, step.key_pages, step.value_pages, slots)
    gather.launch_gather_kv(step.key_pages, step.value_pages, step.page_table)
    pages = step.key_pages, step.value_pages
    key, value = (states.unsqueeze(2) for states in new)
    ByKernel(*pages, step.page_table, 0, range(98, 99))(key, value, *pages)
    for source, target in ((slots, slots), (slots, None), (None, slots)):
        copy.launch_copy(step.store, step.store, source, target, 2)


def hopper_job(dtype: torch.dtype, dim: int, page_size: int, **more: Any) -> Job:
    options = {"page_size": page_size, **more}
    return Job("prefill_hopper", 90, dtype, (dim, dim), tuple(options.items()))


HOPPER = [
    hopper_job(BF16, 128, 16),
    hopper_job(FP16, 128, 8, bounded=True),
    hopper_job(FP16, 128, 128, heads=(24, 1)),
    hopper_job(FP16, 64, 16, heads=(12, 12)),
    hopper_job(BF16, 64, 64, heads=(9, 3), bounded=True),
]

WIDE = [
    Job("decode_in_one", arch, BF16, (64, 64), (("heads", (heads, 1)),))
    for arch, heads in ((80, 16), (90, 16), (90, 71))
]

USUAL = [
    Job("decode_step", 90, BF16, (128, 128)),
    Job("decode_in_one", 90, FP16, (64, 64), (("heads", (12, 12)),)),
    *(
        Job(call, 90, FP16, (64, 64), (("heads", (9, 3)),))
        for call in ("decode_step", "decode_in_one")
    ),
]

ODD: list[tuple[int, int]] = [(16, 16), (40, 40), (80, 96), (112, 112), (192, 128)]

JOBS = [
    *(Job("cache", arch, dims=(128, 80)) for arch in (75, 90, 120)),
    Job("cache", 80, FP32),
    # Each tiling, on its architecture.
    *(
        Job(call, arch, dtype, (dim, dim))
        for call in ("decode_step", "prefill")
        for arch in SHARED_BYTES
        for dtype, dim in ((FP16 if arch == 75 else BF16, 128), (FP16, 256), (FP32, 128))
    ),
    *(Job("decode_in_one", arch, FP16, (64, 64), (("heads", (12, 12)),)) for arch in SHARED_BYTES),
    *(Job("prefill", arch, FP16, (64, 64)) for arch in (75, 90, 120)),
    *(Job("decode_step", arch, FP32, (256, 256)) for arch in (75, 86, 90)),
    *(Job("prefill", arch, FP32, (256, 256)) for arch in (75, 86, 90)),
    # Of many lanes, where registers are scarce (Falcon 7B has 71 heads over one).
    *WIDE,
    *USUAL[2:],
    *(
        Job(call, 90, FP16, (128, 128), (("new", FP32), ("batch_invariant", True)))
        for call in ("decode_step", "decode_in_one")
    ),
    Job("decode_in_one", 80, FP16, (64, 64), (("new", FP32),)),
    Job("decode_in_one", 80, FP16, (64, 256)),
    Job("decode_in_one", 86, FP16, (128, 256)),
    # All options, and dims that are no powers of two.
    *(Job("decode_step", 86, FP16, dims) for dims in ODD),
    *(Job("prefill", 86, FP16, dims) for dims in ODD[1::2]),
    Job("decode_in_one", 90, FP16, (128, 128), (("everything", True),)),
    Job("decode_step", 75, FP16, (64, 64), (("everything", True), ("heads", (24, 1)))),
    Job("prefill", 90, FP16, (128, 128), (("everything", True),)),
    Job("decode_step", 90, BF16, (128, 128), (("stages", 2),)),
    Job("decode_step", 90, BF16, (128, 128), (("stages", 3),)),
    Job("decode_step", 90, BF16, (128, 128), (("stages", 4),)),
    *([] if hopper is None else HOPPER),
]


# --- in a process of its own ----------------------------------------------------------------------


def compile_job(job: Job) -> list[Kernel]:
    """What is launched by `job`, compiled for its architecture."""
    from triton.runtime.jit import JITFunction

    from pageforge.ops import decode, plan, prefill
    from pageforge.ops.launch import Launcher

    capability = divmod(job.arch, 10)
    compiled: list[Kernel] = []

    def launch(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        compiled.append(_compile(kernel, job.arch, args, options))

    def prepare(
        self: Any, _v: Any, _d: Any, grid: Any, _f: Any, rest: Any, constants: Any, options: Any
    ) -> Any:
        return lambda *first: self._kernel[grid](*first, *rest, **constants, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", launch)
        patch.setattr(Launcher, "prepare", prepare)
        for name in ("MERGED_RUNS", "MERGED_BYTES"):
            patch.setattr(decode, name, getattr(decode, name))
        for module in (decode, plan):
            patch.setattr(
                module,
                "tiling_for",
                lambda dim, dtype, _: plan.tiling_of(dim, dtype.itemsize, capability),
            )
        chain = {"launch_pdl": True} if job.arch >= 90 else {}
        patch.setattr(decode, "_chain", lambda _: chain)
        patch.setattr(prefill, "_capability", lambda _: capability)
        patch.setattr(prefill, "hopper", prefill.hopper)
        decode._constants_for.cache_clear()
        globals()[job.call](job, **dict(job.options))
    return compiled


def _compile(kernel: Any, arch: int, args: tuple[Any, ...], options: dict[str, Any]) -> Kernel:
    """As Triton does when a kernel is launched, but for a device that is named."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.experimental.gluon._runtime import GluonASTSource
    from triton.runtime.jit import create_function_from_signature

    target = GPUTarget("cuda", arch, 32)
    backend = make_backend(target)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    options = {"debug": False, **options}
    bound, specialization, rest = bind(*args, **options)
    parsed, signature, constants, attributes = kernel._pack_args(
        backend, options, bound, specialization, rest
    )
    make_source = GluonASTSource if kernel.is_gluon() else ASTSource
    source = make_source(kernel, signature, constants, attributes)
    done = triton.compile(source, target=target, options=parsed.__dict__)
    asm = done.asm
    return Kernel(kernel.__name__, done.metadata.shared, asm["ptx"], asm["cubin"])


def kernels_of_the_ops() -> set[str]:
    """Those that are launched; what they call has other names."""
    from triton.runtime.jit import JITFunction

    from pageforge import ops

    modules = [
        importlib.import_module(f"pageforge.ops.{module.name}")
        for module in pkgutil.iter_modules(ops.__path__)
        if hopper is not None or module.name != "prefill_hopper"
    ]
    names = {
        value.__name__
        for module in modules
        for value in vars(module).values()
        if isinstance(value, JITFunction)
    }
    return {name for name in names if name.endswith("_kernel")}


# --- the tests ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def workers(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[concurrent.futures.ProcessPoolExecutor]:
    """Two processes; where pytest has several itself, one for each of them, and a common cache."""
    cache, number = tmp_path_factory.getbasetemp(), 2
    if IS_ONE_OF_SEVERAL:
        cache, number = cache.parent, 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "0")
        patch.setenv("TRITON_CACHE_DIR", str(cache / "triton"))
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        with concurrent.futures.ProcessPoolExecutor(
            number, mp_context=multiprocessing.get_context("spawn")
        ) as pool:
            yield pool


@pytest.fixture(scope="module")
def compiled(
    workers: concurrent.futures.ProcessPoolExecutor,
) -> Callable[[Job], list[Kernel]]:
    """What became of a job."""
    under_way = functools.cache(lambda job: workers.submit(compile_job, job))
    if not IS_ONE_OF_SEVERAL:  # else the others have their share of them
        for job in JOBS:
            under_way(job)
    return lambda job: under_way(job).result()


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_it_compiles_and_fits(job: Job, compiled: Callable[[Job], list[Kernel]]) -> None:
    kernels = compiled(job)
    assert kernels
    for kernel in kernels:
        assert kernel.shared <= SHARED_BYTES[job.arch], (kernel.name, kernel.shared)
        local = re.findall(r"\.local", kernel.ptx)
        assert not local, f"{kernel.name} keeps an array in local memory"
    merges = [kernel.name for kernel in kernels].count("_merge_kernel")
    assert merges == (job.call == "decode_step")


@pytest.mark.skipif(hopper is None, reason="Gluon is missing, or not one the kernel is for")
@pytest.mark.parametrize("job", HOPPER, ids=str)
def test_hopper_has_a_kernel_of_its_own(job: Job, compiled: Callable[[Job], list[Kernel]]) -> None:
    """Pages are copied by TMA, products run beside the rest, and warps share the registers out."""
    (kernel,) = compiled(job)
    assert kernel.name == "_prefill_hopper_kernel"
    for instruction in ("cp.async.bulk.tensor.2d", "wgmma.mma_async", "setmaxnreg.inc"):
        assert instruction in kernel.ptx


def test_no_kernel_is_forgotten(
    workers: concurrent.futures.ProcessPoolExecutor, compiled: Callable[[Job], list[Kernel]]
) -> None:
    found = workers.submit(kernels_of_the_ops).result()
    one_of_each = {job.call: job for job in JOBS}.values()
    assert found == {kernel.name for job in one_of_each for kernel in compiled(job)}
    assert len(found) >= 7


@pytest.mark.parametrize("arch", [80, 86, 89, 90, 100, 120])
def test_tiles_are_loaded_ahead(arch: int, compiled: Callable[[Job], list[Kernel]]) -> None:
    """With three stages two tiles are on their way, in buffers of their own, by 16-byte copies.

    Page ids that were loaded in the same turn as K and V once kept Triton from it.
    """
    from pageforge.ops.plan import tiling_of

    job = Job("decode_step", arch, BF16, (128, 128))
    tiling = tiling_of(128, 2, divmod(arch, 10))
    tile_bytes = tiling.tokens * (128 + 128) * 2
    kernel = next(kernel for kernel in compiled(job) if kernel.name == "_decode_kernel")
    assert kernel.shared >= (tiling.num_stages - 1) * tile_bytes
    copies = copies_of(kernel.ptx)
    assert copies and set(copies) == {16}
    # A thread's share of K and V of a tile, for those loaded before the loop and in it.
    share = tile_bytes // 16 // (32 * tiling.num_warps)
    assert len(copies) >= share * tiling.num_stages
    # What a copy brings is nothing (its last operand) where the loop ends before: there is no mask.
    assert len(copies) == len(re.findall(r"cp\.async\.c[ag]\S*.*, *0x10, *%r\d+;", kernel.ptx))


@pytest.mark.parametrize("job", [*WIDE, *USUAL], ids=str)
def test_registers_suffice(
    job: Job, compiled: Callable[[Job], list[Kernel]], tmp_path: Path
) -> None:
    """What a thread of the decode kernel works with is not put aside in memory.

    Launches took 0.7 us longer when it was 20 bytes. With many lanes a few values may be.
    """
    kernel = next(kernel for kernel in compiled(job) if kernel.name == "_decode_kernel")
    binary = tmp_path / "kernel.cubin"
    binary.write_bytes(kernel.cubin)
    command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(binary)]
    usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert int(re.search(r"REG:(\d+)", usage)[1]) > 64
    assert int(re.search(r"STACK:(\d+)", usage)[1]) <= (128 if job in WIDE else 0)


def test_more_stages_are_more_buffers(compiled: Callable[[Job], list[Kernel]]) -> None:
    shared = []
    for stages in (2, 3, 4):
        job = Job("decode_step", 90, BF16, (128, 128), (("stages", stages),))
        shared.append(next(k.shared for k in compiled(job) if k.name == "_decode_kernel"))
    tile_bytes = 64 * (128 + 128) * 2
    assert [shared[1] - shared[0], shared[2] - shared[1]] == [tile_bytes, tile_bytes]


def copies_of(ptx: str) -> list[int]:
    """Bytes of each asynchronous copy to shared memory."""
    found = re.findall(r"cp\.async\.c[ag]\.shared\.global\S* *\[[^]]*\], *\[[^]]*\], (\w+)", ptx)
    return [int(size, 0) for size in found]


def test_pieces_are_counted_after_all_threads_have_stored(
    compiled: Callable[[Job], list[Kernel]],
) -> None:
    """And read after the count, past the first cache."""
    for arch in SHARED_BYTES:
        job = Job("decode_in_one", arch, FP16, (64, 64), (("heads", (12, 12)),))
        ptx = next(k.ptx for k in compiled(job) if k.name == "_decode_kernel")
        count = re.search(r"atom\.global\.gpu\.acq_rel\.add", ptx) or re.search(
            r"atom\.global\.acq_rel\.gpu\.add|atom\.acq_rel\.gpu\.global\.add", ptx
        )
        assert count, arch
        before, after = ptx[: count.start()], ptx[count.start() :]
        stores = [at.start() for at in re.finditer(r"st\.global", before)]
        assert "bar.sync" in before[stores[-1] :]
        read = re.search(r"(ld|cp\.async)\S*\.cg\S*", after)
        assert read and "bar.sync" in after[: read.start()]
