"""`pageforge pool status`: what a pool would be."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.table import Table

from pageforge.cli import options
from pageforge.cli.models import check_device, load
from pageforge.cli.output import facts, print_json, ranges, size, stdout
from pageforge.cli.settings import Settings, resolve
from pageforge.geometry import KVGeometry
from pageforge.pool import PagePool
from pageforge.probe import geometry_of
from pageforge.store import backend_of, is_elastic


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command(
        epilog=options.examples(
            "pageforge pool status",
            "pageforge pool status --model ./my-model --max-memory 50%",
            "pageforge pool status --layers 32 --kv-heads 8 --head-dim 128 --dtype float16",
            "pageforge pool status --json | jq .tokens",
        )
    )(status)


def status(
    model: options.Model = None,
    layers: Annotated[
        int | None,
        options.option(
            "--layers", help="Instead of a model: its layers,", min=1, panel=options.MODEL
        ),
    ] = None,
    kv_heads: Annotated[
        int | None,
        options.option("--kv-heads", help="its key and value heads,", min=1, panel=options.MODEL),
    ] = None,
    head_dim: Annotated[
        int | None, options.option("--head-dim", help="and their size.", min=1, panel=options.MODEL)
    ] = None,
    page_size: options.PageSize = None,
    max_pages: options.MaxPages = None,
    max_memory: options.MaxMemory = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    as_json: options.Json = False,
) -> None:
    """Make the pool that a model would get here, and say what it is like.

    A pool takes memory only as pages are used; this one is empty, and closed again.
    """
    settings = resolve(
        model=model,
        page_size=page_size,
        max_pages=max_pages,
        max_memory=max_memory,
        device=device,
        dtype=dtype,
    )
    shape = (layers, kv_heads, head_dim)
    if any(shape) and not all(shape):
        raise typer.BadParameter("--layers, --kv-heads and --head-dim go together")
    if any(shape) and model is not None:
        raise typer.BadParameter("--model or a geometry, not both")
    what, geometry = _geometry(settings, shape)
    found = collect(what, geometry, settings)
    if as_json:
        print_json(found)
        return
    console = stdout()
    console.print(
        facts(
            [
                ("pool for", found["for"]),
                ("pages", f"{found['pages_total']:,} of {found['page_size']} tokens"),
                ("tokens", f"{found['tokens']:,}, in however many sequences"),
                ("budget", f"{size(found['bytes_total'])} ({found['budget_from']})"),
                ("mapped now", size(found["bytes_mapped"])),
            ]
        )
    )
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("layers", "device", "dtype", "window", "a page", "a chunk", "memory"):
        table.add_column(column, overflow="fold")
    for group in found["groups"]:
        table.add_row(
            group["layers"],
            group["device"],
            group["dtype"],
            str(group["window"] or "-"),
            size(group["bytes_per_page"]),
            f"{group['chunk_pages']} page{'s' * (group['chunk_pages'] > 1)}, "
            f"{size(group['chunk_bytes'])}",
            group["memory"],
        )
    console.print()
    console.print(table)


def collect(what: str, geometry: KVGeometry, settings: Settings) -> dict[str, Any]:
    """Everything that the command shows."""
    with PagePool(geometry, max_pages=settings.max_pages, max_memory=settings.max_memory) as pool:
        stats = pool.stats()
        groups = [
            {
                "layers": ranges(group.layers),
                "device": group.device,
                "dtype": layout.shape.dtype,
                "window": layout.shape.window,
                "pages_total": group.pages_total,
                "bytes_per_page": group.bytes_per_page,
                "chunk_pages": group.pages_per_chunk,
                "chunk_bytes": group.pages_per_chunk * group.bytes_per_page,
                "memory": backend_of(pool.pages(index).device),
                "elastic": is_elastic(pool.pages(index).device),
            }
            for index, (group, layout) in enumerate(zip(stats.groups, geometry.groups, strict=True))
        ]
    pages = min(
        stats.bytes_total // sum(group.bytes_per_page for group in stats.groups),
        *(group.pages_total for group in stats.groups),
    )
    return {
        "for": what,
        "page_size": geometry.page_size,
        "pages_total": pages,
        "tokens": pages * geometry.page_size,
        "bytes_total": stats.bytes_total,
        "budget_from": _budget_from(settings),
        "bytes_mapped": stats.bytes_mapped,
        "groups": groups,
    }


def _geometry(
    settings: Settings, shape: tuple[int | None, int | None, int | None]
) -> tuple[str, KVGeometry]:
    layers, kv_heads, head_dim = shape
    if layers is None or kv_heads is None or head_dim is None:
        model, _ = load(settings)
        return settings.model, geometry_of(model, settings.page_size)
    check_device(settings.torch_device)
    on_cuda = settings.torch_device.type == "cuda"
    dtype = settings.dtype
    if dtype == "auto":
        dtype = "bfloat16" if on_cuda else "float32"
    geometry = KVGeometry.uniform(
        layers,
        kv_heads,
        head_dim,
        dtype=dtype,
        page_size=settings.page_size,
        device=str(settings.torch_device),
    )
    return f"{layers} layers of {kv_heads} heads of {head_dim}", geometry


def _budget_from(settings: Settings) -> str:
    asked = [
        f"{name} from {settings.sources[name]}"
        for name in ("max_pages", "max_memory")
        if getattr(settings, name) is not None
    ]
    return " and ".join(asked) or "most of what is free now; max_pages or max_memory set another"
