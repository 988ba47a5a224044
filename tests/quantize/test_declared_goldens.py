"""Random weights and quantised files keep their bytes however a model is declared."""

from __future__ import annotations

import json

from declared_goldens import FILE, computed

GOLDENS = json.loads(FILE.read_text())


def test_bytes_are_those_of_the_goldens():
    found = json.loads(json.dumps(dict(computed())))  # tuples as lists
    assert {what: cases.keys() for what, cases in found.items()} == {w: cases.keys() for w, cases in GOLDENS.items()}
    for what, cases in found.items():
        assert {case: value for case, value in cases.items() if value != GOLDENS[what][case]} == {}, what
