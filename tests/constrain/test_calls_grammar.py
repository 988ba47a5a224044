"""Whatever tokens a model prefers: a call that follows the grammar is parsed, typed and of the declared schema."""

from __future__ import annotations

import itertools
import json
import random
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kakera.chat.tools import CallDelta, ToolCallParser
from kakera.constrain.calls import calls_rules
from kakera.constrain.compiler import Compiler, consume, next_tokens
from kakera.constrain.lark import grammar
from kakera.errors import RequestRefused
from kakera.text.tokenizer import Tokenizer
from tiny_model import VOCAB, byte_tokenizer

TOKENIZER = Tokenizer(byte_tokenizer(), "<|im_end|>")
COMPILER = Compiler(lambda: TOKENIZER, VOCAB)
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": -9, "maximum": 9}, "tag": {"enum": ["a", None]}},
    "required": ["x", "tag"],
    "additionalProperties": False,
}
PROPERTIES = {
    "text": {"type": "string", "minLength": 2, "maxLength": 4},
    "unit": {"enum": ["°C", 'say "hi"', ""]},
    "count": {"type": "integer", "minimum": 1, "maximum": 20},
    "ratio": {"type": "number", "minimum": 0, "maximum": 1},
    "deep": {"type": "boolean"},
    "nothing": {"type": "null"},
    "level": {"enum": [1, True, None, "low", [1.5, {"a": "5"}]]},
    "points": {"type": "array", "items": {"$ref": "#/$defs/point"}, "maxItems": 2},
    "point": {"$ref": "#/$defs/point"},
}


def tool(name: str = "f", strict: bool = True, properties=PROPERTIES, **schema) -> dict:
    parameters = {"type": "object", "properties": properties, "$defs": {"point": POINT}, **schema}
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": strict}}


def rules(*tools: dict, parallel: bool = False, usable=lambda rule: True) -> str:
    return grammar("calls", calls_rules(tools, TOKENIZER, parallel, usable))


@cache
def compiled(text: str) -> str:
    COMPILER.check(text, "tools")
    return text


