"""The order of rooms: no room imports one above it, so there is no circle between rooms; no file reaches itself.

Late imports and those for type checkers count: what a file names, a reader has to know.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

import kakera

HOME = Path(kakera.__file__).parent
DOCS = HOME.parents[1] / "docs"

# Bottom to top, as docs/developers/architecture.md has it.
ORDER = (
    *("errors", "contract", "arch", "target", "plan", "hub", "disk", "cache", "schedule"),
    *("ops", "weights", "kv", "model", "quantize"),
    *("text", "vision", "chat", "constrain", "run", "service", "server", "batch", "evaluate", "bench", "prove", "cli"),
)
WITHOUT_TORCH = [
    "errors",
    "contract",
    "arch",
    "target",
    "plan",
    "disk",
    "hub",
    "cache",
    "schedule",
    "text",
    "vision",
    "chat",
    "constrain",
    "service",
    "server",
    "batch",
    "prove",
]
LAST_FILES_WITH_TORCH = {"target": "as_torch"}  # the one file of such a room that says in torch what the others say


def modules() -> dict[str, Path]:
    found = {}
    for path in HOME.rglob("*.py"):
        parts = path.relative_to(HOME.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path, known: Iterable[str]) -> set[str]:
    """The modules of ours that a file names in any import, wherever it stands in the file."""
    named: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: imports are absolute, so that this test reads them"
            named |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {_module(name, known) for name in named if name.split(".")[0] == "kakera"}


def _module(name: str, known: Iterable[str]) -> str:
    """`name` is a module, or something inside one."""
    return name if name in known else name.rpartition(".")[0]


@functools.cache
def graph() -> dict[str, set[str]]:
    paths = modules()
    return {name: imports(path, paths) - {name} for name, path in paths.items()}


def room(module: str) -> str | None:
    """The room of a module; None: the package itself, which imports nothing, and `python -m kakera`."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] != "__main__" else None


def circle(edges: Mapping[str, Iterable[str]]) -> list[str]:
    """The nodes of some circle, or nothing."""
    path: list[str] = []
    done: set[str] = set()

    def visit(node: str) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node not in done:
            path.append(node)
            for other in edges.get(node, ()):
                if found := visit(other):
                    return found
            done.add(path.pop())
        return []

    return next((found for start in edges if (found := visit(start))), [])


def test_every_room_has_its_place():
    rooms = {room(name) for name in modules()} - {None}
    assert rooms <= set(ORDER), "a new room takes its place in ORDER and in docs/developers/architecture.md"


def test_no_room_imports_a_higher_one():
    place = {name: i for i, name in enumerate(ORDER)}
    upwards = {
        (importer, imported)
        for importer, found in graph().items()
        for imported in found
        if (own := room(importer)) and (other := room(imported)) and place[other] > place[own]
    }
    assert upwards == set()


def test_no_file_reaches_itself():
    assert circle(graph()) == []


def test_circles_are_found():
    assert circle({"a": ["b"], "b": ["c", "d"], "c": [], "d": ["b"]}) == ["b", "d", "b"]
    assert circle({"a": ["a"]}) == ["a", "a"]
    assert circle({"a": ["b", "c"], "b": ["d"], "c": ["d"], "d": []}) == []


def test_the_docs_have_the_same_order():
    text = (DOCS / "developers" / "architecture.md").read_text()
    (block,) = re.findall(r"## Order of rooms\n.*?\n\n((?:    [^\n]+\n)+)", text, re.S)
    assert tuple(re.findall(r"[a-z]+", block)) == ORDER


def test_rooms_without_torch_import_none():
    """Each of their modules, in a process where nothing has been imported, one after the other."""
    light = [
        name
        for name in sorted(modules())
        if (own := room(name)) in WITHOUT_TORCH and name != f"kakera.{own}.{LAST_FILES_WITH_TORCH.get(own)}"
    ]
    code = "import sys\nfor name in sys.argv[1:]:\n __import__(name)\n if 'torch' in sys.modules: sys.exit(name)"
    done = subprocess.run([sys.executable, "-c", code, *light], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"imports torch: {done.stderr}"


@pytest.mark.slow
def test_tests_of_the_lower_rooms_without_torch_import_none():
    """Nor do their test files: who works on one of them waits for no torch."""
    lower = [
        name for name in WITHOUT_TORCH if name not in ("service", "server", "batch", "prove", *LAST_FILES_WITH_TORCH)
    ]
    files = [str(path) for name in lower for path in (Path(__file__).parent / name).glob("*.py")]
    code = (
        "import importlib.util as u, pathlib, pytest, sys\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "for i, path in enumerate(sys.argv[2:]):\n"
        " sys.path.insert(1, str(pathlib.Path(path).parent))\n"
        " spec = u.spec_from_file_location(f'test{i}', path)\n"
        " module = sys.modules[spec.name] = u.module_from_spec(spec)\n"
        " try: spec.loader.exec_module(module)\n"
        " except pytest.skip.Exception: pass\n"
        " if 'torch' in sys.modules: sys.exit(path)\n"
        " sys.path.pop(1)"
    )
    command = [sys.executable, "-c", code, str(Path(__file__).parent), *files]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"imports torch, or nothing: {done.stderr}"
