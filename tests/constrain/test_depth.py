"""Deep or costly grammars are a 400 in words before llguidance sees them, and what agents send still compiles."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_calls_grammar import COMPILER
from test_schema_limits import follow, schema_grammar

from kakera.chat.schema_types import declared_types
from kakera.constrain.deep_stack import STACK_BYTES, on_deep_stack
from kakera.constrain.formats import grammar_answer, regex_answer
from kakera.constrain.graph import longest_chain
from kakera.constrain.lark import grammar
from kakera.constrain.lark_text import check_grammar
from kakera.constrain.patterns import LONGEST_TEXT, MOST_REPEATS, pattern_cost
from kakera.constrain.refs import MOST_CHAINED
from kakera.constrain.schema import check_schema
from kakera.errors import RequestRefused

graphs = st.dictionaries(st.integers(0, 6), st.sets(st.integers(0, 6), max_size=4), max_size=7)


def longest_path(edges: dict[int, set[int]]) -> int:
    """By trying all of them."""
    best = 0
    for count in range(1, len(edges) + 1):
        for path in itertools.permutations(edges, count):
            if all(b in edges[a] for a, b in itertools.pairwise(path)):
                best = count
                break
    return best


@settings(max_examples=150)
@given(graphs)
def test_no_way_through_a_graph_is_longer_than_its_longest_chain(edges):
    assert longest_path(edges) <= longest_chain(edges) <= len(edges)


@settings(max_examples=150)
@given(graphs)
def test_without_cycles_the_longest_chain_is_exact(edges):
    edges = {node: {target for target in targets if target > node} for node, targets in edges.items()}
    assert longest_chain(edges) == longest_path(edges)


def test_a_chain_is_found_however_long():
    count = 20_000
    assert longest_chain({i: [i + 1] for i in range(count)}) == count
    assert longest_chain({i: [(i + 1) % count] for i in range(count)}) == count


INTEGER = {"type": "integer"}
LINKS = {
    "bare": lambda ref: ref,
    "items": lambda ref: {"type": "array", "items": ref},
    "prefixItems": lambda ref: {"type": "array", "prefixItems": [ref]},
    "properties": lambda ref: {"type": "object", "properties": {"a": ref}},
    "a property of an odd name": lambda ref: {"type": "object", "properties": {"definitions": ref}},
    "additionalProperties": lambda ref: {"type": "object", "additionalProperties": ref},
    "patternProperties": lambda ref: {"type": "object", "patternProperties": {"^a": ref}},
    "anyOf": lambda ref: {"anyOf": [ref, {"type": "null"}]},
    "allOf": lambda ref: {"allOf": [ref]},
    "if": lambda ref: {"if": {}, "then": ref},
    "deep": lambda ref: {"type": "array", "items": {"anyOf": [{"type": "array", "items": ref}]}},
}


def chain(link, count: int, home: str = "$defs") -> dict:
    parts = {f"d{i}": link({"$ref": f"#/{home}/d{i + 1}"}) for i in range(count)}
    return {"$ref": f"#/{home}/d0", home: {**parts, f"d{count}": INTEGER}}


@pytest.mark.parametrize("link", LINKS.values(), ids=LINKS)
@pytest.mark.parametrize("home", ["$defs", "definitions", "x-parts"])
def test_refs_that_lead_on_and_on_are_refused(link, home):
    with pytest.raises(RequestRefused, match=f"lead through 301 others.*the limit is {MOST_CHAINED}") as error:
        check_schema(chain(link, 300, home), "here")
    assert (error.value.status, error.value.param) == (400, "here")
    check_schema(chain(link, MOST_CHAINED - 1, home), "here")


SPELLINGS = {
    "anchor": lambda i, inner: ({"$anchor": f"d{i}", **inner}, f"#d{i}"),
    "escaped": lambda i, inner: (inner, f"#/%24defs/d{i}"),
    "whole address": lambda i, inner: (inner, f"http://h/root#/$defs/d{i}"),
    "id": lambda i, inner: ({"$id": f"http://h/d{i}", **inner}, f"./x/../d{i}"),
}


@pytest.mark.parametrize("spell", SPELLINGS.values(), ids=SPELLINGS)
def test_refs_are_followed_however_they_are_spelled(spell):
    parts, ref = {}, ""
    for i in reversed(range(300)):
        parts[f"d{i}"], ref = spell(i, {"type": "array", "items": {"$ref": ref}} if ref else INTEGER)
    with pytest.raises(RequestRefused, match=r"lead through|have an"):
        check_schema({"$id": "http://h/root", "$ref": ref, "$defs": parts}, "here")


@pytest.mark.parametrize("name", ["bare", "items", "properties", "anyOf", "allOf", "deep"])
def test_chains_up_to_the_limit_compile(name):
    COMPILER.check(schema_grammar(chain(LINKS[name], MOST_CHAINED - 1)), "here")


def nested(levels: int) -> dict:
    tree: dict = INTEGER
    for _ in range(levels):
        tree = {"type": "object", "properties": {"a": tree}, "required": ["a"], "additionalProperties": False}
    return tree


TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "pattern": "^[a-z]+(-[a-z]+)*$"},
                "kids": {"type": "array", "items": {"$ref": "#/$defs/node", "description": "below"}},
                "other": {"anyOf": [{"$ref": "#/$defs/leaf"}, {"type": "null"}]},
            },
            "required": ["name", "kids"],
            "additionalProperties": False,
        },
        "leaf": {"type": "object", "properties": {"up": {"$ref": "#"}}, "additionalProperties": False},
    },
}


def test_what_agents_send_compiles():
    follow(schema_grammar(TREE), '{"name": "a", "kids": [{"name": "b-c", "kids": [], "other": null}]}')
    answer = "1"
    for _ in range(40):
        answer = f'{{"a": {answer}}}'
    follow(schema_grammar(nested(40)), answer)
    wide = {
        f"d{i}": {"type": "object", "properties": {k: {"$ref": f"#/$defs/d{i + 1}"} for k in "abc"}} for i in range(30)
    }
    COMPILER.check(schema_grammar({"$ref": "#/$defs/d0", "$defs": {**wide, "d30": INTEGER}}), "here")


@pytest.mark.parametrize(
    "link",
    [
        lambda ref: {"type": "object", "properties": {k: {**ref, "type": ["object", "integer"]} for k in "ab"}},
        lambda ref: {"allOf": [ref, ref]},
        lambda ref: {"allOf": [{"properties": {"a": {**ref, "minimum": 0}, "b": {**ref, "minimum": 0}}}]},
    ],
)
def test_copies_of_copies_are_refused(link):
    with pytest.raises(RequestRefused, match="when it is written out; the limit is"):
        check_schema(chain(link, 30), "here")


def test_a_union_of_unions_of_unions_is_read_once():
    parts = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 20} for i in range(30)}
    root = {"$defs": {**parts, "d30": INTEGER}}
    assert declared_types(parts["d0"], root) == {"integer"}


def lark_chain(line: str, last: str, count: int = 400, name: str = "r") -> str:
    return "\n".join(line.format(f"{name}{i}", f"{name}{i + 1}") for i in range(count)) + f"\n{name}{count}: {last}"


@pytest.mark.parametrize(
    "text",
    [
        "start: r0\n" + lark_chain("{0}: {1}", '"a"'),
        lark_chain('{0}: "b" ({1} "c")? | "d"', '"a"') + "\nstart: r0",
        "start: r0 " + lark_chain("{0}: {1}", '"a"').replace("\n", " "),
        "start: r0\r\n" + lark_chain("?{0}.2 : // : x\r\n | {1} -> x", '"a"').replace(".2", ""),
        "start: r0\n" + lark_chain('{0}[capture="]:"]: {1} # "', '"a"'),
        "start: r0::0x0\n" + lark_chain("{0}::_ : {1}::incr([0:3])", '"a"').replace("r400:", "r400::_:"),
        "start: T0\n" + lark_chain("{0}.1: {1}", '"a"', name="T"),
        'start: "a"\n%ignore T0\n' + lark_chain('{0}: "(" {1} ")"', "/a/", name="T"),
        "start[stop=T0]: /a/\n" + lark_chain("{0}: {1}", '"a"', name="T"),
        "start: %lark {\nstart: r0\n" + lark_chain("{0}: {1}", '"a"') + "\n}",
        "start: %json " + json.dumps(chain(LINKS["items"], 400)),
        "start: %json "
        + json.dumps(chain(LINKS["items"], 400)).replace('"$ref"', '"minimum": 1' + "0" * 5000 + ', "$ref"', 1),
        "root ::= r0\n" + lark_chain("{0} ::= {1}", '"a"').replace("r400:", "r400 ::="),
    ],
)
def test_rules_that_lead_on_and_on_are_refused(text):
    with pytest.raises(RequestRefused, match=f"lead through.*the limit is {MOST_CHAINED}") as error:
        if "::=" in text:
            text = grammar_answer(text, "here").nested["given"]
        COMPILER.check(grammar("answer", "answer: @given\n", {"given": text}), "here")
    assert (error.value.status, error.value.param) == (400, "here")


def test_rules_that_lead_back_compile():
    text = "start: r0\n" + lark_chain('{0}: "(" {1} ")" | "+" r0', '"a" | r0', 150)
    answer = grammar_answer(text, "here")
    follow(grammar("answer", answer.rules, answer.nested), "(" * 150 + "a" + ")" * 150)


@pytest.mark.parametrize("opened", ["(" * 5000, "[" * 5000, '"a" (' * 5000, "%lark {\nstart: " * 500])
@pytest.mark.parametrize("start", ["start: ", "start: T\nT: ", "root ::= "])
def test_groups_in_groups_are_refused(opened, start):
    closed = {"(": ")", "[": "]", "{": "}"}
    text = start + opened + '"a"' + "".join(closed[c] for c in reversed(opened) if c in closed)
    with pytest.raises(RequestRefused):
        answer = grammar_answer(text, "here")
        COMPILER.check(grammar("answer", answer.rules, answer.nested), "here")


COSTLY = {
    "a*b?" * 10_000: "20000 repeats",
    "a?" * (MOST_REPEATS + 1): "1001 repeats",
    "(?x)#[\n" + "a*b?" * 5_000: "10000 repeats",
    "a{1000000}": "repeated 1000000 times; the limit is",
    "a{0,99999999999999999999}": "repeated 9999",
    "(a{1000}){1000}": "prescribes a text of 1000000 characters",
    "((a{99}b[)]){99}|c){99}": "prescribes a text of",
    "ab" * 9_000: "prescribes a text of 18000 characters",
    "x|" * 40_000: "80000 characters; the limit is",
}


@pytest.mark.parametrize(("pattern", "message"), COSTLY.items(), ids=[p[:12] for p in COSTLY])
def test_patterns_that_cost_too_much_are_refused_wherever_they_stand(pattern, message):
    def as_lark(text: str) -> None:
        COMPILER.check(grammar("answer", "answer: @given\n", {"given": text}), "here")

    began = time.process_time()
    ways = [
        lambda: regex_answer(pattern, "here"),
        lambda: schema_grammar({"type": "string", "pattern": pattern}),
        lambda: schema_grammar({"type": "object", "patternProperties": {pattern: INTEGER}}),
        lambda: as_lark(f"start: /{pattern}/"),
        lambda: as_lark(f'start: T "x"\nT: "a" /{pattern}/'),
        lambda: as_lark("start: %json " + json.dumps({"type": "string", "pattern": pattern})),
    ]
    for way in ways:
        with pytest.raises(RequestRefused, match=message) as error:
            way()
        assert (error.value.status, error.value.param) == (400, "here")
    assert time.process_time() - began < 10


@pytest.mark.parametrize(
    "pattern",
    [r"a{10000}", "a*b?" * 500, r"^[\w.+-]+@[\w-]+(\.[\w-]+)+$", r"[[a-z]()*{}\]]{0,100}", r"\{[\s\S]{1,4000}\}"],
)
def test_patterns_within_the_limits_are_let_through(pattern):
    pattern_cost(pattern, "here")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("start: T0\n" + lark_chain("{0}: {1} {1}", '"a"', 30, "T"), "prescribes a text"),
        ("start: T0\n" + lark_chain("{0}: {1} {1}", "/a*/", 30, "T"), "repeats"),
        ("start: r0\n" + lark_chain("{0}: {1} {1}", '"a"', 30), "prescribes a text"),
        ("start: T\nT: " + "/b*/ /c?/ " * 2000, "T has 4000 repeats"),
        ("start: " + '"b"? ' * 5000, "the rule start has 5000"),
        ('start: ("a"{500} "b"){500}', "start prescribes a text of 250500"),
        ('start: "a"{1000000}', "repeated 1000000 times"),
        ("start: " + " | ".join(f"/{'a?' * 999}{i}/" for i in range(8)), "all patterns together"),
        ('start: %json {"type": "array", "maxItems": 1000000000}', "maxItems is 1000000000"),
        ("start: %json {", "no JSON"),
        ("start: %json " + "[" * 100_000, "nested too deep|no JSON"),
    ],
)
def test_lark_that_costs_too_much_is_refused(text, message):
    with pytest.raises(RequestRefused, match=message):
        check_grammar(text, "here")


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "integer", "multipleOf": 1_000_003}, "multipleOf add up to 1000003"),
        ({"const": "x" * (LONGEST_TEXT + 1)}, "characters; the limit is"),
        ({"enum": [["x" * LONGEST_TEXT]]}, "characters; the limit is"),
        ({"type": "object", "patternProperties": {f"^{i}$": {} for i in range(60)}}, "60 patternProperties"),
        ({"description": "x" * 600_000}, "600019 characters; the limit is"),
    ],
)
def test_schemas_that_cost_too_much_are_refused(schema, message):
    with pytest.raises(RequestRefused, match=message):
        check_schema(schema, "here")


def test_ordinary_multiples_compile():
    numbers = [5, 0.01, 3600, 1_000_000, 65_536]
    COMPILER.check(schema_grammar({"anyOf": [{"type": "number", "multipleOf": n} for n in numbers]}), "here")


DEATH = """
import json, sys
from llguidance import LLMatcher
from kakera.constrain.deep_stack import on_deep_stack
n = int(sys.argv[1])
defs = {f"d{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(n)}
schema = {"$ref": "#/$defs/d0", "$defs": {**defs, f"d{n}": {}}}
print(repr(on_deep_stack(lambda: LLMatcher.validate_grammar("start: %json " + json.dumps(schema)))))
"""


def test_the_large_stack_holds_many_times_what_is_let_through():
    done = subprocess.run([sys.executable, "-c", DEATH, "4000"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "''\n"), "20 times the limit, 4 times what 8 MB hold"


def test_only_its_own_threads_have_the_large_stack():
    before = threading.stack_size()
    assert on_deep_stack(threading.stack_size) in (before, STACK_BYTES) and threading.stack_size() == before
    with pytest.raises(ZeroDivisionError):
        on_deep_stack(lambda: 1 // 0)