def write(text: str, seed: int, limit: int = 1500, end_chance: float = 1.0) -> str:
    """A text of the grammar, each token drawn from those allowed (printable ones mostly)."""
    matcher, rng, out = COMPILER.matcher(compiled(text)), random.Random(seed), []
    end = TOKENIZER.eos
    while not matcher.is_stopped():
        bits = next_tokens(matcher)
        allowed = [t for t in range(VOCAB) if bits[t // 8] >> t % 8 & 1]
        if end in allowed and (rng.random() < end_chance or allowed == [end]):
            break
        token = rng.choice([t for t in allowed if t != end])
        consume(matcher, token)
        out.append(token)
        assert len(out) < limit
    return TOKENIZER.decode(out)


def parse(text: str, *tools: dict) -> list[tuple[str, dict]]:
    parser = ToolCallParser(list(tools))
    outputs = [*parser.feed(text), *parser.finish(truncated=False)]
    assert all(isinstance(o, CallDelta) or not o.strip() for o in outputs), outputs
    calls: list[list] = []
    for delta in (o for o in outputs if isinstance(o, CallDelta)):
        if delta.id is not None:
            calls.append([delta.name, ""])
        calls[-1][1] += delta.arguments
    return [(name, json.loads(arguments)) for name, arguments in calls]


def is_point(value) -> bool:
    return list(value) == ["x", "tag"] and -9 <= value["x"] <= 9 and value["tag"] in ("a", None)


def check_arguments(arguments: dict) -> None:
    tests = {
        "text": lambda v: isinstance(v, str) and 2 <= len(v) <= 4,
        "unit": lambda v: v in PROPERTIES["unit"]["enum"],
        "count": lambda v: type(v) is int and 1 <= v <= 20,
        "ratio": lambda v: type(v) in (int, float) and 0 <= v <= 1,
        "deep": lambda v: type(v) is bool,
        "nothing": lambda v: v is None,
        "level": lambda v: v in PROPERTIES["level"]["enum"],
        "points": lambda v: isinstance(v, list) and len(v) <= 2 and all(map(is_point, v)),
        "point": is_point,
    }
    for name, value in arguments.items():
        assert tests[name](value), (name, value)


@pytest.mark.slow
@settings(max_examples=20)
@given(st.integers())
def test_a_strict_call_is_of_its_schema(seed):
    wanted = tool(required=[name for name in PROPERTIES if name not in ("ratio", "point")])
    [(name, arguments)] = parse(write(rules(wanted), seed), wanted)
    assert name == "f" and list(arguments) == [key for key in PROPERTIES if key in arguments]
    assert set(wanted["function"]["parameters"]["required"]) <= arguments.keys()
    check_arguments(arguments)


@settings(max_examples=20)
@given(st.integers())
def test_a_call_that_is_not_strict_has_known_names_and_types(seed):
    small = {name: PROPERTIES[name] for name in ("count", "deep", "unit", "point")}
    tools = (tool("get", False, small), tool("get_more", False, {}), tool("other", True, {}))
    calls = parse(write(rules(*tools, parallel=True), seed, end_chance=0.5), *tools)
    assert calls
    for name, arguments in calls:
        assert name in ("get", "get_more", "other") and arguments.keys() <= small.keys()
        check_arguments(arguments)


def accepts(text: str, answer: str) -> bool:
    matcher = COMPILER.matcher(compiled(text))
    tokens = TOKENIZER.encode(answer, allow_special=True)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def call(body: str, name: str = "f") -> str:
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


def parameter(name: str, value: str) -> str:
    return f"<parameter={name}>\n{value}\n</parameter>\n"


CODE = 'if a < b:\n    print("</p>")\n\n'


@pytest.mark.parametrize(
    ("schema", "body", "good"),
    [
        ({"type": "string"}, parameter("a", CODE), True),
        ({"type": "string"}, parameter("b", CODE), False),
        ({"type": ["string", "null"]}, parameter("a", "null"), True),
        ({"type": "integer"}, parameter("a", "7"), True),
        ({"type": "integer"}, parameter("a", "seven"), False),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, parameter("a", "null"), True),
        ({"type": "array"}, parameter("a", '[1, "b"]'), True),
        ({"type": "object"}, parameter("a", "[]"), False),
        ({}, parameter("a", "anything"), True),
        ({"type": "strin"}, parameter("a", "anything"), True),  # not strict: a wrong schema costs nobody the tool
        ({"type": "array", "uniqueItems": True}, parameter("a", "[1]"), True),
        ({"type": "array", "uniqueItems": True}, parameter("a", "1"), False),
        ({"type": "string"}, "", True),
        ({"type": "string"}, parameter("a", "1") * 2, False),
        ({"type": "string"}, parameter("a", "sed 's|</parameter>|X|'\n</parameter> </b> </function>\n"), True),
        ({"type": "string"}, parameter("a", "x</ Parameters>\n</b></function=f>\n</toolcall"), True),
        *(
            ({"type": "string"}, parameter("a", f"x{end}y"), False)
            for end in ("</ parameter>\n</FUNCTION>", "</PARAMS>\n<parameter name=", "</functions>\n</toolcall>")
        ),
    ],
)
def test_what_a_parameter_may_be(schema, body, good):
    def usable(rule: str) -> bool:
        return "uniqueItems" not in rule

    text = rules(tool(strict=False, properties={"a": schema}), usable=usable)
    assert accepts(text, call(body)) == good


def test_a_tool_that_declares_nothing_takes_anything():
    free = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    assert accepts(rules(free), call(parameter("x", "1") + parameter("y", "2")))
    assert not accepts(rules(free), call("", "g")) and not accepts(rules(free), call(parameter(" ", "1")))
    none = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    assert accepts(rules(none), call("")) and not accepts(rules(none), call(parameter("x", "1")))


@pytest.mark.parametrize("parameters", [None, {}, {"type": "object", "additionalProperties": False}, "absent"])
def test_a_tool_without_parameters_takes_none(parameters):
    function = {"name": "f"} | ({} if parameters == "absent" else {"parameters": parameters})
    text = rules({"type": "function", "function": function})
    assert accepts(text, call("")) and not accepts(text, call(parameter("x", "1")))


def test_each_parameter_comes_once():
    properties = {"a": {"type": "string"}, "b": {"type": "integer"}, "c": {"type": "string"}}
    loose, strict = rules(tool("f", False, properties)), rules(tool("f", True, properties, required=["b"]))
    one = {"a": parameter("a", "x"), "b": parameter("b", "1"), "c": parameter("c", "y")}
    for size in range(4):
        for keys in itertools.permutations("abc", size):
            body = "".join(one[key] for key in keys)
            assert accepts(loose, call(body))
            assert accepts(strict, call(body)) == ("b" in keys and list(keys) == sorted(keys))
            assert not any(accepts(text, call(body + one[key])) for key in keys for text in (loose, strict))
    others = rules(tool("f", False, properties, additionalProperties=True))
    assert accepts(others, call(one["a"] + parameter("z", "1") + one["b"] + one["c"] + parameter("y", "2")))
    assert not accepts(others, call(one["b"] + one["b"])[:-40])


@pytest.mark.parametrize("count", [2, 63, 64, 200])
def test_many_parameters(count):
    properties = {f"p{i}": {"type": "integer"} if i % 2 else {"type": "string"} for i in range(count)}
    for strict in (False, True):
        wanted = tool("f", strict, properties, required=["p0", f"p{count - 1}"])
        text = rules(wanted)
        whole = "".join(parameter(key, "1") for key in properties)
        assert accepts(text, call(whole))
        assert accepts(text, call(parameter("p0", "1"))) != strict
        assert accepts(text, call(parameter(f"p{count - 1}", "1") + parameter("p0", "1"))) != strict
        if strict or count <= 63:
            assert not accepts(text, call(parameter("p0", "1") * 2 + parameter(f"p{count - 1}", "1")))


def test_one_call_or_several():
    two = call("") + "\n" + call("")
    free = {"type": "function", "function": {"name": "f"}}
    assert accepts(rules(free, parallel=True), two) and not accepts(rules(free, parallel=False), two)


@pytest.mark.parametrize(
    ("properties", "schema", "message"),
    [
        ({"a": {"type": "string", "pattern": "x"}}, {}, "plain text"),
        ({"a": {"anyOf": [{"type": "string"}, {"type": "array"}]}}, {}, "plain text"),
        ({"a": {"type": "string", "maxLength": 10**9}}, {}, "the limit is"),
        ({"a": {"type": {"b": 1}}}, {}, "plain text"),
        ({"a": {"anyOf": 5}}, {}, "plain text"),
        ({}, {"required": [{}]}, "which properties lacks"),
        ({"a": {"type": "array", "items": [{}]}}, {}, "prefixItems"),
        ({}, {"required": ["a"]}, "required names 'a'"),
        ({}, {"minProperties": 1}, "minProperties"),
        ({}, {"type": "array"}, "not object"),
        ({"a>": {"type": "string"}}, {}, "can not be written"),
        ({"a": {"enum": ["x", "y</parameter>\n</function>"]}}, {}, "ends there"),
        ({"a": {"const": "</function>\n</tool_call>"}}, {}, "ends there"),
        ({"a": {"enum": ["5", 6]}}, {}, "is read as 5"),
        ({"a": {"enum": ["null", None]}}, {}, "is read as None"),
        ({"a": {"type": "string", "enum": [5]}}, {}, "is read as '5'"),
        ([1], {}, "properties is not an object"),
    ],
)
def test_a_strict_tool_is_held_to_its_schema_or_refused(properties, schema, message):
    with pytest.raises(RequestRefused, match=message) as error:
        rules(tool(properties=properties, **schema))
    assert error.value.status == 400 and error.value.param.startswith("tools[0].function.parameters")
    COMPILER.check(rules(tool(strict=False, properties=properties, **schema)), "tools")


def test_many_tools_compile_in_time_and_are_kept():
    text = rules(*(tool(f"tool_{i}", i % 2 == 0) for i in range(60)), parallel=True)
    COMPILER.check(text, "tools")
    assert COMPILER._ready[text] is not None
