"""The floors of src/pageforge: who may import whom (docs/architecture.md says why).

`problems(package)` reads every file's imports from its syntax tree, without importing anything.
The first test holds it against the library; the others hold it against small planted trees, one
for each way to break the rules.
"""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "pageforge"

FLOORS = {
    "_version.py": 0,
    "errors.py": 0,
    "interrupts.py": 0,
    "geometry.py": 1,
    "memory/": 2,
    "ops/": 2,
    "store/": 3,
    "probe.py": 3,
    "pool.py": 3,
    "batch.py": 4,
    "compiling.py": 4,
    "graphs.py": 4,
    "model_state.py": 4,
    "hf/": 5,
    "engine/": 6,
    "serve/": 7,
    "bench/": 7,
    "recording.py": 7,
    "report/": 7,
    "cli/": 8,
    "__init__.py": 9,  # only re-exports, so nothing imports from it
}
"""Every file and folder of the package; a file imports from its own floor or lower ones."""

PLANNED = frozenset({"serve/"})
"""Those of them that the design names and nobody has built yet."""

APART = frozenset({"memory/", "ops/"})
"""On one floor, but neither may know the other."""

POLICY = (
    "errors.py",
    "geometry.py",
    "memory/",
    "engine/sequence.py",
    "engine/scheduler.py",
    "engine/text.py",
    "engine/outputs.py",
)
"""Plain Python and numpy: never torch or transformers, not even through another file."""

TENSOR_LIBRARIES = frozenset({"torch", "transformers"})

OPTIONAL = frozenset(
    {
        "accelerate",
        "cuda",
        "cupy",
        "gguf",
        "jinja2",
        "markupsafe",
        "matplotlib",
        "platformdirs",
        "plotly",
        "triton",
    }
)
"""Libraries that may be missing: only these may be imported inside a function."""

EXTRAS = frozenset(
    {"accelerate", "gguf", "jinja2", "markupsafe", "matplotlib", "platformdirs", "plotly"}
)
"""Those of our own extras: a file must load without them, so at its top they stand in a try."""


@dataclass(frozen=True)
class Import:
    """One import statement, or one `import_module("a constant")`."""

    file: str  # relative to the package, with /
    line: int
    library: str  # the top-level name: "torch", "pageforge"
    target: str | None  # the file meant, if it is one of the package's
    hidden: bool  # inside a function
    guarded: bool  # inside a try

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def problems(package: Path) -> list[str]:
    """Every breach of the floors under the folder `package`, each with what to do about it."""
    files = sorted(path.relative_to(package).as_posix() for path in package.rglob("*.py"))
    imports = {file: list(_imports(package, file)) for file in files}
    found = [
        f"{name}: on no floor; add it to FLOORS in tests/test_floors.py and docs/architecture.md"
        for name in sorted(units(package) - FLOORS.keys())
    ]
    for file in files:
        for item in imports[file]:
            found += _problems_of(item, package)
        if is_policy(file):
            found += _tensor_problems(file, imports)
    return found + _circles(imports)


def units(package: Path) -> set[str]:
    """What FLOORS should name: every Python file, and every folder with any file in it."""
    files = [path.relative_to(package) for path in package.rglob("*") if path.is_file()]
    return {
        unit(file.as_posix())
        for file in files
        if "__pycache__" not in file.parts and (len(file.parts) > 1 or file.suffix == ".py")
    }


def unit(file: str) -> str:
    """The entry of FLOORS that a file belongs to: its own name, or its outermost folder's."""
    folder, slash, _ = file.partition("/")
    return folder + slash


def is_policy(file: str) -> bool:
    return file in POLICY or unit(file) in POLICY


