"""The quick way to launch a kernel again."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from tests.ops.attention_cases import Step, make_step
from tests.ops.cache_cases import LAYOUTS, random_pages, random_states

from pageforge.ops import launch
from pageforge.ops.launch import VECTOR_BYTES, Launcher, addresses, misaligned

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


class FakeKernel:
    """In place of a Triton kernel: keeps what happened to it."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.grid: Any = None

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **constants: self.log.append(("run", grid, args, constants))

    def warmup(self, *args: Any, grid: Any, **options: Any) -> Any:
        self.log.append(("compile", grid, args, options))
        number = sum(entry[0] == "compile" for entry in self.log)

        class Compiled:  # as Triton's
            function, packed_metadata = "function", "metadata"

            def run(_, x: int, y: int, z: int, stream: int, *args: Any) -> None:
                assert (stream, *args[:5]) == (77, "function", "metadata", None, None, None)
                self.log.append((f"variant {number}", (x, y, z), args[5:]))

        return Compiled()


def test_on_the_cpu_the_interpreter_runs_it() -> None:
    kernel = FakeKernel()
    launch = Launcher(kernel).prepare("any", CPU, (1, 2, 3), (4,), (5,), {"C": 6}, {"num_warps": 8})
    launch(7)
    assert kernel.log == [("run", (1, 2, 3), (7, 5), {"C": 6})]


def test_a_variant_is_compiled_once_for_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = FakeKernel()
    launcher = Launcher(kernel)

    def quick(
        variant: str,
        device: torch.device,
        grid: tuple[int, int, int],
        args: tuple[int, ...],
        constants: dict[str, int],
        options: dict[str, int],
    ) -> None:
        launcher.prepare(variant, device, grid, args, (), constants, options)(*args)

    current = [0]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 77, raising=False)

    class OnDevice:
        def __init__(self, device: torch.device):
            self.index = device.index

        def __enter__(self) -> None:
            current.append(self.index)

        def __exit__(self, *_: object) -> None:
            current.pop()

    monkeypatch.setattr(torch.cuda, "device", OnDevice)
    other = torch.device("cuda", 1)
    options = {"num_warps": 8}
    quick("one", CUDA, (1, 1, 1), (4,), {"C": 6, "D": 7}, options)
    quick("one", CUDA, (9, 1, 1), (5,), {"C": 6, "D": 7}, options)
    quick("two", CUDA, (1, 1, 1), (4,), {"C": 8, "D": 7}, options)
    quick("one", other, (1, 1, 1), (4,), {"C": 6, "D": 7}, options)
    quick("one", other, (1, 1, 1), (4,), {"C": 6, "D": 7}, options)
    quick("one", CUDA, (1, 1, 1), (4,), {"C": 6, "D": 7}, options)
    assert current == [0], "the current device is what it was"
    assert kernel.log == [
        ("compile", (1, 1, 1), (4,), {"C": 6, "D": 7, "num_warps": 8}),
        ("variant 1", (1, 1, 1), (4, 6, 7)),
        ("variant 1", (9, 1, 1), (5, 6, 7)),
        ("compile", (1, 1, 1), (4,), {"C": 8, "D": 7, "num_warps": 8}),
        ("variant 2", (1, 1, 1), (4, 8, 7)),
        ("compile", (1, 1, 1), (4,), {"C": 6, "D": 7, "num_warps": 8}),
        ("variant 3", (1, 1, 1), (4, 6, 7)),
        ("variant 3", (1, 1, 1), (4, 6, 7)),
        ("variant 1", (1, 1, 1), (4, 6, 7)),
    ]


def test_misaligned() -> None:
    whole = torch.zeros(64)
    assert VECTOR_BYTES == 16

    def found(*tensors: torch.Tensor | None) -> tuple[bool, ...]:
        return misaligned(addresses(tensors))

    assert found(whole, whole[4:], None, whole[8:]) == ()
    assert found(whole, whole[1:], whole[8:], whole[6:]) == (False, True, False, True)
    assert found(None, whole[1:]) == (False, True)
    assert found(whole[:0], torch.zeros(0)) == ()


# --- what variants are named by -------------------------------------------------------------------


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, Any], Any]:
    """(kernel, variant) -> Triton's own key, of all that is launched; nothing runs.

    Whatever changes what Triton compiles must change the name of the variant too.
    """
    pytest.importorskip("triton")
    known: dict[tuple[str, Any], Any] = {}

    def check(
        self: Launcher, variant: Any, device: Any, grid: Any, first, rest, constants, options
    ):
        kernel = self._kernel
        key = triton_key(kernel, (*first, *rest), constants, options)
        assert known.setdefault((kernel.fn.__name__, variant), key) == key
        return lambda *args: None

    monkeypatch.setattr(launch.Launcher, "prepare", check)
    return known


