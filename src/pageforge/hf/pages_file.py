"""A batch's pages in a safetensors file. Pages that rows share are written once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from os import PathLike

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from pageforge.batch import SequenceBatch
from pageforge.errors import GeometryError, OutOfPages, UseAfterFree, expected
from pageforge.geometry import KVGeometry
from pageforge.pool import PagePool

FORMAT = "pageforge pages 1"


def save_pages(
    path: str | PathLike[str], batch: SequenceBatch | None, lengths: Mapping[int, int]
) -> None:
    """Write the pages of `batch` and its tables; `lengths`: tokens that each layer has seen."""
    if batch is None or batch.length == 0:
        raise GeometryError(
            "save: expected a cache with tokens, got an empty one; run the model first"
        )
    pool, tensors = batch.pool, {}
    rows: list[list[list[int]]] = [[] for _ in batch.tables]
    for group in range(len(pool.geometry.groups)):
        pages = [table.pages(group) for table in batch.tables]
        unique = sorted({page for ids in pages for page in ids})
        position = {page: index for index, page in enumerate(unique)}
        for row, ids in zip(rows, pages, strict=True):
            row.append([position[page] for page in ids])
        pool.use_stream(pool.pages(group).device)
        index = torch.tensor(unique, dtype=torch.long, device=pool.pages(group).device)
        tensors[f"pages.{group}"] = pool.pages(group).index_select(0, index).cpu()
    metadata = {
        "format": FORMAT,
        "geometry": json.dumps(_described(pool.geometry)),
        "rows": json.dumps(rows),
        "starts": json.dumps([table.start for table in batch.tables]),
        "length": json.dumps(batch.length),
        "lengths": json.dumps(sorted(lengths.items())),
    }
    save_file(tensors, path, metadata)


def load_pages(path: str | PathLike[str], pool: PagePool) -> tuple[SequenceBatch, dict[int, int]]:
    """(batch, tokens of each layer) from a file of `save_pages`.

    Raises GeometryError for a foreign or damaged file or another geometry, OutOfPages.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            names = list(file.keys())
            if metadata.get("format") != FORMAT:
                raise GeometryError(
                    expected(
                        str(path),
                        f"a file with format {FORMAT!r}",
                        metadata.get("format"),
                        "use cache.save",
                    )
                )
            described = _described(pool.geometry)
            if json.loads(metadata["geometry"]) != described:
                raise GeometryError(
                    expected(
                        str(path),
                        f"pages of geometry {described}",
                        metadata["geometry"],
                        "match the pool",
                    )
                )
            contents = [file.get_tensor(f"pages.{group}") for group in range(len(names))]
        rows, starts, length, lengths = (
            json.loads(metadata[name]) for name in ("rows", "starts", "length", "lengths")
        )
        by_layer = dict(lengths)
        batch = SequenceBatch(pool, starts)
        batch.restore(contents, rows, length)
        return batch, by_layer
    except (GeometryError, OutOfPages, UseAfterFree):
        raise
    except (LookupError, TypeError, ValueError) as error:
        raise GeometryError(
            expected(str(path), "page tables that fit its pages", f"{error!r}", "save it anew")
        ) from error
    except SafetensorError as error:
        raise GeometryError(
            expected(str(path), "a safetensors file", f"another ({error})", "use cache.save")
        ) from error


def _described(geometry: KVGeometry) -> list[dict[str, object]]:
    """The geometry as JSON can hold it. Where the pages lie does not matter to their contents."""
    groups = json.loads(json.dumps([asdict(group) for group in geometry.groups]))
    for group in groups:
        del group["shape"]["device"]
    return list(groups)
