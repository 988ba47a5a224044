"""Grammars compiled for one tokenizer, by llguidance. The server checks with it, the engine makes matchers with it."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from kakera.constrain.deep_stack import on_deep_stack
from kakera.constrain.lark import LONGEST_GRAMMAR
from kakera.constrain.lark_text import check_grammar
from kakera.errors import RequestRefused
from kakera.text.tokenizer import Tokenizer

FORCED = 100  # tokens of a prescribed beginning that a check follows: each is 5 ms if 10,000 characters are prescribed
COMPILED = 32  # grammars kept ready; an agent sends the same tools with every turn
# A step that takes more fails its request: 200,000 units of lexer work are about 15 ms on one core. A lexer state is
# 1 to 2 KB, and grammars that are kept keep theirs: 32 hostile ones of 25,000 states are 1.6 GB at most.
LIMITS = LLParserLimits(step_lexer_fuel=200_000, max_lexer_states=25_000, verbose_errors=False)


# What llguidance says in its own terms, and what it means to who wrote the grammar.
WORDS = (
    (
        "oneOf constraints",
        "a value might be of two branches of a oneOf, which no grammar can rule out; let each require a property with "
        "a const of its own, or write anyOf",
    ),
    ("NoExtensionBias", "no text matches it; look for a rule or a $ref that leads to itself and to nothing else"),
    ("ff_tokens", "it never ends: some rule always leads to itself"),
    ("Current row has", "more than 2,000 alternatives or optional parts can begin at one place"),
    ("too many states", f"its patterns have more than {LIMITS.max_lexer_states} states"),
)


class GrammarFailed(Exception):
    """A matcher can not go on: its limits are used up, or it was fed what it does not allow."""


class Compiler:
    """Thread-safe. Costs nothing until it is first asked; then 1.3 s and 76 MB for 248,320 tokens."""

    def __init__(self, source: Callable[[], Tokenizer], vocab: int, ends: Sequence[int] = ()):
        """`vocab` is the width of the logits; `ends` end an answer, by default the tokenizer's end token does."""
        self._source = source
        self._vocab = vocab
        self._ends = tuple(ends)
        self._lock = Lock()
        self._tokens: LLTokenizer | None = None
        self._ready: OrderedDict[str, LLMatcher] = OrderedDict()

    @property
    def ends(self) -> tuple[int, ...]:
        self.prepare()
        return self._ends

    def prepare(self) -> LLTokenizer:
        """Build the token trie now instead of with the first grammar. Raises GrammarFailed without an end token."""
        with self._lock:
            if self._tokens is None:
                tokenizer = self._source()
                ends = self._ends or (() if tokenizer.eos is None else (tokenizer.eos,))
                if not ends:
                    raise GrammarFailed("the model names no token that ends an answer")
                vocabulary = _Vocabulary(tokenizer, self._vocab, ends)
                self._tokens, self._ends = LLTokenizer(vocabulary, eos_token=[*ends]), ends  # type: ignore[arg-type]
            return self._tokens

    def check(self, grammar: str, param: str) -> None:
        """Raises RequestRefused (400) naming `param` if the grammar can not be used. Takes up to a second or two."""
        if len(grammar) > LONGEST_GRAMMAR:
            raise RequestRefused(
                f"{param}: the grammar has {len(grammar)} characters; the limit is {LONGEST_GRAMMAR}", param=param
            )
        with self._lock:
            known = grammar in self._ready
        if not known:
            check_grammar(grammar, param)
        try:
            matcher = self.matcher(grammar)
            next_tokens(matcher)
            for token in matcher.compute_ff_tokens()[:FORCED]:  # up to the first choice: what has none fails here
                consume(matcher, token)
        except GrammarFailed as error:
            raise RequestRefused(f"{param} can not be enforced: {error}", param=param, code="invalid_grammar") from None

    def compiles(self, lark: str) -> bool:
        """Whether these rules, with a `start`, are a grammar."""
        try:
            check_grammar(lark, "")
        except RequestRefused:
            return False
        return not on_deep_stack(lambda: LLMatcher.validate_grammar(lark))

    def matcher(self, grammar: str) -> LLMatcher:
        """A matcher at the start of the text. Raises GrammarFailed if the grammar does not compile."""
        tokens = self.prepare()
        with self._lock:
            ready = self._ready.get(grammar)
            if ready is not None:
                self._ready.move_to_end(grammar)
                return ready.deep_copy()
        matcher = on_deep_stack(lambda: LLMatcher(tokens, grammar, log_level=0, limits=LIMITS))
        if matcher.is_error():
            raise GrammarFailed(reason(matcher))
        with self._lock:
            self._ready[grammar] = matcher
            if len(self._ready) > COMPILED:
                self._ready.popitem(last=False)
            return matcher.deep_copy()


def next_tokens(matcher: LLMatcher) -> bytearray:
    """One bit a token, least significant first: which may come next. Raises GrammarFailed."""
    bits = bytearray(matcher.compute_bitmask())
    if matcher.is_error():  # the mask is then the end token's alone
        raise GrammarFailed(reason(matcher))
    return bits


def consume(matcher: LLMatcher, token: int) -> None:
    """Raises GrammarFailed if the token is not allowed here."""
    if not matcher.consume_token(token):
        raise GrammarFailed(reason(matcher))


def reason(matcher: LLMatcher) -> str:
    """Why it failed, in words: llguidance's own first lines, without the listing of the source that follows."""
    error = matcher.get_error()
    for sign, words in WORDS:
        if sign in error:
            return words
    lines = re.split(r"\n\s*\d+ \||\n<state>", error)[0]
    return " ".join(lines.split()).removesuffix(" <non-verbose/>")[:400]


class _Vocabulary:
    """A tokenizer as LLTokenizer wants it. Added tokens are special: only a grammar that names them allows them."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab: int, ends: Sequence[int]):
        self._tokenizer = tokenizer
        self.eos_token_id = ends[0]
        self.tokens = [tokenizer.token_bytes(token) for token in range(vocab)]
        self.special_token_ids = sorted({*(t.id for t in tokenizer.added.values() if t.id < vocab), *ends})

    def __call__(self, text: Any) -> list[int]:
        return self._tokenizer.encode(text if isinstance(text, str) else bytes(text).decode("utf-8", "replace"))