def _problems_of(item: Import, package: Path) -> Iterator[str]:
    """What one import statement breaks by itself."""
    if item.hidden and item.library not in OPTIONAL:
        yield (
            f"{item}: imports {item.target or item.library} inside a function; move it to the top "
            f"(an optional third-party library belongs in OPTIONAL)"
        )
    if item.library in EXTRAS and not item.hidden and not item.guarded:
        yield (
            f"{item}: imports {item.library} at its top, but a plain install lacks it; "
            f"import it inside the function that needs it, or in a try"
        )
    if item.target is None:
        return
    if not (package / item.target).exists():
        yield f"{item}: imports {item.target}, but there is no such file"
        return
    here, there = unit(item.file), unit(item.target)
    if here not in FLOORS or there not in FLOORS:
        return
    if FLOORS[there] > FLOORS[here]:
        yield (
            f"{item}: floor {FLOORS[here]} imports {item.target} from floor {FLOORS[there]}; "
            f"move what both need to a lower floor, or pass it in"
        )
    if {here, there} == APART:
        yield f"{item}: imports {item.target}, but {' and '.join(sorted(APART))} stay apart"


def _tensor_problems(file: str, imports: Mapping[str, list[Import]]) -> Iterator[str]:
    """Paths from a policy file to torch or transformers, the shortest for each library."""
    reached = {file: file}  # file -> the way to it
    libraries: set[str] = set()
    for current in (queue := [file]):
        for item in imports[current]:
            if item.library in TENSOR_LIBRARIES - libraries:
                libraries.add(item.library)
                yield (
                    f"{reached[current]}:{item.line}: a policy file reaches {item.library}; "
                    f"name dtypes and devices by strings, and hand tensors over on a higher floor"
                )
            if item.target in imports and item.target not in reached:
                reached[item.target] = f"{reached[current]} -> {item.target}"
                queue.append(item.target)


