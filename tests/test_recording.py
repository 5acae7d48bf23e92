"""record: what its rows say, and that nothing else changes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tests.engine.served import engine_on, prompts
from tests.hf.parity import nan_pool
from tests.hf.tiny_models import attending, tiny
from tests.store.fake_driver import FakeDriver, install
from tests.store.pool_model import two_groups
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel

import pageforge
from pageforge import PagedKVCache, PagePool, SamplingParams, recording
from pageforge.bench.results import read_results
from pageforge.errors import PageForgeError, ResultsError, UseAfterFree
from pageforge.geometry import pages_for
from pageforge.probe import cache_argument

PAGES = ("pages_used", "pages_cached", "pages_free", "bytes_in_use", "bytes_mapped")


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def pool() -> Iterator[PagePool]:
    with nan_pool(tiny("llama")) as pool:
        yield pool


def now(pool: PagePool) -> dict[str, int]:
    stats = pool.stats()
    return {name: getattr(stats, name) for name in PAGES}


def pages_in(row: dict) -> dict[str, int]:
    return {name: row[name] for name in PAGES}


def feed(cache: PagedKVCache, rows: int, length: int) -> None:
    """A forward of `length` tokens."""
    model = tiny("llama")
    model(torch.randint(3, 90, (rows, length)), **{cache_argument(model): cache})


def generate(model: PreTrainedModel, ids: torch.Tensor, cache: PagedKVCache) -> None:
    model.generate(ids, **{cache_argument(model): cache}, max_new_tokens=5, do_sample=False)


# --- caches -----------------------------------------------------------------------------------


def test_a_row_for_every_forward_of_a_cache(pool: PagePool) -> None:
    page = pool.stats().groups[0].bytes_per_page
    with PagedKVCache(pool) as cache, pageforge.record(cache) as recorded:
        lengths = [13, *range(14, 30)]
        for before, length in zip([0, *lengths], lengths, strict=False):
            feed(cache, 2, length - before)
            assert pages_in(recorded.rows[-1]) == now(pool)
        cache.free()
    rows = recorded.rows
    assert [row["when"] for row in rows] == ["begin", *["step"] * len(lengths), "end"]
    assert [row["step"] for row in rows] == [*range(len(lengths) + 1), len(lengths)]
    assert [row["tokens"] for row in rows] == [0, *(2 * length for length in lengths), 0]
    assert [row["total_tokens"] for row in rows] == [0, *(2 * n for n in lengths), 2 * 29]
    assert [row["running"] for row in rows] == [0, *[2] * len(lengths), 0]
    pages = [0, *(2 * pages_for(length, 8) for length in lengths), 0]
    assert [row["pages_used"] for row in rows] == pages
    assert all(row["bytes_in_use"] == n * page for row, n in zip(rows, pages, strict=True))
    assert all(row["bytes_mapped"] >= row["bytes_in_use"] for row in rows)
    times = [row["time_s"] for row in rows]
    assert times == sorted(times)
    assert recorded.num_steps == len(lengths)
    assert 0 < recorded.sampling_s < recorded.seconds == recorded.seconds


def test_tokens_that_are_not_stored_do_not_count(pool: PagePool) -> None:
    mask = torch.ones(2, 20, dtype=torch.int64)
    mask[1, :11] = 0
    with PagedKVCache(pool, attention_mask=mask) as cache, pageforge.record(cache) as recorded:
        feed(cache, 2, 20)
        feed(cache, 2, 1)
        cache.crop(-5)
        feed(cache, 2, 1)
    _, prompt, step, cropped, _ = recorded.rows
    assert [row["tokens"] for row in (prompt, step, cropped)] == [29, 31, 23]
    assert [row["total_tokens"] for row in (prompt, step, cropped)] == [29, 31, 33]


def test_a_cache_that_makes_its_own_pool_has_rows_from_then_on() -> None:
    model = tiny("gemma2")  # two layer groups
    with (
        PagedKVCache(model.config, page_size=8) as cache,
        pageforge.record(cache) as recorded,
    ):
        generate(model, torch.tensor([[5, 6, 7]]), cache)
    assert [row["when"] for row in recorded.rows] == ["step"] * 5 + ["end"]
    assert [row["tokens"] for row in recorded.rows] == [3, 4, 5, 6, 7, 7]


def test_a_captured_step_is_a_step(pool: PagePool) -> None:
    """`fast_decode` writes tokens without `update`, and claims room for them before."""
    with PagedKVCache(pool) as cache, pageforge.record(cache) as recorded:
        feed(cache, 2, 7)
        for _ in range(3):
            cache._state.begin_step()
            cache._state.finish_step()
            cache._state.reach_ahead()
    assert [row["tokens"] for row in recorded.rows[1:-1]] == [14, 16, 18, 20]
    assert [row["total_tokens"] for row in recorded.rows[1:-1]] == [14, 16, 18, 20]


def test_a_fork_is_not_recorded_and_works(pool: PagePool) -> None:
    with PagedKVCache(pool) as cache, pageforge.record(cache) as recorded:
        feed(cache, 1, 9)
        (fork,) = cache.fork()
        feed(fork, 1, 4)
        assert recorded.num_steps == 1
        assert (fork.get_seq_length(), cache.get_seq_length()) == (13, 9)
        with pageforge.record(fork) as other:
            feed(fork, 1, 1)
            feed(cache, 1, 1)
        fork.free()
    assert (recorded.num_steps, other.num_steps) == (2, 1)
    assert other.rows[-1]["tokens"] == 14
    assert other.rows[-1]["total_tokens"] == 1


# --- engines ----------------------------------------------------------------------------------


def test_a_row_for_every_step_of_an_engine() -> None:
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    with engine_on("llama", max_running=3) as engine:
        engine.generate([prompts(1)[0]], params)  # what came before does not count
        before = engine.stats()
        with pageforge.record(engine) as recorded:
            engine.generate(prompts(6), params)
            *_, last = engine.stream(prompts(1)[0], params)
            assert last.finish_reason == "length"
            engine.add_request(prompts(1)[0], params)
            while engine.has_unfinished:
                engine.step()
                stats, row = engine.stats(), recorded.rows[-1]
                assert pages_in(row) == now(engine._pool)
                assert (row["running"], row["waiting"]) == (stats.num_running, stats.num_waiting)
        stats = engine.stats()
    rows = recorded.rows
    assert recorded.num_steps == stats.num_steps - before.num_steps > 24
    assert len(rows) == recorded.num_steps + 2
    computed = stats.num_computed_tokens - before.num_computed_tokens
    assert rows[0]["total_tokens"] == 0
    assert rows[-1]["total_tokens"] == computed
    assert max(row["running"] for row in rows) == 3
    assert max(row["waiting"] for row in rows) == 3
    assert rows[1]["tokens"] == sum(map(len, prompts(3)))
    assert (rows[-1]["running"], rows[-1]["tokens"], rows[-1]["pages_used"]) == (0, 0, 0)
    assert rows[-1]["pages_cached"] > 0
    assert all(row["bytes_mapped"] >= row["bytes_in_use"] for row in rows)


def test_preemptions_show() -> None:
    params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    with (
        engine_on("llama", max_pages=16, prefix_cache=False) as engine,
        pageforge.record(engine) as recorded,
    ):
        engine.generate(prompts(6, longest=20), params)
        assert engine.stats().num_preemptions > 0
        assert recorded.rows[-1]["preemptions"] == engine.stats().num_preemptions
    counts = [row["preemptions"] for row in recorded.rows]
    assert counts == sorted(counts)
    assert counts[0] == 0


def test_a_recorded_engine_answers_the_same_and_is_as_before() -> None:
    params = SamplingParams(max_tokens=20, temperature=0)
    with engine_on("llama") as engine:
        alone = [output.outputs for output in engine.generate(prompts(5), params)]
        engine.drop_prefix_cache()
        before = dict(vars(engine)), dict(vars(engine._core)), dict(vars(engine._pool))
        with pageforge.record(engine), pageforge.record(engine._pool):
            assert "step" in vars(engine._core)
            outputs = [output.outputs for output in engine.generate(prompts(5), params)]
        after = vars(engine), vars(engine._core), vars(engine._pool)
        assert [list(one) for one in after] == [list(one) for one in before]
        engine.generate(prompts(5), params)
    assert outputs == alone


def test_an_engine_that_is_closed_meanwhile() -> None:
    model = attending("llama")
    engine = pageforge.Engine(model, max_pages=50)
    with pageforge.record(engine) as recorded:
        engine.generate([[3, 4, 5]], SamplingParams(max_tokens=3, temperature=0))
        engine.close()
    assert [row["when"] for row in recorded.rows] == ["begin", "step", "step", "step"]
    assert "step" not in vars(engine._core)


# --- pools ------------------------------------------------------------------------------------


def test_a_row_for_every_change_of_a_pool(pool: PagePool) -> None:
    with pageforge.record(pool) as recorded:
        first, second = PagedKVCache(pool), PagedKVCache(pool)
        for cache, length in ((first, 8), (first, 1), (first, 7), (second, 20)):
            feed(cache, 1, length)
            assert pages_in(recorded.rows[-1]) == now(pool)
        first.free()
        assert pages_in(recorded.rows[-1]) == now(pool)
        second.free()
    rows = recorded.rows
    assert [row["pages_used"] for row in rows] == [0, 1, 2, 5, 3, 0, 0]
    assert [row["when"] for row in rows] == ["begin", *["step"] * 5, "end"]
    assert "tokens" not in rows[0]
    changes = [b["pages_used"] - a["pages_used"] for a, b in pairwise(rows)]
    claimed = sum(change for change in changes if change > 0)
    returned = -sum(change for change in changes if change < 0)
    assert claimed == returned == 5


def test_the_calls_that_change_a_pool_are_its_own() -> None:
    assert all(callable(vars(PagePool).get(name)) for name in recording.CHANGES)


def test_cached_pages_show(pool: PagePool) -> None:
    with pageforge.record(pool) as recorded:
        table = pool.new_table()
        pool.append([table], 16)
        cursors = pool.match_prefix([]).cursors
        pool.publish_prefix(table, list(range(16)), cursors)
        pool.release([table])
        again = pool.adopt_prefix(pool.match_prefix(list(range(16))))
        pool.release([again])
        pool.drop_prefix_cache()
    shown = [(row["pages_used"], row["pages_cached"]) for row in recorded.rows]
    assert shown == [(0, 0), (2, 0), (0, 2), (2, 0), (0, 2), (0, 0), (0, 0)]


def test_mapped_bytes_are_the_drivers(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA; nothing is waited for on the way."""
    driver: FakeDriver = install(monkeypatch, 4096)
    monkeypatch.setattr(pageforge.pool, "GRANULE", 4096)
    with PagePool(two_groups(), max_pages=500) as pool, pageforge.record(pool) as recorded:
        table = pool.new_table()
        for _ in range(30):
            pool.append([table], 8 * 8)
            assert recorded.rows[-1]["bytes_mapped"] == driver.mapped
        pool.release([table])
        pool.trim()
        assert recorded.rows[-1]["bytes_mapped"] == driver.mapped
    assert max(row["bytes_mapped"] for row in recorded.rows) > 30 * 8 * 1000


