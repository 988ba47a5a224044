"""The order of server/'s packages and files is the table of its README, and dialects meet at their waist alone."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import kakera.server

HOME = Path(kakera.server.__file__).parent
DIALECTS = ("openai", "anthropic", "responses")


def rows() -> list[list[str]]:
    """The names of each row of the table, bottom to top."""
    lines = re.findall(r"^\| (`.*?`) \|", (HOME / "README.md").read_text(), re.MULTILINE)
    return [[name.strip("/").removesuffix(".py") for name in re.findall(r"`(.+?)`", line)] for line in lines]


def imports() -> Iterator[tuple[Path, str, str]]:
    """(file, package or file it is in, what it imports of server/), late and typing-only imports too."""
    for path in HOME.rglob("*.py"):
        place = path.relative_to(HOME).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                continue
            for name in names:
                if name.startswith("kakera.server."):
                    yield path, place, name.removeprefix("kakera.server.")


def test_the_table_names_every_package_and_file():
    there = {path.stem for path in HOME.iterdir() if path.suffix == ".py" or path.is_dir()} - {
        "__init__",
        "__pycache__",
    }
    assert sorted(name for row in rows() for name in row) == sorted(there)


def test_nothing_imports_what_stands_below_or_beside_it_in_the_table():
    floor = {name: number for number, row in enumerate(rows()) for name in row}
    found = [(path, place, name.partition(".")[0]) for path, place, name in imports()]
    assert len(found) > 100
    wrong = [f"{path.name}: {other}" for path, place, other in found if place != other and floor[other] >= floor[place]]
    assert not wrong


def test_a_dialect_knows_of_another_one_only_the_chat_body_that_it_becomes():
    known = {
        name
        for _, place, name in imports()
        if place in DIALECTS and name.partition(".")[0] in DIALECTS and not name.startswith(f"{place}.")
    }
    assert known == {"openai.schema.ChatBody"}


def test_files_of_a_package_import_each_other_in_one_direction():
    uses = {path: set[Path]() for path in HOME.rglob("*.py")}
    for path, _, name in imports():
        named = HOME.joinpath(*name.split(".")).with_suffix(".py")  # a file, or a name in it
        uses[path] |= {named, named.parent.with_suffix(".py")} & uses.keys()
    while free := {path for path, others in uses.items() if not others & uses.keys()}:
        uses = {path: others for path, others in uses.items() if path not in free}
    assert not uses, f"a circle among {sorted(uses)}"
