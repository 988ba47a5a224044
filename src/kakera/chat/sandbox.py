"""The sandbox in which a checkpoint's template runs: it reaches nothing, and it comes to an end.

Jinja's own sandbox bounds a range, but not loops in loops, nor what `*` and `**` make.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import loopcontrols
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

STEPS = 3_000_000  # of all loops of one rendering, a few seconds; 20,000 messages of ten parts are 200,000
LONGEST = 10_000_000  # characters or items that `*` repeats to
MOST_BITS = 4_096  # of a number


class Sandbox(ImmutableSandboxedEnvironment):
    """`step` is a filter that each turn of a loop and each macro passes: a filter, since a call costs 10 us here."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        self.template_class = _Template
        self.steps = threading.local()
        self.filters |= {"tojson": _tojson, "step": self.step}
        refuse: Callable[[str], NoReturn] = _raise_exception
        self.globals.update(raise_exception=refuse, strftime_now=lambda form: datetime.now().strftime(form))

    @jinja2.pass_context  # or it would be computed once, when the template is compiled
    def step(self, context: Context, value: bool) -> bool:
        self.steps.left -= 1
        if self.steps.left < 0:
            raise jinja2.TemplateError(f"it takes more than {STEPS} steps")
        return value

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and _bits(left) * abs(right if isinstance(right, int) else 0) > MOST_BITS:
            raise jinja2.TemplateError("a power in it is too large")
        if operator == "*" and (_repeated(left, right) > LONGEST or _bits(left) + _bits(right) > MOST_BITS):
            raise jinja2.TemplateError("a product in it is too large")
        return super().call_binop(context, operator, left, right)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        node: Any
        for node in list(tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock))):
            step = nodes.Filter(nodes.Const(True), "step", [], [], None, None, lineno=node.lineno)
            node.body.insert(0, nodes.ExprStmt(step, lineno=node.lineno))
            if isinstance(node, nodes.For) and node.test is not None:  # items that it leaves out take time, too
                node.test = nodes.And(step, node.test, lineno=node.lineno)
        tree.set_environment(self)
        return tree


class _Template(jinja2.Template):
    environment: Sandbox

    def render(self, *args: Any, **variables: Any) -> str:
        self.environment.steps.left = STEPS
        return super().render(*args, **variables)


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 0


def _repeated(left: Any, right: Any) -> int:
    for text, times in ((left, right), (right, left)):
        if isinstance(text, str | bytes | list | tuple) and isinstance(times, int):
            return len(text) * times
    return 0


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Jinja's own filter escapes HTML, which models were never shown."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
