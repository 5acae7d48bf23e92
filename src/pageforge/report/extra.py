"""The libraries of the extra `report`, which a plain install lacks."""

from __future__ import annotations

from importlib.util import find_spec

from pageforge.errors import MissingExtra

LIBRARIES = ("plotly", "matplotlib", "jinja2")


def check_extra() -> None:
    """Raise MissingExtra unless all are there."""
    missing = [name for name in LIBRARIES if find_spec(name) is None]
    if missing:
        raise MissingExtra(
            f"report: expected {', '.join(LIBRARIES)}, got no {' and no '.join(missing)}; "
            f"in a checkout of PageForge, pip install -e '.[report]'"
        )
