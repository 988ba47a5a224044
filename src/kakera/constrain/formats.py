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


def json_object(wanted: Any, param: str) -> Answer | None:
    return json_answer({"type": "object"}, param) if wanted else None


STRUCTURED = {
    "json": json_answer,
    "regex": regex_answer,
    "choice": choice_answer,
    "grammar": grammar_answer,
    "json_object": json_object,
}


def response_format(wish: dict[str, Any], param: str = "response_format") -> Answer | None:
    """OpenAI's response_format, with the types "regex" and "grammar" beside its own. None for plain text."""
    match wish["type"]:
        case "json_object":
            return json_object(True, param)
        case "json_schema":
            given = wish.get("json_schema")
            if not isinstance(given, dict):
                raise RequestRefused(f"{param}.json_schema is missing", param=f"{param}.json_schema")
            return json_answer(given.get("schema", {"type": "object"}), f"{param}.json_schema.schema")
        case "regex":
            return regex_answer(wish.get("regex"), f"{param}.regex")
        case "grammar":
            return grammar_answer(wish.get("grammar"), f"{param}.grammar")
    return None


def structured_outputs(wish: dict[str, Any], param: str = "structured_outputs") -> Answer | None:
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
