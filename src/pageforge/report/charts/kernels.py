"""Kernels: how near to what the device can do, beside their peers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pageforge.report.axis import Axis
from pageforge.report.figures import Figure, Record, failures, grouped, ran
from pageforge.report.panels.bars import Bar, Bars
from pageforge.report.panels.curves import Curve, Curves

PEERS = {
    "fa3": "FlashAttention-3",
    "flashinfer": "FlashInfer",
    "sdpa flash": "SDPA flash",
    "sdpa cudnn": "SDPA cuDNN",
    "sdpa efficient": "SDPA efficient",
}
"""By how their candidates' names begin: of several variants the fastest is drawn."""

RATE = Axis("rate", "B/s", prefixed=True)

RANDOM = "Queries, keys and values are random numbers; every output was checked."


def figures(results: Sequence[Record]) -> Iterator[Figure]:
    """Decode against the read ceiling; prefill in operations a second; whole pages."""
    yield _decode(results)
    yield _prefill(results)
    yield _cache_ops(results)


def _decode(results: Sequence[Record]) -> Figure:
    records = ran(results, "decode", "us", "bytes", "floor_us")
    return Figure(
        "decode",
        "Decode attention against the memory's rate",
        "Attention of one layer, by graph replay over K/V that no cache holds, as a share of the "
        "rate of a kernel that only reads, measured in the same run. Ours also writes the new "
        "token; peers only read, and the fastest variant of each is drawn.",
        RANDOM,
        [
            Curves(
                case,
                Axis("K/V read", "B", prefixed=True, log=True),
                Axis("share of the read ceiling"),
                [_shares(name, runs) for name, runs in _by_candidate(group).items()],
                "points",
                {"read ceiling": 1.0},
            )
            for case, group in grouped(records, "heads", "dtype").items()
        ],
        failures(results, "decode", "candidate"),
    )


def _shares(name: str, records: Sequence[Record]) -> Curve:
    records = sorted(records, key=lambda record: record["bytes"])
    shares = [record["floor_us"] / record["us"] for record in records]
    labels = [f"{record.get('shape', '')}: {record['us']:,.4g} µs" for record in records]
    return Curve(name, [record["bytes"] for record in records], shares, labels=labels)


def _prefill(results: Sequence[Record]) -> Figure:
    records = ran(results, "prefill", "us", "flops", "context")
    return Figure(
        "prefill",
        "A chunk of a prompt",
        "Attention of a chunk of queries over pages, in causal operations a second.",
        RANDOM,
        [
            Curves(
                case,
                Axis("tokens before the chunk"),
                Axis("operations a second", "FLOP/s", prefixed=True),
                [_rates(name, runs) for name, runs in _by_candidate(group).items()],
            )
            for case, group in grouped(records, "heads", "chunk").items()
        ],
        failures(results, "prefill", "candidate"),
    )


def _rates(name: str, records: Sequence[Record]) -> Curve:
    records = sorted(records, key=lambda record: record["context"])
    rates = [record["flops"] / record["us"] * 1e6 for record in records]
    return Curve(name, [record["context"] for record in records], rates)


def _cache_ops(results: Sequence[Record]) -> Figure:
    records = ran(results, "cache", "us", "bytes", "ceiling_bytes_per_s")
    return Figure(
        "pages",
        "Operations on pages",
        "Bytes read and written a second, over those of one plain copy in the same run.",
        RANDOM,
        [
            Bars(case, Axis("share of a plain copy's rate"), [_copy_share(r) for r in group])
            for case, group in grouped(records, "op").items()
        ],
        failures(results, "cache", "candidate", "op"),
    )


def _copy_share(record: Record) -> Bar:
    rate = record["bytes"] / record["us"] * 1e6
    share = rate / record["ceiling_bytes_per_s"]
    name = record["candidate"].partition(" ")[0]
    return Bar(name, share, label=record.get("sizes", ""), note=RATE.text(rate, 3))


def _by_candidate(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Records by candidate; of a peer's variants the fastest in each case, under one name."""
    best: dict[tuple[str, object], Record] = {}
    for record in records:
        case = _peer(record["candidate"]), record.get("shape", record.get("context"))
        if case not in best or record["us"] < best[case]["us"]:
            best[case] = record
    found: dict[str, list[Record]] = {}
    for (name, _), record in best.items():
        found.setdefault(name, []).append(record)
    return found


def _peer(candidate: str) -> str:
    return next((name for start, name in PEERS.items() if candidate.startswith(start)), candidate)