def test_several_threads_change_a_pool(pool: PagePool) -> None:
    def work() -> None:
        for _ in range(50):
            table = pool.new_table()
            pool.append([table], 30)
            pool.release([table])

    with pageforge.record(pool) as recorded:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert recorded.num_steps == 400
    assert recorded.rows[-1]["pages_used"] == 0
    assert all(row["pages_used"] % 4 == 0 for row in recorded.rows)


# --- coming and going -------------------------------------------------------------------------


def test_the_source_is_as_before_also_after_an_exception(pool: PagePool) -> None:
    before = dict(vars(pool))
    with (
        pytest.raises(ZeroDivisionError),
        PagedKVCache(pool) as cache,
        pageforge.record(cache),
        pageforge.record(pool) as recorded,
    ):
        feed(cache, 1, 3)
        raise ZeroDivisionError
    assert list(vars(pool)) == list(before)
    assert cache._state.watchers == []
    assert recorded.rows[-1]["when"] == "end"
    count = len(recorded.rows)
    with PagedKVCache(pool) as cache:
        feed(cache, 1, 3)
    assert len(recorded.rows) == count


def test_two_recordings_may_end_in_any_order(pool: PagePool) -> None:
    first, second = pageforge.record(pool), pageforge.record(pool)
    one = first.__enter__()
    table = pool.new_table()
    pool.append([table], 1)
    other = second.__enter__()
    pool.append([table], 8)
    first.__exit__(None, None, None)
    pool.append([table], 8)
    second.__exit__(None, None, None)
    pool.release([table])
    assert [row["pages_used"] for row in one.rows] == [0, 1, 2, 2]
    assert [row["pages_used"] for row in other.rows] == [1, 2, 3, 3]
    assert not set(recording.CHANGES) & set(vars(pool))