def _circles(imports: Mapping[str, list[Import]]) -> list[str]:
    """The first circle of imports, if there is one."""
    graph = {
        file: {item.target for item in items if item.target not in (None, file)}
        for file, items in imports.items()
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        circle = " -> ".join(reversed(error.args[1]))
        return [f"{circle}: a circle of imports; files import one way"]
    return []


def _imports(package: Path, file: str) -> Iterator[Import]:
    tree = ast.parse((package / file).read_text(encoding="utf-8"), filename=file)
    hidden = _inside(tree, ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    guarded = _inside(tree, ast.Try)
    for node in ast.walk(tree):
        for name in _imported_names(node, package, file):
            library, *path = name.split(".")
            target = _file_of(package, path) if library == package.name else None
            yield Import(file, node.lineno, library, target, node in hidden, node in guarded)


def _inside(tree: ast.AST, *kinds: type[ast.AST]) -> set[ast.AST]:
    """The nodes inside any node of these kinds."""
    outer = (node for node in ast.walk(tree) if isinstance(node, kinds))
    return {inner for node in outer for inner in ast.walk(node)}


def _imported_names(node: ast.AST, package: Path, file: str) -> Iterator[str]:
    """The absolute dotted names that a statement or an import_module() call imports."""
    here = [package.name, *file.split("/")[:-1]]
    match node:
        case ast.Import(names=names):
            for alias in names:
                yield alias.name
        case ast.ImportFrom(module=module, names=names, level=level):
            base = here[: len(here) + 1 - level] if level else []
            base = [*base, *(module.split(".") if module else [])]
            for alias in names:
                yield ".".join([*base, alias.name])
        case ast.Call(
            func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
            args=[ast.Constant(value=str(name)), *_],
        ):
            level = len(name) - len(name.lstrip("."))
            base = here[: len(here) + 1 - level] if level else []
            yield ".".join([*base, name.lstrip(".")])


def _file_of(package: Path, path: list[str]) -> str:
    """The file that holds pageforge.<path>, where the path's end may be a name inside the file."""
    for end in (len(path), len(path) - 1):
        inside = Path(*path[: max(end, 0)])
        if end > 0 and (package / inside.with_suffix(".py")).is_file():
            return inside.with_suffix(".py").as_posix()
        if (package / inside).is_dir():
            return (inside / "__init__.py").as_posix()
    return "/".join(path)


# The library


def test_the_library_keeps_its_floors() -> None:
    assert not problems(PACKAGE), "\n" + "\n".join(problems(PACKAGE))


def test_all_that_is_named_is_there() -> None:
    """Else a rule about it would hold whatever is done. What is built leaves PLANNED."""
    assert FLOORS.keys() - units(PACKAGE) == PLANNED
    assert not [name for name in POLICY if not (PACKAGE / name).exists()]


# The check itself

SOUND = {
    "__init__.py": "from pageforge.hf.cache import Cache\n__version__ = '1'",
    "errors.py": "class Error(Exception): ...",
    "geometry.py": "import math\nfrom pageforge.errors import Error",
    "memory/__init__.py": "from pageforge.memory.table import Table",
    "memory/allocator.py": "import numpy as np\nfrom pageforge import errors",
    "memory/table.py": "from .allocator import x\nfrom ..geometry import y",
    "ops/__init__.py": "import torch\nfrom . import reference",
    "ops/reference.py": "import torch",
    "store/plain.py": "import pageforge.errors",
    "pool.py": "import torch\nfrom .store import plain\nfrom pageforge.memory import Table",
    "hf/cache.py": "def load():\n    import gguf\n    from cuda.bindings import driver",
    "engine/scheduler.py": "from pageforge.memory.table import Table",
}


@pytest.fixture
def tree(tmp_path: Path):
    """Writes the sound package with some files changed, and returns its problems."""

    def problems_with(changes: Mapping[str, str]) -> list[str]:
        package = tmp_path / "pageforge"
        for file, text in {**SOUND, **changes}.items():
            (package / file).parent.mkdir(parents=True, exist_ok=True)
            (package / file).write_text(text, encoding="utf-8")
        return problems(package)

    return problems_with


def test_a_sound_tree_has_no_problems(tree) -> None:
    assert tree({}) == []


TYPES_ONLY = """\
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from pageforge.hf.cache import Cache
"""
IN_A_TRY = """\
try:
    from pageforge.hf.cache import Cache
except ImportError:
    Cache = None
"""
UPWARD = {  # file, text, the import's line, its target
    "absolute": ("store/plain.py", "from pageforge.batch import x", 1, "batch.py"),
    "plain import": ("pool.py", "import pageforge.hf.cache", 1, "hf/cache.py"),
    "relative": ("ops/reference.py", "from ..pool import PagePool", 1, "pool.py"),
    "relative to the package": ("pool.py", "from . import hf", 1, "hf/__init__.py"),
    "a module as a name": ("pool.py", "from pageforge.hf import cache", 1, "hf/cache.py"),
    "the package's re-exports": ("pool.py", "from pageforge import Cache", 1, "__init__.py"),
    "the whole package": ("pool.py", "import pageforge", 1, "__init__.py"),
    "for types only": ("pool.py", TYPES_ONLY, 3, "hf/cache.py"),
    "in a try": ("pool.py", IN_A_TRY, 2, "hf/cache.py"),
    "import_module": (
        "pool.py",
        "import importlib\nmodule = importlib.import_module('pageforge.hf.cache')",
        2,
        "hf/cache.py",
    ),
    "import_module, relative": (
        "ops/reference.py",
        "from importlib import import_module\nmodule = import_module('..pool', __package__)",
        2,
        "pool.py",
    ),
}


@pytest.mark.parametrize(("file", "text", "line", "target"), UPWARD.values(), ids=UPWARD.keys())
def test_an_upward_import_is_caught(tree, file: str, text: str, line: int, target: str) -> None:
    (problem,) = tree({"hf/__init__.py": "", "batch.py": "", file: text})
    floors = f"floor {FLOORS[unit(file)]} imports {target} from floor {FLOORS[unit(target)]}"
    assert problem.startswith(f"{file}:{line}: {floors}; ")


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("memory/allocator.py", "from pageforge.ops import reference"),
        ("ops/reference.py", "from pageforge.memory.allocator import x"),
    ],
)
def test_memory_and_ops_stay_apart(tree, file: str, text: str) -> None:
    # An allocator that imports ops also reaches torch, which is told apart.
    assert any(p.startswith(f"{file}:1: ") and "stay apart" in p for p in tree({file: text}))


