"""A client's text stands in a grammar as that text, never as grammar: whatever quotes, breaks and rules it spells."""

from __future__ import annotations

import re

import pytest

from kakera.cli.model import BUNDLED
from kakera.constrain.compiler import Compiler
from kakera.constrain.formats import choice_answer, regex_answer
from kakera.constrain.lark import grammar
from kakera.text.tokenizer import Tokenizer

ODD = [chr(code) for code in (*range(0x20), *range(0x7F, 0xA1), 0x2028, 0x2029, 0xFEFF, 0xFDD0, 0x1F600)]
TEXTS = [
    *(c for c in "\"\\/#%|`'{}@$ "),
    "\\n",
    "\\u0041",
    '"\nanswer: "x',
    '" | "',
    "\n// a\n",
    "%json {}",
    "<[1]>",
    "<|im_end|>",
    '"i',
    "/a/",
]
PATTERNS = ["/", "\\/", "[/]", "\n", "#", '"', "%", "//", "/i", "\nX: /a/", "a/\nANSWER: /b", "[^/]", "\\\\", "[#\n]+"]


@pytest.fixture(scope="module")
def accepts():
    tokenizer = Tokenizer.load(BUNDLED)
    compiler = Compiler(lambda: tokenizer, max(token.id for token in tokenizer.added.values()) + 1)

    def accepted(rules: str, text: str) -> bool:
        text_of = grammar("answer", rules)
        compiler.check(text_of, "p")
        matcher = compiler.matcher(text_of)
        return all(matcher.consume_token(t) for t in tokenizer.encode(text)) and matcher.is_accepting()

    return accepted


def test_a_choice_of_any_text_is_that_text(accepts):
    for text in TEXTS:
        rules = choice_answer([text, "other"], "p").rules
        assert accepts(rules, text) and accepts(rules, "other"), text
        assert not accepts(rules, text + "x") and not accepts(rules, "x"), text
    together = choice_answer([f"{c}." for c in ODD], "p").rules
    assert all(accepts(together, f"{c}.") for c in ODD)


def test_a_pattern_of_any_text_means_what_it_means_elsewhere(accepts):
    for pattern in PATTERNS:
        rules = regex_answer(pattern, "p").rules
        for text in ("/", "a", "b", "\n", "#", '"', "%", "//", "/i", "\\", "\nX: /a/", "X: /a/", "a/\nANSWER: /b"):
            assert accepts(rules, text) == (re.fullmatch(pattern, text) is not None), (pattern, text)
