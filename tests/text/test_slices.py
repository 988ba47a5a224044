"""Slices of a long text: the ids of the whole, no more at once than a slice, and an end as soon as it is too much."""

import json
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kakera
from kakera.text import slices as module
from kakera.text import tokenizer as tokenizer_module
from kakera.text.slices import slices
from kakera.text.tokenizer import NFC_SHRINKS, Tokenizer

MINI = Path(kakera.__file__).parent / "data" / "mini"
DOCUMENT = json.loads((MINI / "tokenizer.json").read_text())
QWEN = Tokenizer(DOCUMENT)
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}


def with_pattern(pattern: str) -> Tokenizer:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    words = {"type": "Sequence", "pretokenizers": [split, {**BYTE_LEVEL, "use_regex": False}]}
    return Tokenizer({**DOCUMENT, "pre_tokenizer": words})


TOKENIZERS = {  # made by their tests
    "qwen": lambda: QWEN,
    "gpt2": lambda: Tokenizer({**DOCUMENT, "pre_tokenizer": {**BYTE_LEVEL, "use_regex": True}}),
    "digits": lambda: with_pattern(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
        r"\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "suffix": lambda: with_pattern(
        r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|"
        r"\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "lines": lambda: with_pattern(r"[^\n]+|\n+"),  # words end nowhere but at line breaks
}
SCRIPTS = "aZ e\u0301é \n\r\t'’.,_-123½²の話、。！한가\u1112\u1161\u11ab\u212aאअ्😀\u00a0\u3000/\\\"(){}"
texts = st.lists(st.one_of(st.sampled_from(SCRIPTS), st.text(max_size=8), st.sampled_from(["the ", "it's ", "  \n "])))


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(module, "SLICE", 24)
    monkeypatch.setattr(module, "NEAR", 12)
    monkeypatch.setattr(tokenizer_module, "SLICE", 24)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_slices_have_the_ids_of_the_whole(short, name):
    tokenizer, cuts = TOKENIZERS[name](), 0

    @settings(max_examples=60)
    @given(st.lists(texts.map("".join), min_size=3, max_size=6).map("".join))
    def holds(text):
        nonlocal cuts
        pieces = list(slices(text, tokenizer._parts))
        cuts += len(pieces) - 1
        assert "".join(pieces) == text
        whole = tokenizer._ids(text)
        assert [token for piece in pieces for token in tokenizer._ids(piece)] == whole
        assert tokenizer.least_tokens(text) <= len(whole)

    holds()
    assert cuts > 0 or name == "lines"


def test_a_real_text_is_cut_and_has_the_ids_of_the_whole():
    text = Path(tokenizer_module.__file__).read_text() * 30
    assert len(list(slices(text, QWEN._parts))) > 3
    assert QWEN.encode(text) == QWEN._ids(text)


@pytest.mark.slow
@pytest.mark.parametrize(
    "text", ["the quick, brown fox\n", "x = y+1;", "話せますか、", "0x9f3a", "1.5,2.75\n", "<a>&b;"]
)
def test_the_library_never_has_more_than_a_slice_of_an_ordinary_text(monkeypatch, text):
    given: list[int] = []
    tokenizer = Tokenizer(DOCUMENT)
    monkeypatch.setattr(tokenizer, "_ids", lambda piece: given.append(len(piece)) or [1])
    tokenizer.encode(text * (300_000 // len(text)))
    assert len(given) >= 4 and max(given) <= module.SLICE


class Enough(Exception):
    pass


@pytest.mark.slow
@pytest.mark.parametrize("text", ["one two ", "ab", "a", " ", "\n", "-=", "7", "話せ", "e\u0301", "<|im_end|>", "'s"])
def test_what_is_too_long_ends_after_few_slices_and_is_not_remembered(monkeypatch, text):
    tokenizer = Tokenizer(DOCUMENT)
    ids, calls = tokenizer._ids, []
    monkeypatch.setattr(tokenizer, "_ids", lambda piece: calls.append(len(piece)) or ids(piece))

    def watch(tokens: int) -> None:
        if tokens > 20_000:
            raise Enough

    for special in (False, True):
        with pytest.raises(Enough):
            tokenizer.encode(text * (1_000_000 // len(text)), special, watch)
    assert len(calls) <= 12 and sum(calls) < 500_000 and not tokenizer._cache._entries


def test_a_long_word_that_fits_has_its_own_ids():
    word = "ab" * module.SLICE * 2
    assert QWEN.encode(word, watch=lambda tokens: None) == QWEN._ids(word)


def test_no_text_composes_to_less_than_a_third_of_its_bytes():
    """The longest spelling of every character: by singletons, and by the longest spellings of its two parts."""
    apart = {chr(code): unicodedata.decomposition(chr(code)).split() for code in range(0x30000)}
    apart = {char: parts for char, parts in apart.items() if parts and not parts[0].startswith("<")}
    longest: dict[str, int] = {}
    for char, parts in apart.items():
        if len(parts) == 1:  # a singleton, which becomes its other form
            whole = unicodedata.normalize("NFC", char)
            longest[whole] = max(longest.get(whole, len(whole.encode())), len(char.encode()))
    for char, parts in apart.items():
        if len(parts) == 2:
            spelled = sum(longest.get(part, len(part.encode())) for part in (chr(int(part, 16)) for part in parts))
            longest[char] = max(longest.get(char, 0), spelled)
    assert len(longest) > 1000 and all(size <= NFC_SHRINKS * len(char.encode()) for char, size in longest.items())
    jamo = "\u1112\u1161\u11ab"
    assert len(jamo.encode()) == NFC_SHRINKS * len(unicodedata.normalize("NFC", jamo).encode())