@pytest.mark.parametrize(
    ("changes", "files"),
    [
        (
            {"memory/allocator.py": "from pageforge.memory.table import Table"},
            ["memory/allocator.py", "memory/table.py"],
        ),
        (
            {"memory/allocator.py": "from . import Table"},
            ["memory/__init__.py", "memory/allocator.py", "memory/table.py"],
        ),
        (
            {"batch.py": "from pageforge.graphs import x", "graphs.py": "import pageforge.batch"},
            ["batch.py", "graphs.py"],
        ),
    ],
)
def test_a_circle_is_caught(tree, changes: dict[str, str], files: list[str]) -> None:
    (problem,) = tree(changes)
    assert "circle" in problem
    assert sorted(set(problem.partition(":")[0].split(" -> "))) == files


@pytest.mark.parametrize("library", sorted(TENSOR_LIBRARIES))
@pytest.mark.parametrize(
    "file", [f"{entry}allocator.py" if entry == "memory/" else entry for entry in POLICY]
)
@pytest.mark.parametrize("text", ["import {}", "from {}.nn import x", "import {}.utils as u"])
def test_a_tensor_library_in_the_policy_is_caught(tree, file: str, library: str, text: str) -> None:
    found = tree({file: text.format(library)})
    assert any(p.startswith(f"{file}:1: ") and f"reaches {library}" in p for p in found)


def test_a_policy_file_that_reaches_torch_through_another_is_caught(tree) -> None:
    (problem,) = tree({"engine/scheduler.py": "from pageforge.pool import PagePool"})
    assert problem.startswith("engine/scheduler.py -> pool.py:1: a policy file reaches torch")


def test_the_runner_may_import_torch(tree) -> None:
    assert tree({"engine/runner.py": "import torch, transformers"}) == []


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("def f():\n    import math", "math"),
        ("def f():\n    import torch", "torch"),
        ("async def f():\n    from pageforge.errors import Error", "errors.py"),
        ("class A:\n    def f(self):\n        if 1:\n            from . import memory", "memory/"),
        ("def f():\n    return __import__('math')", "math"),
        ("f = lambda: __import__('math')", "math"),
    ],
)
def test_a_hidden_import_is_caught(tree, text: str, name: str) -> None:
    (problem,) = tree({"pool.py": text})
    assert problem.startswith(f"pool.py:{len(text.splitlines())}: imports {name}")
    assert "inside a function" in problem


def test_a_class_body_hides_nothing(tree) -> None:
    assert tree({"pool.py": "class A:\n    import math"}) == []


@pytest.mark.parametrize("library", sorted(OPTIONAL))
def test_optional_libraries_may_be_imported_inside_functions(tree, library: str) -> None:
    assert tree({"pool.py": f"def f():\n    from {library} import x"}) == []


@pytest.mark.parametrize("library", sorted(EXTRAS))
def test_an_extra_at_the_top_is_caught_unless_it_may_be_missing(tree, library: str) -> None:
    (problem,) = tree({"pool.py": f"import {library}.x"})
    assert problem.startswith(
        f"pool.py:1: imports {library} at its top, but a plain install lacks it"
    )
    guarded = f"try:\n    import {library}\nexcept ImportError:\n    {library} = None"
    assert tree({"pool.py": guarded}) == []


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("extra.py", "extra.py"),
        ("extra/thing.py", "extra/"),
        ("extra/page.html", "extra/"),
        ("extra/deep/thing.py", "extra/"),
        ("__main__.py", "__main__.py"),
    ],
)
def test_what_is_on_no_floor_is_caught(tree, file: str, name: str) -> None:
    (problem,) = tree({file: ""})
    assert problem.startswith(f"{name}: on no floor; add it to FLOORS")


def test_what_python_leaves_behind_and_loose_data_are_on_no_floor(tree) -> None:
    assert tree({"gone/__pycache__/thing.pyc": "", "py.typed": ""}) == []


def test_an_import_of_nothing_is_caught(tree) -> None:
    (problem,) = tree({"pool.py": "from pageforge.memory.gone.deep import x"})
    assert problem == "pool.py:1: imports memory/gone/deep/x, but there is no such file"
