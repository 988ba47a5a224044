"""Tool calls as a grammar, in the Qwen XML dialect that chat/tools.py reads.

A strict tool's arguments are of its schema: every required parameter, in the order of `properties`. For other tools the
grammar holds names and types, the parameters come in any order and each once, and a schema that can not be enforced
counts as its types alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kakera.chat.parameter_value import carries
from kakera.chat.schema_types import PYTHON_TYPES, Schema, declared_types, resolve, typed_value
from kakera.chat.tags import (
    CALL_NAMES,
    CLOSE,
    FUNCTION,
    FUNCTION_END,
    FUNCTION_NAMES,
    OPEN,
    PARAMETER,
    PARAMETER_END,
    PARAMETER_HEAD,
    PARAMETER_NAMES,
    closing,
)
from kakera.constrain.lark import json_value, literal, token
from kakera.constrain.schema import check_schema
from kakera.errors import RequestRefused
from kakera.text.tokenizer import Tokenizer

ANNOTATIONS = {"type", "title", "description", "default", "examples", "$comment", "deprecated"}
OBJECT_KEYS = {*ANNOTATIONS, "properties", "required", "additionalProperties", "$defs", "definitions", "$schema", "$id"}
# llguidance's parser holds 2,000 items in a row. Each function that may be called is one of them, each parameter that
# may be left out two: 990 of those fit.
MOST_FUNCTIONS, MOST_PARAMETERS = 1_900, 900
MOST_COUNTED = 63  # parameters of a function of which each comes once: a rule of llguidance's carries 64 bits
SCALARS = {"null", "boolean", "integer", "number"}
LINE = "\n"
VALUE_END = f"{LINE}{PARAMETER_END}{LINE}"
# Free text ends as it does for the parser: at a closing tag that the next parameter or the call's end follows, so that
# the tag alone may be part of it, in every spelling that the parser takes. Where parameters are too many to be counted,
# the first closing tag ends it. Counted repeats are states of the lexer, so here there is no bound on them.
_VALUE_CLOSE, _FUNCTION_CLOSE, _CALL_CLOSE = (
    re.sub(r"\{[01],\d+\}", "*", closing(names)).replace("/", r"\/")
    for names in (PARAMETER_NAMES, FUNCTION_NAMES, CALL_NAMES)
)
_NEXT = rf"({_CALL_CLOSE}|<tool_call>)"
SHARED = rf"""
ENDED: /{_VALUE_CLOSE}\s*((?i:<parameter)[ \t]*(=|name)|{_FUNCTION_CLOSE}|{_NEXT})/ | /{_FUNCTION_CLOSE}\s*{_NEXT}/
INSIDE: /(?s:.*)/ & ~(/(?s:.*)/ ENDED /(?s:.*)/)
text_more[lazy]: INSIDE "</parameter>\n<parameter="
text_last[lazy]: INSIDE "</parameter>\n</function>"
text_any[lazy]: INSIDE "</parameter>"
other: /[^>\s"'][^>\n]{{0,63}}/ ">\n"
"""

Usable = Callable[[str], bool]


def calls_rules(tools: Sequence[dict[str, Any]], tokenizer: Tokenizer, parallel: bool, usable: Usable) -> str:
    """Rules that define `calls`: one call or, if `parallel`, several. `usable` says whether a JSON rule compiles.

    Raises RequestRefused (400) naming the tool whose strict schema, or whose name, this dialect can not hold to.
    """
    if len(tools) > MOST_FUNCTIONS:
        raise RequestRefused(f"tools has {len(tools)} functions; the limit is {MOST_FUNCTIONS}", param="tools")
    functions = [_function(i, tool["function"], usable) for i, tool in enumerate(tools)]
    names = " | ".join(f"f{i}" for i in range(len(functions)))
    head = literal(LINE + FUNCTION)
    rules = [
        f"calls: call{' (' + literal(LINE) + ' call)*' if parallel else ''}",
        f"call: {token(tokenizer, OPEN)} {head} ({names}) {literal(LINE)} {token(tokenizer, CLOSE)}",
        *functions,
    ]
    return "\n".join(rules) + SHARED


def _function(index: int, function: dict[str, Any], usable: Usable) -> str:
    path = f"tools[{index}].function"
    strict = bool(function.get("strict"))
    root = function.get("parameters") or {}
    properties = root.get("properties")
    properties = properties if isinstance(properties, dict) else {}
    if len(properties) > MOST_PARAMETERS:
        raise RequestRefused(
            f"{path} has {len(properties)} parameters; the limit is {MOST_PARAMETERS}", param=f"{path}.parameters"
        )
    required = _listed(root.get("required") or [])
    if strict:
        _check_object(root, properties, required, f"{path}.parameters")
    rules, members = [], []
    for number, (key, schema) in enumerate(properties.items()):
        if not strict and not _speakable(key):
            continue
        where = f"{path}.parameters.properties.{key}"
        value, terminal = _value(schema, root, strict, usable, where)
        if terminal:
            value = f"P{index}_{number}"
            rules.append(f"{value}: {terminal}")
        members.append(_Member(literal(_spelled(key, where) + ">" + LINE), value, strict and key in required))
    others = not strict and _takes_others(root)
    order = _counted if len(members) <= MOST_COUNTED else _uncounted
    begin, *ordered = order(index, members, strict, others)
    head = literal(_spelled(function["name"], f"{path}.name") + ">" + LINE)
    return "\n".join([f"f{index}: {head} {begin}", *ordered, *rules])


@dataclass(frozen=True)
class _Member:
    """A parameter: how it begins behind `<parameter=`, and the grammar of its value, which is "" for free text."""

    head: str
    value: str
    required: bool


def _counted(index: int, members: Sequence[_Member], strict: bool, others: bool) -> list[str]:
    """What follows the function's name, and the rules for it: each parameter at most once, if `strict` in their order
    with no required one left out.

    A bit of the rules' state is a parameter that can not come any more. `b` is what follows `<parameter=`, `e` what
    follows a value with its closing tag, `g` is free text with what follows it.
    """
    size, end = len(members), literal(FUNCTION_END)
    choices, needed = [], None
    for bit, member in enumerate(members):
        may = f"bit_clear({bit})" if needed is None else f"and(bit_clear({bit}), bit_set({needed}))"
        state = f"bit_or({(2 << bit) - 1})" if strict else f"set_bit({bit})"
        then = f"{member.value} e{index}" if member.value else f"g{index}"
        choices.append(f"{member.head} {then}::{state} %if {may}")
        needed = bit if member.required else needed
    same = "::_" if members else ""  # rules that look at no bit have no state
    if others:
        choices.append(f"other g{index}{same}")
    if not choices:
        return [end]
    more = "" if others else f" %if bit_clear({size - 1})" if strict else f" %if bit_count_lt([0:{size}], {size})"
    last = "" if needed is None else f" %if bit_set({needed})"
    return [
        f"e{index}::0x0" if members else f"e{index}",
        f"b{index}{same}: {' | '.join(choices)}",
        f"e{index}{same}: {literal(PARAMETER)} b{index}{same}{more} | {end}{last}",
        f"g{index}{same}: text_more b{index}{same}{more} | text_last{last}",
    ]


def _uncounted(index: int, members: Sequence[_Member], strict: bool, others: bool) -> list[str]:
    """The same for functions with more parameters than bits: what is not `strict` may come twice."""
    text = f"text_any {literal(LINE)}"
    rules = [f"q{index}_{i}: {literal(PARAMETER)} {each.head} {each.value or text}" for i, each in enumerate(members)]
    names = [f"q{index}_{i}" for i in range(len(members))]
    if strict:
        body = " ".join(name if each.required else f"{name}?" for name, each in zip(names, members, strict=True))
    else:
        body = f"({' | '.join([*names, *([f'{literal(PARAMETER)} other {text}'] if others else [])])})*"
    return [f"{body} {literal(FUNCTION_END)}", *rules]


def _value(schema: Any, root: Schema, strict: bool, usable: Usable, param: str) -> tuple[str, str]:
    """A parameter's value with its closing tag: the right side of a rule or, as second, of a terminal. Both are empty
    for free text."""
    types = declared_types(schema, root)
    plain = resolve(schema, root)
    if not strict and not types <= PYTHON_TYPES.keys():  # a type that JSON does not have
        return "", ""
    if types and "string" not in types:
        return f"{_json(schema, types, root, strict, usable, param)} {literal(VALUE_END)}", ""
    values = plain.get("enum", [plain["const"]] if "const" in plain else None)
    if isinstance(values, list) and values and plain.keys() <= {*ANNOTATIONS, "enum", "const"}:
        texts = dict.fromkeys(_written(v, types, strict, param) for v in values)
        # a terminal: as so many rules, 2,000 of them would be more than a parser's row holds
        return "", f"({' | '.join(map(literal, texts))}) {literal(VALUE_END)}"
    if not strict:
        return "", ""
    if types == {"string"} and plain.keys() <= {*ANNOTATIONS, "minLength", "maxLength"}:
        check_schema(plain, param)
        least, most = plain.get("minLength", 0), plain.get("maxLength", "")
        return "", "" if (least, most) == (0, "") else _limited(f"{least},{most}")
    if not _tells_apart(schema, root):
        raise RequestRefused(
            f"{param} can not be enforced: a call carries strings as plain text, which enum, const, minLength and "
            "maxLength may limit; in a union only null, boolean, integer and number may stand beside them",
            param=param,
            code="invalid_grammar",
        )
    return "", ""


def _written(value: Any, types: frozenset[str], strict: bool, param: str) -> str:
    """A single value as calls carry it. Raises RequestRefused if it would be read as another one and is `strict`."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    ended = not carries(text)
    if strict and (ended or json.dumps(typed_value(text, types)) != json.dumps(value)):
        what = "ends there" if ended else f"is read as {typed_value(text, types)!r}"
        raise RequestRefused(
            f"{param}: {value!r} can not be written in a call, which carries plain text and {what}",
            param=param,
            code="invalid_grammar",
        )
    return text


def _limited(count: str) -> str:
    return rf"(/(?s:.{{{count}}})/ & ~/(?s:.*){_VALUE_CLOSE}(?s:.*)/) {literal(VALUE_END)}"


def _json(schema: Any, types: frozenset[str], root: Schema, strict: bool, usable: Usable, param: str) -> str:
    shared = {name: root[name] for name in ("$defs", "definitions") if name in root}
    try:
        rule = json_value({**schema, **shared}, param)
        if strict or usable(rule):
            return rule
    except RequestRefused:
        if strict:
            raise
    return json_value({"type": sorted(types)}, param)


def _tells_apart(schema: Any, root: Schema) -> bool:
    """Whether any text is a value of this schema, once it is typed: strings without limits, or unions with scalars."""
    plain = resolve(schema, root)
    branches = plain.get("anyOf", plain.get("oneOf", [{**plain, "type": t} for t in _listed(plain.get("type"))]))
    own = plain.keys() <= {*ANNOTATIONS, "anyOf", "oneOf"}
    return own and all(
        found.get("type") in ("string", *SCALARS) and found.keys() <= ANNOTATIONS
        for found in (resolve(branch, root) for branch in _listed(branches))
    )


def _listed(types: Any) -> list[Any]:
    return types if isinstance(types, list) else [types]


def _check_object(root: Schema, properties: Schema, required: list[Any], param: str) -> None:
    """Raises RequestRefused for what the order "each property once" does not guarantee."""
    unknown = sorted(root.keys() - OBJECT_KEYS)
    missing = [name for name in required if not (isinstance(name, str) and name in properties)]
    listed = not isinstance(root.get("properties", {}), dict)
    if unknown or listed or missing or root.get("type", "object") != "object":
        what = (
            f"{', '.join(unknown)} beside properties"
            if unknown
            else "properties is not an object"
            if listed
            else f"required names {missing[0]!r}, which properties lacks"
            if missing
            else "its type is not object"
        )
        raise RequestRefused(f"{param} is strict and can not be enforced: {what}", param=param, code="invalid_grammar")


def _takes_others(root: Schema) -> bool:
    """Parameters beyond those declared: only where a schema declares none, or says so."""
    others = root.get("additionalProperties", "properties" not in root)
    return bool(root) and (others is True or isinstance(others, dict))


def _speakable(name: str) -> bool:
    return name == name.strip() and PARAMETER_HEAD.fullmatch(f"{PARAMETER}{name}>") is not None


def _spelled(name: str, param: str) -> str:
    if not _speakable(name):
        raise RequestRefused(
            f"{param}: {name!r} can not be written in a call: no >, line breaks, outer spaces or quotes alone",
            param=param,
        )
    return name
