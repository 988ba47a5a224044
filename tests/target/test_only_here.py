"""Only target/ compares names of devices; the other rooms ask it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import kakera

SRC = Path(kakera.__file__).parent
KINDS = {"cpu", "cuda"}


def decided(tree: ast.AST) -> list[int]:
    """Lines that compare with the name of a kind of device, or look something up by it."""

    def named(node: ast.expr | None) -> bool:
        parts = node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else [node]
        return any(isinstance(part, ast.Constant) and part.value in KINDS for part in parts)

    found = []
    for node in ast.walk(tree):
        match node:
            case ast.Compare(left=left, comparators=others):
                asked = [left, *others]
            case ast.Dict(keys=keys):
                asked = keys
            case ast.Subscript(slice=key) | ast.MatchValue(value=key):
                asked = [key]
            case _:
                continue
        if any(map(named, asked)):
            found.append(node.lineno)
    return found


@pytest.mark.slow
def test_no_other_room_compares_names_of_devices() -> None:
    found = {}
    for path in SRC.rglob("*.py"):
        name = path.relative_to(SRC).as_posix()
        if not name.startswith("target/") and (lines := decided(ast.parse(path.read_text()))):
            found[name] = lines
    # `--gpus cpu` is the name of a machine, which its one device has, and not a kind
    words = {"plan/table.py", "plan/advice.py"}
    assert {name: at for name, at in found.items() if name not in words} == {}


def test_a_decision_is_seen_and_a_name_is_none() -> None:
    for text in ('x == "cpu"', 'a != "cuda"', '{"cpu": 1}[kind]', 'limits["cuda"]', 'd.type in ("cuda",)'):
        assert decided(ast.parse(text)), text
    assert decided(ast.parse('match kind:\n    case "cpu":\n        pass'))
    for text in ('torch.device("cpu")', 'tensor.to(device="cuda")', 'Finding("cpu", "ok")', "target.one_memory"):
        assert not decided(ast.parse(text)), text


def test_the_room_imports_what_lies_below_and_torch_in_one_file() -> None:
    for path in (SRC / "target").glob("*.py"):
        found = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module)
            elif isinstance(node, ast.Import):
                found |= {name.name for name in node.names}
        rooms = {name.split(".")[1] for name in found if name.startswith("kakera.")}
        assert rooms <= {"errors", "contract", "arch", "target"}, path.name
        assert any(name.split(".")[0] == "torch" for name in found) == (path.name == "as_torch.py"), path.name
