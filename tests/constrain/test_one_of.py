"""oneOf is enforced where no value is of two branches, however they are written, and refused in words elsewhere."""

import pytest
from test_calls_grammar import COMPILER

from kakera.constrain.formats import json_answer
from kakera.constrain.lark import grammar
from kakera.constrain.one_of import with_any_of
from kakera.errors import RequestRefused

CAT = {"type": "object", "properties": {"kind": {"const": "cat"}, "meow": {"type": "integer"}}, "required": ["kind"]}
DOG = {"type": "object", "properties": {"kind": {"const": "dog"}, "bark": {"type": "integer"}}, "required": ["kind"]}
REFS = [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}]


def defined(one, other, **more) -> dict:
    return {"oneOf": REFS, "$defs": {"A": one, "B": other, **more}}


def closed(*names: str) -> dict:
    properties = {name: {"type": "string"} for name in names}
    return {"type": "object", "properties": properties, "required": [*names], "additionalProperties": False}


APART = {
    "tags": (CAT, DOG),
    "tags of several values": (
        CAT,
        {"type": "object", "properties": {"kind": {"enum": ["dog", "fox"]}}, "required": ["kind"]},
    ),
    "a tag that one requires": ({**CAT, "required": []}, DOG),
    "tags within": (
        {"type": "object", "properties": {"head": CAT}, "required": ["head"]},
        {"type": "object", "properties": {"head": DOG}, "required": ["head"]},
    ),
    "types": ({"type": "string"}, {"type": "integer"}),
    "null": (CAT, {"type": "null"}),
    "lists of types": ({"type": ["string", "null"]}, {"type": ["integer", "boolean"]}),
    "values": ({"enum": [1, 2]}, {"enum": [3, "1", True, None]}),
    "values and a type": ({"const": "a"}, {"type": "integer"}),
    "a property that the other forbids": (closed("a"), closed("b")),
    "behind allOf": ({"allOf": [CAT, {"required": ["meow"]}]}, DOG),
    "a union beside": ({"anyOf": [CAT, {"type": "string"}]}, DOG),
    "lengths": ({"type": "string", "maxLength": 3}, {"type": "string", "minLength": 4}),
    "numbers": ({"type": "integer", "maximum": 3}, {"type": "number", "minimum": 4}),
    "items": (
        {"type": "array", "items": {"type": "string"}, "minItems": 1},
        {"type": "array", "items": {"type": "integer"}},
    ),
}
MEETING = {
    "one in the other": ({"type": "integer"}, {"type": "number"}),
    "the same value": ({"enum": [1, 2]}, {"enum": [2.0, 3]}),
    "the same nested value": ({"const": {"a": [1]}}, {"enum": [{"a": [1.0]}]}),
    "tags that nobody requires": ({**CAT, "required": []}, {**DOG, "required": []}),
    "empty arrays": ({"type": "array", "items": {"type": "string"}}, {"type": "array", "items": {"type": "integer"}}),
    "anything": (True, CAT),
    "patterns": ({"type": "string", "pattern": "a"}, {"type": "string", "pattern": "b"}),
    "equal lengths": ({"type": "string", "maxLength": 3}, {"type": "string", "minLength": 3}),
    "open objects": (
        {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
        {"type": "object", "properties": {"b": {"type": "string"}}, "required": ["b"]},
    ),
    "a pattern for the tag": (CAT, {"type": "object", "patternProperties": {"^k": {"const": "dog"}}}),
}


def refusal(schema) -> str | None:
    try:
        COMPILER.check(grammar("answer", json_answer(schema, "schema").rules), "schema")
    except RequestRefused as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", APART)
def test_branches_behind_refs_that_exclude_each_other_are_accepted(name):
    schema = defined(*APART[name])
    assert with_any_of(schema)["anyOf"] == REFS
    assert refusal(schema) is None
    within = {"type": "object", "properties": {"oneOf": {"oneOf": REFS}}, "$defs": schema["$defs"]}
    assert with_any_of(within)["properties"] == {"oneOf": {"anyOf": REFS}}
    assert "oneOf" in schema, "the client's own schema is changed"


@pytest.mark.parametrize("name", MEETING)
def test_branches_that_may_meet_are_refused_in_words(name):
    schema = defined(*MEETING[name])
    assert with_any_of(schema) == schema
    assert "write anyOf" in refusal(schema)


def test_schemas_that_lead_to_themselves_come_to_an_end():
    tree = {"type": "object", "properties": {"next": {"oneOf": [{"$ref": "#/$defs/A"}, {"type": "null"}]}}}
    assert refusal(defined(tree, {"type": "string"})) is None
    loop = {"oneOf": REFS}
    assert with_any_of(defined(loop, loop)) == defined(loop, loop)


def test_values_and_names_are_no_schemas():
    for schema in (
        {"const": {"oneOf": [CAT, DOG]}},
        {"default": {"oneOf": [CAT, DOG]}},
        {"properties": {"oneOf": {"type": "string"}}},
        {"oneOf": [CAT, DOG], "$ref": "#/oneOf/0"},
    ):
        assert with_any_of(schema) == schema


@pytest.mark.slow
def test_a_union_of_thousands_is_left_in_time():
    many = {"oneOf": [{"$ref": f"#/$defs/{i}"} for i in range(1_900)], "$defs": {str(i): CAT for i in range(1_900)}}
    assert with_any_of(many) == many
    tags = [{**CAT, "properties": {"kind": {"const": i}}} for i in range(200)]
    assert "anyOf" in with_any_of({"oneOf": tags})