def test_equal_variants_are_equal_to_triton(
    monkeypatch: pytest.MonkeyPatch, known: dict[tuple[str, Any], Any]
) -> None:
    """Of random decode steps."""
    decode = pytest.importorskip("pageforge.ops.decode")
    rng = random.Random(0)
    for number in range(120):
        torch.manual_seed(number)
        step = random_step(rng)
        monkeypatch.setattr(decode, "MERGED_BYTES", rng.choice([0, 1 << 40]))
        monkeypatch.setattr(decode, "MERGED_RUNS", 1 << 40)
        new = None
        if rng.random() < 0.5:
            new = step.take_newest()
            new = tuple(move(rng, cast(rng, part)) for part in new)
        step.query = move(rng, step.query)
        monkeypatch.setattr(Step, "scale", rng.choice([0.25, 1.0, 1, 16]))
        step.run(new=new, batch_invariant=rng.random() < 0.3)
    assert 50 < len(known) < 200


def test_so_are_those_of_writes_and_gathers(known: dict[tuple[str, Any], Any]) -> None:
    """With new tokens of any layout, and without."""
    from pageforge.ops.gather import launch_gather_kv
    from pageforge.ops.write import launch_write_kv
    from pageforge.ops.write_and_gather import ByKernel

    rng = random.Random(0)
    for _ in range(200):
        shape = rng.choice([(8, 2, 16, 16), (8, 2, 16, 24), (16, 1, 5, 5)])
        rows, columns, num_tokens = (
            rng.choice([1, 4, 16]),
            rng.choice([1, 2, 16]),
            rng.choice([1, 3]),
        )
        pages = random_pages(rng.choice([4, 20]), shape, dtype=rng.choice(DTYPES))
        table = torch.zeros(rows, columns + 1, dtype=torch.int32)[:, rng.choice([0, 1]) :]
        if rng.random() < 0.3:
            table = table.long() if rng.random() < 0.5 else table
            launch_gather_kv(pages.key, pages.value, table)
            continue
        layout = rng.choice(LAYOUTS)
        key, value = (
            move(rng, cast(rng, random_states(rows * num_tokens, shape[1], dim, layout, pages.key)))
            for dim in shape[2:]
        )
        if rng.random() < 0.5:
            slots = torch.zeros(rows * num_tokens + 1, dtype=torch.int64)[rng.choice([0, 1]) :]
            launch_write_kv(key, value, pages.key, pages.value, slots[: len(key)])
            continue
        new = range(table.shape[1] * shape[0] - num_tokens, table.shape[1] * shape[0])
        both = ByKernel(pages.key, pages.value, table, 0, new)
        by_head = [part.unflatten(0, (rows, -1)).transpose(1, 2) for part in (key, value)]
        both(*by_head, pages.key, pages.value)
    assert 60 < len(known) < 180


def random_step(rng: random.Random) -> Step:
    """Few kinds of each property, so that steps of one variant meet."""
    options: dict[str, Any] = {}
    if rng.random() < 0.2:
        options["sinks"] = torch.zeros(16)[rng.choice([0, 1]) :][:4].to(rng.choice(DTYPES))
    if rng.random() < 0.2:
        options["alibi_slopes"] = torch.zeros(16)[rng.choice([0, 1]) :][:4].to(rng.choice(DTYPES))
    if rng.random() < 0.2:
        options["softcap"] = rng.choice([1.0, 16.0, 1, 16])
    step = make_step(
        [rng.choice([1, 16, 20])] * rng.choice([1, 2, 3, 16, 17]),
        dims=(16, rng.choice([16, 24])),
        dtype=rng.choice(DTYPES[:2]),
        spare=rng.choice([0, 1, 15, 16, 40]),
        **options,
    )
    if rng.random() < 0.3 and step.page_table.shape[1] > 1:  # a table that begins anywhere
        step.page_table = torch.cat([step.page_table, step.page_table], 1)[:, 1:-1]
        step.seq_lens = torch.cat([step.seq_lens, step.seq_lens])[1 : 1 + len(step.seq_lens)]
    return step


DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def cast(rng: random.Random, part: torch.Tensor) -> torch.Tensor:
    return part.to(rng.choice(DTYPES)) if rng.random() < 0.2 else part


def move(rng: random.Random, part: torch.Tensor) -> torch.Tensor:
    """Perhaps to where no vector load can begin."""
    if rng.random() < 0.7:
        return part.clone()
    flat = torch.zeros(part.numel() + 1, dtype=part.dtype)
    return flat[1:].view(part.shape).copy_(part)


def triton_key(kernel: Any, args: Any, constants: Any, options: Any) -> Any:
    """What Triton tells compiled variants apart by: types, alignments, constants, options."""
    from triton.backends.compiler import BaseBackend
    from triton.runtime.jit import JITFunction, native_specialize_impl

    real = JITFunction(
        kernel.fn, **{name: kernel.kwargs[name] for name in kernel.kwargs if name.startswith("do_")}
    )
    key = []
    for parameter, arg in zip(real.params, args, strict=False):
        kind = native_specialize_impl(
            BaseBackend,
            arg,
            parameter.is_const,
            not parameter.do_not_specialize,
            not parameter.do_not_specialize_on_alignment,
        )
        key.append((parameter.name, parameter.annotation_type or kind[0], kind[1]))
    return key, constants, options
