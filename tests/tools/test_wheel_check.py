"""The check of the wheel, in what needs no environment: bounds become pins, imports are found wherever they stand."""

import ast
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

from tools.wheel_check import lowest
from tools.wheel_names import imports, is_missing

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


def test_every_dependency_has_a_lower_bound_that_becomes_a_pin():
    needed = [Requirement(line) for line in PROJECT["dependencies"]]
    assert lowest(needed) == [line.replace(">=", "==") for line in PROJECT["dependencies"]]


def test_names_are_found_in_late_imports_too_and_what_is_not_there_is_missing():
    source = "import json\ndef f():\n    from os import path, sideways\n    import nowhere.at_all\n"
    found = set(imports(ast.parse(source)))
    assert found == {("json", ""), ("os", "path"), ("os", "sideways"), ("nowhere.at_all", "")}
    assert {each for each in found if is_missing(*each)} == {("os", "sideways"), ("nowhere.at_all", "")}
