"""What a captured decode step reads, without a capture."""

from __future__ import annotations

import contextlib
import gc
import weakref

import pytest
import torch

from pageforge import KVGeometry, PagePool, graphs
from pageforge.batch import SequenceBatch
from pageforge.graphs import CapturedStep, GraphMemory, StepInputs, bucket


def make(rows: int, length: int, starts: list[int] | None = None) -> SequenceBatch:
    geometry = KVGeometry.uniform(2, 2, 16, dtype="float32", page_size=8)
    batch = SequenceBatch(PagePool(geometry, max_pages=64), starts or [0] * rows)
    batch.append(length)
    return batch


def test_a_bucket_is_at_most_a_quarter_larger() -> None:
    sizes = [bucket(rows) for rows in range(1, 2000)]
    assert all(rows <= size <= rows * 1.25 for rows, size in enumerate(sizes, 1))
    assert sizes == sorted(sizes)
    assert [bucket(rows) for rows in (1, 2, 3, 4, 5, 7, 8, 9, 32, 33)] == [
        *(1, 2, 3, 4, 5, 7, 8, 10, 32, 40)
    ]
    assert len(set(sizes)) < 45
    assert all(bucket(size) == size for size in sizes)


def test_load_and_begin() -> None:
    batch = make(3, 9)
    inputs = StepInputs(batch.pool, 4, 64, None)
    inputs.load(batch, 8, (0, 2, 0))
    assert inputs.seq_lens.tolist() == [8, 8, 8, 0]
    assert inputs.starts.tolist() == [0, 2, 0, 0]
    inputs.begin()
    assert inputs.seq_lens.tolist() == [9, 9, 9, 0]  # a row beyond the batch stays without tokens
    assert inputs.positions.flatten().tolist() == [8, 8, 8, 0]
    want, _ = batch.page_table(0, 0, 9)
    assert torch.equal(inputs.page_tables[0][:3, :2], want)
    assert not inputs.page_tables[0][3].any()
    assert not inputs.page_tables[0][:, 2:].any()


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8])
def test_lengths_and_positions_are_counted(rows: int) -> None:
    """One kernel counts both; each lies where kernels can load 16 bytes at once."""
    batch = make(rows, 9)
    inputs = StepInputs(batch.pool, rows + 1, 64, None)
    inputs.load(batch, 3, None)
    for step in range(5):
        inputs.begin()
        assert inputs.seq_lens.tolist() == [4 + step] * rows + [0]
        assert inputs.positions.tolist() == [[3 + step]] * rows + [[0]]
    assert inputs.seq_lens.dtype == torch.int32
    assert inputs.positions.dtype == torch.int64
    assert inputs.positions.data_ptr() % 16 == inputs.seq_lens.data_ptr() % 16 == 0
    given = StepInputs(batch.pool, rows + 1, 64, (3,))
    given.load(batch, 3, None)
    given.positions.fill_(7)
    given.begin()
    assert given.positions.unique().tolist() == [7]
    assert given.seq_lens.tolist() == [4] * rows + [0]


def test_nothing_of_a_longer_batch_stays_behind() -> None:
    long, short = make(4, 60), make(2, 5)
    inputs = StepInputs(long.pool, 4, 64, ())
    inputs.load(long, 59, (1, 2, 3, 4))
    inputs.tokens.fill_(7)
    inputs.positions.fill_(7)
    inputs.load(short, 4, None)
    inputs.begin()
    assert inputs.seq_lens.tolist() == [5, 5, 0, 0]
    assert not inputs.starts.any()
    assert not inputs.tokens.any()
    assert not inputs.positions.any()  # given by the caller
    assert not inputs.page_tables[0][2:].any()
    assert not inputs.page_tables[0][:, 1:].any()


def test_pages_are_followed() -> None:
    batch = make(2, 8)
    inputs = StepInputs(batch.pool, 2, 64, None)
    inputs.load(batch, 8, None)
    changes = batch.num_changes
    batch.append(1)
    assert batch.num_changes > changes
    inputs.follow(batch)
    assert torch.equal(inputs.page_tables[0][:, :2], batch.page_table(0, 0, 9)[0])
    changes = batch.num_changes
    batch.append(1)  # in the same page
    assert batch.num_changes == changes
    batch.select([1, 0])
    assert batch.num_changes > changes


