"""record: the curves of somebody's own run, a row for each of its steps.

Only counts that the host has are read, so the device is never waited for. A source tells of its
steps only as long as it is recorded.
"""

from __future__ import annotations

import contextlib
import itertools
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

import torch

from pageforge.bench.report import SCHEMA, line, machine
from pageforge.bench.results import RECORDING, SUFFIX
from pageforge.engine.engine import Engine
from pageforge.errors import PageForgeError, ResultsError, expected
from pageforge.geometry import total_bytes_per_page
from pageforge.hf.cache import PagedKVCache
from pageforge.hf.paged_layer import PagedLayer
from pageforge.pool import PagePool

MOST_ROWS = 1 << 15
"""Where there would be more, every other one goes, and from then on every other step is sampled."""

CHANGES = (
    "append",
    "claim_ahead",
    "crop",
    "slide",
    "restore",
    "adopt_prefix",
    "release",
    "drop_prefix_cache",
    "trim",
)
"""The calls that may change what a pool holds."""

Row = dict[str, Any]

Told = Callable[[], None]
"""Called at each step."""


@contextlib.contextmanager
def record(source: Engine | PagedKVCache | PagePool) -> Iterator[Recording]:
    """Within this context each step of an engine, a cache or a pool leaves a row.

        with pageforge.record(engine) as recording:
            engine.generate(prompts)
        recording.save("run.jsonl")                     # for `pageforge report`
        table = pandas.DataFrame(recording.rows)

    A step of a cache is a forward, at its last layer; of a pool a call that changed what it holds.
    There is a row for the beginning and one for the end besides. Forks of a cache are not recorded
    with it. The source is left as it was, also after an exception.

    Raises PageForgeError for any other source, and for one that was closed or freed.
    """
    watched = _source(source)
    recording = Recording(watched)
    with watched.telling(recording._on_step):
        try:
            yield recording
        finally:
            recording._end()


class Recording:
    """The rows of a run as they come; they stay when it is over.

    `source`: "engine", "cache" or "pool". `num_steps`: of the source, so far. `steps_per_row`: 1,
    or in long runs a power of two, so that there are never more than `MOST_ROWS` rows.
    `sampling_s`: seconds that all sampling took.
    """

    def __init__(self, watched: _Source):
        self.source = watched.kind
        self.num_steps = 0
        self.steps_per_row = 1
        self.sampling_s = 0.0
        self._began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._clock = time.perf_counter()
        self._seconds: float | None = None
        self._watched: _Source | None = watched
        self._pool: Row = {}  # what its pool is
        self._device = torch.device("cpu")
        self._rows: list[Row] = []
        self._counter = itertools.count(1)
        self._lock = threading.Lock()
        self._sample("begin")

    @property
    def rows(self) -> list[Row]:
        """A dict for each sample, all with the same keys.

        `when`: "begin", "step" or "end"; `step`: steps until then; `time_s`: since the beginning;
        `pages_used`, `pages_cached`, `pages_free`, `bytes_in_use`, `bytes_mapped`: see PoolStats.
        Of engines and caches also `running` sequences, `tokens` that these hold, `total_tokens`
        whose K/V were computed since the beginning; of engines `waiting` requests, and
        `preemptions` since the beginning.
        """
        return [dict(row) for row in self._rows]

    @property
    def seconds(self) -> float:
        """From the beginning to the end, or until now."""
        return time.perf_counter() - self._clock if self._seconds is None else self._seconds

    def save(self, path: str | PathLike[str]) -> None:
        """Write a result file; its name ends in .jsonl. A file of that name is replaced.

        Its folder is made if it is not there: a run cannot be recorded again.
        """
        path = Path(path)
        if path.suffix != SUFFIX:
            raise ResultsError(
                expected("path", f"a name in {SUFFIX}", path, "the report looks for such files")
            )
        source = {
            "source": self.source,
            **self._pool,
            "steps": self.num_steps,
            "steps_per_row": self.steps_per_row,
            "sampling_s": self.sampling_s,
        }
        lines = [
            line(
                "run",
                schema=SCHEMA,
                question=RECORDING,
                title=f"What did this {self.source} do?",
                command=shlex.join(sys.argv),
                began=self._began,
                machine=machine(self._device),
            ),
            line("result", section="source", **source),
            *(line("result", section="step", **row) for row in self._rows),
            line("end", seconds=self.seconds, left_out=[]),
        ]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(lines), encoding="utf-8")

    def __repr__(self) -> str:
        return f"Recording({self.source}, {self.num_steps} steps, {len(self._rows)} rows)"

    # --- inside -----------------------------------------------------------------------------

    def _on_step(self) -> None:
        self.num_steps = step = next(self._counter)
        if step % self.steps_per_row == 0:
            self._sample("step")

    def _end(self) -> None:
        self._sample("end")
        self._seconds = self.seconds
        self._watched = None

    def _sample(self, when: str) -> None:
        """Add a row. Never waits and never raises, for it runs in the middle of others' calls.

        There is none while another thread adds one, or where this thread was interrupted at it (by
        a finalizer that releases pages); and none of what is closed.
        """
        if not self._lock.acquire(blocking=False):
            return
        try:
            began = time.perf_counter()
            with contextlib.suppress(PageForgeError):
                self._add(when, began - self._clock)
            self.sampling_s += time.perf_counter() - began
        finally:
            self._lock.release()

    def _add(self, when: str, time_s: float) -> None:
        watched = self._watched
        pool = None if watched is None else watched.pool
        if watched is None or pool is None:  # it is over, or a cache has not made its pool yet
            return
        if not self._pool:
            self._pool = _description(pool)
            self._device = torch.device(pool.geometry.groups[0].shape.device)
        stats = pool.stats()
        found = watched.read() | {
            "pages_used": stats.pages_used,
            "pages_cached": stats.pages_cached,
            "pages_free": stats.pages_free,
            "bytes_in_use": stats.bytes_in_use,
            "bytes_mapped": stats.bytes_mapped,
        }
        is_call = when == "step" and watched.kind == "pool"
        if is_call and self._rows and found.items() <= self._rows[-1].items():
            return  # it changed nothing
        self._rows.append({"when": when, "step": self.num_steps, "time_s": time_s} | found)
        if len(self._rows) > MOST_ROWS:
            self.steps_per_row *= 2
            self._rows = [
                row
                for row in self._rows
                if row["when"] != "step" or row["step"] % self.steps_per_row == 0
            ]


