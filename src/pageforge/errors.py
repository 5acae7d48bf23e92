"""Every error PageForge raises on purpose. A message says name, expected, got, and what to do."""

from __future__ import annotations

from collections.abc import Sequence


class PageForgeError(Exception):
    """Base of all PageForge errors."""


class OutOfPages(PageForgeError, MemoryError):
    """More pages were asked for than can be supplied; nothing was changed.

    `needed` and `available` count pages: of all layer groups together where a pool raises it, of
    one group where an allocator or a page table does.
    """

    def __init__(self, needed: int, available: int, hint: str = ""):
        self.needed = needed
        self.available = available
        self.hint = hint
        advice = hint or (
            "free a sequence, drop the prefix cache or make the pool larger (max_pages, max_memory)"
        )
        super().__init__(f"out of pages: needed {needed}, available {available}; {advice}")

    def __reduce__(self) -> tuple[type[OutOfPages], tuple[int, int, str]]:
        return type(self), (self.needed, self.available, self.hint)


class PageError(PageForgeError, ValueError):
    """A page id is unknown, not held, or released twice; nothing was changed."""


class GeometryError(PageForgeError, ValueError):
    """A size that describes the pool or the model is impossible or does not fit."""


class ShapeError(PageForgeError, ValueError):
    """A tensor's shape, dtype or device does not fit the pool or the cache."""


class ParamsError(PageForgeError, ValueError):
    """A sampling parameter is of the wrong type, out of range, or at odds with another."""


class CropError(PageForgeError, RuntimeError):
    """A roll-back asks for tokens whose pages are gone already."""


class UseAfterFree(PageForgeError, RuntimeError):
    """A cache, page table or pool is used after it was freed or closed."""


class UnsupportedModel(PageForgeError, ValueError):
    """The model, or this use of it, cannot be served rightly."""


class RequestError(PageForgeError, ValueError):
    """A request to the engine, or the engine's own settings, cannot be right."""


class ResultsError(PageForgeError, ValueError):
    """A file of benchmark results is corrupt, not ours, or of a newer PageForge."""


class MissingExtra(PageForgeError, ImportError):
    """A library of an optional extra is not installed; the message says how to get it."""


class ModelNotFound(PageForgeError, OSError):
    """A model could not be found or fetched; the message lists what was tried."""


def expected(name: str, want: object, got: object, fix: str) -> str:
    """The one form of a message about a wrong argument."""
    return f"{name}: expected {want}, got {got}; {fix}"


def listed(values: Sequence[object], most: int = 8) -> str:
    """`values` for a message, cut after `most`."""
    shown = ", ".join(str(value) for value in values[:most])
    return f"[{shown}{', ...' if len(values) > most else ''}]"
