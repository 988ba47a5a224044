"""Modules that take a second to import, for the few tests that use them: each worker imports all test modules."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest


class _Lazily:
    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, what: str) -> Any:
        if what.startswith("_"):  # pytest asks each global whether it is a test or a fixture
            raise AttributeError(what)
        return getattr(importlib.import_module(self._name), what)


def lazily(name: str, missing: str = "") -> Any:
    """A stand-in that imports the module when something of it is first used. `missing`: why the tests are skipped
    where it is not installed."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(missing, allow_module_level=True)
    return _Lazily(name)