def _description(pool: PagePool) -> Row:
    """What a pool is, for whoever reads a result file."""
    stats, geometry = pool.stats(), pool.geometry
    return {
        "model": getattr(pool.model_config, "model_type", None),
        "page_size": geometry.page_size,
        "pages_total": stats.pages_total,
        "bytes_total": stats.bytes_total,
        "page_bytes": total_bytes_per_page(geometry.groups),
        "layer_groups": len(geometry.groups),
        "dtype": geometry.groups[0].shape.dtype,
    }


# --- sources --------------------------------------------------------------------------------


class _Source(Protocol):
    """What can be recorded."""

    kind: str

    @property
    def pool(self) -> PagePool | None:
        """Where its pages lie; None before a cache has made its pool."""

    def telling(self, told: Told) -> contextlib.AbstractContextManager[None]:
        """Within this context it tells of its steps."""

    def read(self) -> Row:
        """What it knows beyond its pool."""


def _source(source: object) -> _Source:
    if isinstance(source, Engine):
        return _EngineSource(source)
    if isinstance(source, PagedKVCache):
        return _CacheSource(source)
    if isinstance(source, PagePool):
        return _PoolSource(source)
    raise PageForgeError(
        expected(
            "source",
            "an Engine, a PagedKVCache or a PagePool",
            type(source).__name__,
            "of an EncoderDecoderCache pass self_attention_cache",
        )
    )


class _EngineSource:
    kind = "engine"

    def __init__(self, engine: Engine):
        stats = engine.stats()  # raises where it is closed
        self.pool = engine._pool
        self._core = engine._core
        self._computed, self._preemptions = stats.num_computed_tokens, stats.num_preemptions

    def telling(self, told: Told) -> contextlib.AbstractContextManager[None]:
        return _calls_told(self._core, ("step",), told)

    def read(self) -> Row:
        core = self._core
        return {
            "running": core.rows.num_running,
            "waiting": len(core.waiting),
            "tokens": int(core.rows.computed.sum()),
            "total_tokens": core.num_computed - self._computed,
            "preemptions": core.num_preemptions - self._preemptions,
        }


class _CacheSource:
    kind = "cache"

    def __init__(self, cache: PagedKVCache):
        cache._state.check_live()
        self._state = cache._state
        self._layers = [layer.index for layer in cache.layers if isinstance(layer, PagedLayer)]
        self._total = 0

    @property
    def pool(self) -> PagePool | None:
        return self._state.pool

    @contextlib.contextmanager
    def telling(self, told: Told) -> Iterator[None]:
        last = max(self._layers, default=-1)

        def on_tokens(layer: int, start: int, stop: int) -> None:
            if layer == last:
                self._total += self._stored(stop) - self._stored(start)
                told()

        self._state.watchers.append(on_tokens)
        try:
            yield
        finally:
            self._state.watchers.remove(on_tokens)

    def read(self) -> Row:
        lengths = self._state.lengths.values()
        return {
            "running": self._state.batch_size,
            "tokens": self._stored(max(lengths, default=0)),
            "total_tokens": self._total,
        }

    def _stored(self, length: int) -> int:
        """Tokens of all rows of this length, less the padding that is not stored."""
        batch = self._state.batch
        return 0 if batch is None else sum([max(0, length - start) for start in batch.starts])


class _PoolSource:
    kind = "pool"

    def __init__(self, pool: PagePool):
        pool.check_open()
        self.pool = pool

    def telling(self, told: Told) -> contextlib.AbstractContextManager[None]:
        return _calls_told(self.pool, CHANGES, told)

    def read(self) -> Row:
        return {}


# --- calls that are watched -----------------------------------------------------------------


class _WatchedMethod:
    """Stands for a method of one object, and tells of each call that returns."""

    def __init__(self, owner: object, name: str):
        self.method = getattr(owner, name)
        self.is_own = name in vars(owner)  # somebody else stands for it already
        self.watchers: list[Told] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self.method(*args, **kwargs)
        for told in list(self.watchers):
            told()
        return result


@contextlib.contextmanager
def _calls_told(owner: object, names: Sequence[str], told: Told) -> Iterator[None]:
    """Within this context `told` is called after each call of these methods of `owner`.

    Several may watch the same object, and leave in any order: the last one puts it back.
    """
    with contextlib.ExitStack() as stack:
        for name in names:
            method = vars(owner).get(name)
            if not isinstance(method, _WatchedMethod):
                method = _WatchedMethod(owner, name)
                setattr(owner, name, method)
            method.watchers.append(told)
            stack.callback(_leave, owner, name, method, told)
        yield


def _leave(owner: object, name: str, method: _WatchedMethod, told: Told) -> None:
    method.watchers.remove(told)
    if method.watchers or vars(owner).get(name) is not method:
        return
    if method.is_own:
        setattr(owner, name, method.method)
    else:
        delattr(owner, name)  # its class has it
