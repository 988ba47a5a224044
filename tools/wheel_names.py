"""Whether every name that the installed kakera imports from its dependencies is there, late imports included.

Run by the Python of an environment, which holds nothing else: `python -I wheel_names.py`.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterator
from importlib.metadata import requires
from importlib.util import find_spec
from pathlib import Path

# Installed by an extra, or by none, and asked for where they are used alone; kakera itself is held by its own tests.
OPTIONAL = ("kakera", "triton", "cuda", "matplotlib", "httpx", "PIL", "tools")


def imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(module, name in it), "" for the module itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.module, alias.name) for alias in node.names)


def is_missing(module: str, name: str) -> bool:
    try:
        found = importlib.import_module(module)
    except ImportError:
        return True
    if not name or hasattr(found, name):
        return False
    return not hasattr(found, "__path__") or find_spec(f"{module}.{name}") is None


def main() -> int:
    spec = find_spec("kakera")
    assert spec is not None and spec.origin is not None
    home = Path(spec.origin).parent
    asked = {found for path in home.rglob("*.py") for found in imports(ast.parse(path.read_text(encoding="utf-8")))}
    missing = [
        f"{module}: {name or 'the module'}"
        for module, name in sorted(asked)
        if module.split(".")[0] not in OPTIONAL and is_missing(module, name)
    ]
    print(f"{len(asked)} names of {len(requires('kakera') or ())} requirements", *missing, sep="\n")
    return len(missing) > 0


if __name__ == "__main__":
    sys.exit(main())
