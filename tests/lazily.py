"""Modules that take a second to import, for the few tests that use them: each worker imports all test modules."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import pytest


def lazily(name: str, missing: str = "") -> Any:
    """The module, imported when something of it is first used. `missing`: why the tests are skipped without it."""
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.find_spec(name)
    if spec is None or spec.loader is None:
        pytest.skip(missing, allow_module_level=True)
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
