"""The table in README.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
NAMED = re.compile(r"((?:\w+/)?\w+\.py)?::(\w+)(\.\.\.)?")


def test_every_test_that_the_table_names_exists() -> None:
    rows = [line for line in (HERE / "README.md").read_text().splitlines() if re.match(r"\| \d", line)]
    wrong = []
    for row in rows:
        path = HERE
        names = NAMED.findall(row)
        for file, name, shortened in names:
            if file:
                path = HERE.parent / file if "/" in file else HERE / file
            beginning = f"def {name}" + ("" if shortened else "(")
            if not path.is_file() or beginning not in path.read_text():
                wrong.append((row.split("|")[1].strip(), file, name))
        assert names, row
    assert len(rows) >= 40 and not wrong