def test_views_are_those_of_the_pool() -> None:
    batch = make(1, 1)
    inputs = StepInputs(batch.pool, 1, 64, None)
    for layer in range(2):
        _, *pages = batch.pool.layer(layer)
        for view, want in zip(inputs.layer(layer), pages, strict=True):
            assert view.data_ptr() == want.data_ptr()
            assert view.shape == want.shape
            assert view.stride() == want.stride()


def test_the_pool_is_not_kept() -> None:
    batch = make(1, 1)
    inputs = StepInputs(batch.pool, 1, 64, None)
    pool = weakref.ref(batch.pool)
    del batch
    gc.collect()
    assert pool() is None
    assert inputs.layer(0)[0].shape[1:] == (2, 8, 16)


def test_inputs_made_in_inference_mode_can_be_written_outside() -> None:
    batch = make(2, 9)
    with torch.inference_mode():
        inputs = StepInputs(batch.pool, 2, 64, (3,))
    assert inputs.positions.shape == (3, 2, 1)
    inputs.load(batch, 8, (0, 2))
    inputs.begin()
    assert inputs.seq_lens.tolist() == [9, 9]


class Stream:
    """A stand-in, which notes what waits for what."""

    def __init__(self) -> None:
        self.waited_for: list[Stream] = []

    def wait_stream(self, stream: Stream) -> None:
        self.waited_for.append(stream)


@pytest.fixture
def workspaces(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens to those of cuBLAS, and what else tests note here."""
    log: list[str] = []
    clear = "_cuda_clearCublasWorkspaces"
    monkeypatch.setattr(torch._C, clear, lambda: log.append("cleared"), raising=False)
    return log


@pytest.mark.parametrize("fails_at", [None, 0, graphs.WARM_UPS])
def test_captures_share_pool_and_stream(
    fails_at: int | None, workspaces: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    current, memory = Stream(), GraphMemory("pool", Stream())
    runs, used, undone = [], [], []

    def undo() -> None:
        undone.append(len(runs))

    def graph(graph: object, *, pool: object, stream: object, **settings: object) -> object:
        used.append((pool, stream))
        return contextlib.nullcontext()

    def run() -> str:
        runs.append(1)
        if len(runs) - 1 == fails_at:
            raise torch.cuda.OutOfMemoryError("planted")
        return "outputs"

    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch, "zeros", lambda *args, **settings: None)
    if fails_at is None:
        assert CapturedStep(run, memory, undo).outputs == "outputs"
        assert used == [("pool", memory.stream)]
    else:
        with pytest.raises(torch.cuda.OutOfMemoryError):
            CapturedStep(run, memory, undo)
        assert all(stream is memory.stream for _, stream in used)
    assert undone == [*range(1, 1 + min(graphs.WARM_UPS, len(runs)))], "after each warm-up"
    assert memory.stream.waited_for == [current]
    assert current.waited_for == [memory.stream]  # tensors of a failed capture are freed now


@pytest.mark.parametrize("enabled", [True, False])
def test_no_garbage_is_collected_during_a_capture(
    enabled: bool, workspaces: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def run(fails: bool = False) -> None:
        seen.append(gc.isenabled())
        workspaces.append("captured")
        if fails:
            raise RuntimeError("mine")

    capture = contextlib.nullcontext()
    monkeypatch.setattr(torch.cuda, "graph", lambda *args, **kwargs: capture)
    was_enabled = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with graphs._capturing(None, None, None):
            run()
        with pytest.raises(RuntimeError, match="mine"), graphs._capturing(None, None, None):
            run(fails=True)
        assert seen == [False, False]
        assert gc.isenabled() == enabled
        assert workspaces == ["cleared", "captured", "cleared"] * 2, "a graph has its own"
    finally:
        (gc.enable if was_enabled else gc.disable)()