def test_what_stood_for_a_method_before_stands_for_it_again(pool: PagePool) -> None:
    calls = []
    release = pool.release
    pool.release = lambda tables: (calls.append(len(tables)), release(tables))[0]  # type: ignore[method-assign]
    own = vars(pool)["release"]
    with pageforge.record(pool):
        pool.release([])
    assert vars(pool)["release"] is own
    assert calls == [0]


def test_a_call_that_fails_is_no_step(pool: PagePool) -> None:
    with pageforge.record(pool) as recorded, pytest.raises(PageForgeError):
        pool.append([pool.new_table()], 1 << 40)
    assert recorded.num_steps == 0


def test_a_sample_that_is_interrupted_is_not_waited_for(
    pool: PagePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finalizer that runs in the middle of one, or of the pool's own call, may release pages."""
    stats = pool.stats
    with pageforge.record(pool) as recorded:

        def interrupted():
            pool.release([])
            return stats()

        monkeypatch.setattr(pool, "stats", interrupted)
        table = pool.new_table()
        pool.append([table], 1)
        monkeypatch.setattr(pool, "stats", stats)
        with pool._exclusive():
            pool.release([table])  # put off
    assert [row["pages_used"] for row in recorded.rows] == [0, 1, 0]
    assert recorded.num_steps == 3


@pytest.mark.parametrize("source", [None, DynamicCache(), torch.zeros(3)])
def test_other_sources_are_refused(source: object) -> None:
    with pytest.raises(PageForgeError, match="expected an Engine, a PagedKVCache or a PagePool"):
        pageforge.record(source).__enter__()  # type: ignore[arg-type]


def test_the_self_attention_cache_of_a_pair_is_asked_for(pool: PagePool) -> None:
    pair = EncoderDecoderCache(PagedKVCache(pool), DynamicCache())
    with pytest.raises(PageForgeError, match="pass self_attention_cache"):
        pageforge.record(pair).__enter__()  # type: ignore[arg-type]


def test_what_is_over_is_refused(pool: PagePool) -> None:
    cache = PagedKVCache(pool)
    cache.free()
    with pytest.raises(UseAfterFree, match="cache"):
        pageforge.record(cache).__enter__()
    other = PagePool(two_groups(), max_pages=4)
    other.close()
    with pytest.raises(UseAfterFree, match="pool"):
        pageforge.record(other).__enter__()
    with engine_on("llama") as engine:
        pass
    with pytest.raises(PageForgeError, match="closed"):
        pageforge.record(engine).__enter__()


# --- what is kept -----------------------------------------------------------------------------


def test_a_long_run_has_fewer_rows_a_step(pool: PagePool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "MOST_ROWS", 9)
    with PagedKVCache(pool) as cache, pageforge.record(cache) as recorded:
        for _ in range(45):
            feed(cache, 1, 1)
            assert len(recorded.rows) <= 9
    assert (recorded.num_steps, recorded.steps_per_row) == (45, 8)
    assert [row["step"] for row in recorded.rows] == [0, 8, 16, 24, 32, 40, 45]
    assert [row["tokens"] for row in recorded.rows] == [0, 8, 16, 24, 32, 40, 45]


def test_rows_are_the_callers_own(pool: PagePool) -> None:
    with pageforge.record(pool) as recorded:
        recorded.rows[0]["step"] = 7
        recorded.rows.clear()
    assert [row["step"] for row in recorded.rows] == [0, 0]


def test_a_saved_recording_is_a_result_file(tmp_path: Path, pool: PagePool) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text("older")
    with PagedKVCache(pool) as cache, pageforge.record(cache) as recorded:
        feed(cache, 2, 12)
        feed(cache, 2, 1)
    recorded.save(path)
    found = read_results(path)
    assert (found.question, found.complete) == ("recording", True)
    assert found.seconds == recorded.seconds
    assert found.machine["device"] == "cpu"
    source, *rows = found.results
    assert source == {
        "section": "source",
        "source": "cache",
        "model": "llama",
        "page_size": 8,
        "pages_total": pool.stats().pages_total,
        "bytes_total": pool.stats().bytes_total,
        "page_bytes": pool.stats().groups[0].bytes_per_page,
        "layer_groups": 1,
        "dtype": "float32",
        "steps": 2,
        "steps_per_row": 1,
        "sampling_s": recorded.sampling_s,
    }
    assert rows == [{"section": "step", **row} for row in recorded.rows]
    assert list(tmp_path.iterdir()) == [path]


def test_the_folder_of_a_recording_is_made(tmp_path: Path, pool: PagePool) -> None:
    with pageforge.record(pool) as recorded:
        pass
    path = tmp_path / "results" / "mine" / "run.jsonl"
    recorded.save(str(path))
    assert read_results(path).question == "recording"


def test_a_name_that_the_report_would_not_find_is_refused(tmp_path: Path, pool: PagePool) -> None:
    with pageforge.record(pool) as recorded:
        pass
    with pytest.raises(ResultsError, match=r"a name in \.jsonl"):
        recorded.save(tmp_path / "mine.json")
    assert list(tmp_path.iterdir()) == []
