"""What a schema or a list of tools may ask for: refused with a 400 above a limit, carried through below it."""

from __future__ import annotations

import json

import pytest
from test_calls_grammar import COMPILER, TOKENIZER, rules, tool

from kakera.constrain.calls import MOST_FUNCTIONS, MOST_PARAMETERS
from kakera.constrain.compiler import consume, next_tokens
from kakera.constrain.formats import grammar_answer, json_answer
from kakera.constrain.lark import grammar
from kakera.constrain.schema import MOST_BRANCHES, MOST_OPTIONAL, NAMED, VALUES, check_schema
from kakera.errors import RequestRefused

HUGE = {"type": "array", "maxItems": 10**9}
LIST = {"items": [1]}  # a sound value, and no sound schema


def refusal(schema) -> str:
    with pytest.raises(RequestRefused) as error:
        check_schema(schema, "here")
    assert error.value.status == 400 and error.value.param == "here"
    return str(error.value)


@pytest.mark.parametrize("name", [*VALUES, *NAMED, "items", "anyOf", "$ref", "x"])
@pytest.mark.parametrize("place", NAMED)
def test_schemas_are_checked_whatever_they_are_called(name, place):
    assert "maxItems is 1000000000" in refusal({place: {name: HUGE}})
    assert "maxItems is 1000000000" in refusal({"items": {"anyOf": [{}, {place: {name: {"items": HUGE}}}]}})
    check_schema({place: {name: {"type": "array", "maxItems": 9}}}, "here")


@pytest.mark.parametrize("name", VALUES)
def test_values_are_no_schemas_unless_a_ref_leads_into_them(name):
    value = {name: [LIST, {"properties": LIST}]}
    check_schema({"properties": {"a": value}}, "here")
    check_schema({"properties": {"a": value, "b": {"$ref": "#/properties/a"}}}, "here")
    for ref in (f"#/properties/a/{name}/0", f"#/properties/a/{name}", f"#/properties/a/%{ord(name[0]):x}{name[1:]}/1"):
        assert "items is a list" in refusal({"properties": {"a": value, "b": {"$ref": ref}}})


@pytest.mark.parametrize(("key", "levels"), [("items", 101), ("items", 100_000), ("default", 100_000)])
def test_what_is_nested_too_deep_is_refused(key, levels):
    deep: object = None
    for _ in range(levels):
        deep = [deep]
    schema: dict = {"anyOf": [{"const": 1}]} | ({"default": deep} if key == "default" else {"prefixItems": deep})
    assert "100 levels" in refusal(schema)


def follow(text: str, answer: str) -> None:
    """The grammar compiles, and leads through the whole answer to its end."""
    COMPILER.check(text, "here")
    matcher = COMPILER.matcher(text)
    for token in TOKENIZER.encode(answer, allow_special=True):
        next_tokens(matcher)
        consume(matcher, token)
    assert matcher.is_accepting()


def schema_grammar(schema: dict) -> str:
    answer = json_answer(schema, "here")
    return grammar("answer", answer.rules)


def optional(count: int) -> dict:
    return {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(count)}}


def union(count: int) -> dict:
    one = {"type": "object", "additionalProperties": False}
    branches = [{**one, "properties": {f"p{i}": {"type": "integer"}}, "required": [f"p{i}"]} for i in range(count)]
    return {"anyOf": branches}


@pytest.mark.parametrize(("make", "limit"), [(optional, MOST_OPTIONAL), (union, MOST_BRANCHES)])
def test_schemas_work_up_to_their_limit_and_not_beyond(make, limit):
    follow(schema_grammar(make(limit)), json.dumps({f"p{limit - 1}": 1}))
    with pytest.raises(RequestRefused, match=f"{limit + 1} .*the limit is {limit}"):
        schema_grammar(make(limit + 1))


def test_single_values_have_no_limit_but_the_grammars_size():
    words = [f"word {i}" for i in range(8000)]
    follow(schema_grammar({"enum": words}), json.dumps(words[-1]))
    follow(schema_grammar({"anyOf": [{"const": word} for word in words]}), json.dumps(words[-1]))


def call(name: str, **arguments: str) -> str:
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


@pytest.mark.slow
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("kind", [{"type": "string"}, {"type": "integer"}, {"enum": ["7"]}])
def test_a_call_may_have_parameters_up_to_the_limit(strict, kind):
    names = [f"p{i}" for i in range(MOST_PARAMETERS + 1)]
    text = rules(tool(strict=strict, properties=dict.fromkeys(names[:-1], kind)))
    follow(text, call("f", **dict.fromkeys(names[-3:-1], "7")))
    follow(text, call("f", **dict.fromkeys(names[:-1:9], "7")))
    with pytest.raises(RequestRefused, match=f"{MOST_PARAMETERS + 1} parameters; the limit is {MOST_PARAMETERS}"):
        rules(tool(strict=strict, properties=dict.fromkeys(names, kind)))


@pytest.mark.slow
def test_there_may_be_functions_up_to_the_limit():
    tools = [tool(f"f{i}", properties={"a": {"type": "string"}}, required=["a"]) for i in range(MOST_FUNCTIONS + 1)]
    for each in tools:
        del each["function"]["parameters"]["$defs"]
    follow(rules(*tools[:-1]), call(f"f{MOST_FUNCTIONS - 1}", a="x"))
    with pytest.raises(RequestRefused, match=f"{MOST_FUNCTIONS + 1} functions; the limit is {MOST_FUNCTIONS}"):
        rules(*tools)


@pytest.mark.parametrize("strict", [True, False])
def test_a_parameter_may_have_thousands_of_values(strict):
    words = [f"word {i}" for i in range(8000)]
    follow(rules(tool(strict=strict, properties={"a": {"type": "string", "enum": words}})), call("f", a=words[-1]))


@pytest.mark.parametrize(
    "text",
    ['start: "a" start', 'start: "a" x\nx: start', "start: start", 'start: a\na: b "x"\nb: a', 'root ::= "ab" root'],
)
def test_a_grammar_without_an_end_is_refused(text):
    answer = grammar_answer(text, "here")
    with pytest.raises(RequestRefused, match="leads to itself") as error:
        COMPILER.check(grammar("answer", answer.rules, answer.nested), "here")
    assert (error.value.status, error.value.code) == (400, "invalid_grammar")


@pytest.mark.parametrize(
    ("text", "answer"),
    [('start: "a" start | "b"', "aab"), ('start: start "a" | "b"', "baa"), ('start: ("a" start)?', "aa")],
)
def test_recursion_with_a_way_out_is_none_of_these(text, answer):
    given = grammar_answer(text, "here")
    follow(grammar("answer", given.rules, given.nested), answer)


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"allOf": [{"$ref": "#"}]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    ],
)
def test_a_ref_that_leads_to_itself_says_so(schema):
    with pytest.raises(RequestRefused, match=r"no text matches it; look for a rule or a \$ref that leads to itself"):
        COMPILER.check(schema_grammar(schema), "here")
