"""What is drawn of each question: one module each. Tables of all records need none."""

from collections.abc import Mapping

from pageforge.report.charts import (
    allocator,
    kernels,
    latency,
    lifecycle,
    parity,
    recording,
    sharing,
    sweep,
    throughput,
    vram,
)
from pageforge.report.figures import Draw

CHARTS: Mapping[str, Draw] = {
    "allocator": allocator.figures,
    "kernels": kernels.figures,
    "latency": latency.figures,
    "lifecycle": lifecycle.figures,
    "parity": parity.figures,
    "recording": recording.figures,
    "sharing": sharing.figures,
    "sweep": sweep.figures,
    "throughput": throughput.figures,
    "vram": vram.figures,
}
"""By question; a question that is not here has tables alone."""
