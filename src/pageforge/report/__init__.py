"""What benchmarks found, to look at: a page that needs nothing else, and pictures."""

from pageforge.report.write import write_report

__all__ = ["write_report"]
