"""What is drawn of each question: one module each. Tables of all records need none."""

from collections.abc import Mapping

from pageforge.report.charts import decode, kernels, throughput, vram
from pageforge.report.figures import Draw

CHARTS: Mapping[str, Draw] = {
    "decode": decode.figures,
    "kernels": kernels.figures,
    "throughput": throughput.figures,
    "vram": vram.figures,
}
"""By question; a question that is not here has tables alone."""
