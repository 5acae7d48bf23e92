"""How long is a whole decode step, and how much memory does it take?"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from pageforge.bench.ceilings import read_ceiling
from pageforge.bench.decode_context import DecodeBench
from pageforge.bench.footprint import footprint
from pageforge.bench.generate import generate
from pageforge.bench.steps import steps


def run(bench: DecodeBench) -> None:
    """Steps with cuDNN attention off; generate; memory; then steps with it on."""
    on_cuda = bench.device.type == "cuda"
    if on_cuda:
        rate = read_ceiling(bench.device)
        bench.report.add(section="ceilings", read_bytes_per_s=rate)
        bench.console.print(f"read ceiling {rate / 1e9:,.0f} GB/s\n")
    else:
        rate = None
    with cudnn_attention(False):
        for batch in bench.batches:
            steps(bench, batch, bench.steps, rate, "off")
        generate(bench)
        footprint(bench)
    if on_cuda:
        with cudnn_attention(True):
            for batch in bench.batches:
                steps(bench, batch, bench.cudnn_steps, rate, "on")
    if bench.budget.left_out:
        bench.report.add(section="left out", names=bench.budget.left_out)
        bench.console.print(f"no time left for: {', '.join(bench.budget.left_out)}")


@contextlib.contextmanager
def cudnn_attention(enabled: bool) -> Iterator[None]:
    """Let `scaled_dot_product_attention` choose cuDNN, or not."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(enabled)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
