"""What a request wants its answer to look like, as a grammar rule."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from kakera.constrain.lark import LONGEST_GRAMMAR, json_value, literal
from kakera.constrain.patterns import pattern_cost
from kakera.errors import RequestRefused
from kakera.text.json_size import read_json


@dataclass(frozen=True)
class Answer:
    """`rules` define the rule `answer`. `param` is the request field that it comes from."""

    param: str
    rules: str
    nested: dict[str, str] = field(default_factory=dict)


def json_answer(schema: Any, param: str) -> Answer:
    if isinstance(schema, str):  # guided_json may be text
        try:
            schema = read_json(schema)
        except (ValueError, RecursionError) as error:
            raise RequestRefused(f"{param} is not JSON: {error}", param=param) from None
    return Answer(param, f"answer: {json_value(schema, param)}\n")


def regex_answer(pattern: Any, param: str) -> Answer:
    """The whole answer matches; `^` and `$` change nothing. Rust's syntax, which has no look-around."""
    text = regex_to_lark(_text(pattern, param))
    pattern_cost(text, param)
    return Answer(param, f"answer: ANSWER\nANSWER: /{text}/\n")


def choice_answer(choices: Any, param: str) -> Answer:
    if not isinstance(choices, list) or not choices or not all(isinstance(c, str) and c for c in choices):
        raise RequestRefused(f"{param} must be a list of strings that are not empty", param=param)
    # one terminal: as so many rules, 2,000 of them would be more than a parser's row holds
    return Answer(param, f"answer: ANSWER\nANSWER: {' | '.join(map(literal, choices))}\n")


def grammar_answer(text: Any, param: str) -> Answer:
    """Lark, as llguidance reads it, or GBNF."""
    try:
        lark = any_to_lark(_text(text, param))
    except RequestRefused:
        raise
    except Exception as error:  # the converter raises whatever it meets
        raise RequestRefused(
            f"{param} is neither Lark nor GBNF: {error}", param=param, code="invalid_grammar"
        ) from None
    return Answer(param, "answer: @given\n", {"given": lark})


def json_object(wanted: Any, param: str) -> Answer:
    if wanted is not True:
        raise RequestRefused(f"{param} must be true; leave it out to ask for no form", param=param)
    return json_answer({"type": "object"}, param)


STRUCTURED = {
    "json": json_answer,
    "regex": regex_answer,
    "choice": choice_answer,
    "grammar": grammar_answer,
    "json_object": json_object,
}


SCHEMA_FIELDS = frozenset({"name", "description", "schema", "strict"})
FORMATS = {
    "text": frozenset[str](),
    "json_object": SCHEMA_FIELDS | {"json_schema"},
    "json_schema": SCHEMA_FIELDS | {"json_schema"},
    "regex": frozenset({"regex"}),
    "grammar": frozenset({"grammar"}),
}


def response_format(wish: dict[str, Any], param: str = "response_format") -> Answer | None:
    """OpenAI's response_format, with the types "regex" and "grammar" beside its own. None for plain text."""
    given = {name: value for name, value in wish.items() if value is not None}
    kind = given.pop("type")
    if kind == "text":  # demands nothing, so only what would demand something is a mistake
        given = {name: value for name, value in given.items() if any(name in known for known in FORMATS.values())}
    _check_names(given, FORMATS[kind], f"{param} of type {kind}", param)
    match kind:
        case "json_object" | "json_schema":
            return _schema_format(given, kind, param)
        case "regex":
            return regex_answer(given.get("regex"), f"{param}.regex")
        case "grammar":
            return grammar_answer(given.get("grammar"), f"{param}.grammar")
    return None


def _schema_format(given: dict[str, Any], kind: str, param: str) -> Answer:
    """The schema stands in json_schema, as in OpenAI's chat, or beside the type, as in Responses, llama.cpp and
    others. json_object needs none."""
    if "json_schema" in given:
        if given.keys() & SCHEMA_FIELDS:
            fields = ", ".join(sorted(given.keys() & SCHEMA_FIELDS))
            raise RequestRefused(f"{param} has json_schema and beside it {fields}; send one", param=param)
        param += ".json_schema"
        given = given["json_schema"]
        if not isinstance(given, dict):
            raise RequestRefused(f"{param} must be an object with a schema", param=param)
        _check_names(given, SCHEMA_FIELDS, f"{param}, which holds the schema in its field schema,", param)
    elif kind == "json_schema" and "schema" not in given:
        raise RequestRefused(f"{param}.json_schema is missing", param=f"{param}.json_schema")
    return json_answer(given["schema"], f"{param}.schema") if "schema" in given else json_object(True, param)


def _check_names(given: dict[str, Any], known: frozenset[str], what: str, param: str) -> None:
    """A field of a form that nobody reads would be a form that nobody enforces."""
    if unknown := sorted(given.keys() - known):
        takes = f"it takes {', '.join(sorted(known))}" if known else "it takes none"
        raise RequestRefused(f"{what} has no field {', '.join(unknown)[:200]}; {takes}", param=param)


def guided(kind: str, value: Any) -> Answer:
    """The older fields of vLLM: guided_json, guided_regex, guided_choice, guided_grammar."""
    return STRUCTURED[kind](value, f"guided_{kind}")


def structured_outputs(wish: dict[str, Any], param: str = "structured_outputs") -> Answer:
    """vLLM's structured_outputs: one of json, regex, choice, grammar, json_object."""
    given = {name: value for name, value in wish.items() if value is not None}
    unknown = sorted(given.keys() - STRUCTURED.keys())
    if unknown or len(given) != 1:
        what = f"{', '.join(unknown)} can not be enforced here" if unknown else f"{len(given)} kinds are given"
        raise RequestRefused(f"{param}: {what}; give one of {', '.join(STRUCTURED)}", param=param)
    ((name, value),) = given.items()
    return STRUCTURED[name](value, f"{param}.{name}")


def _text(value: Any, param: str) -> str:
    if not isinstance(value, str) or not value:
        raise RequestRefused(f"{param} must be a string that is not empty", param=param)
    if not value.isascii() and any("\ud800" <= c <= "\udfff" for c in value):
        raise RequestRefused(f"{param} holds half of a surrogate pair, which is no character", param=param)
    if len(value) > LONGEST_GRAMMAR:
        raise RequestRefused(f"{param} has {len(value)} characters; the limit is {LONGEST_GRAMMAR}", param=param)
    return value
