"""Only whole characters leave the detokenizer."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kakera
from kakera.text.detokenize import Detokenizer
from kakera.text.tokenizer import Tokenizer

tokenizer = Tokenizer.load(Path(kakera.__file__).parent / "data" / "mini")


def byte_tokens(data: bytes) -> list[int]:
    tokens = [tokenizer.token_of_bytes(bytes([b])) for b in data]
    assert None not in tokens
    return tokens


@settings(max_examples=200)
@given(st.text(), st.booleans())
def test_any_text_comes_back_whole(text, bytewise):
    tokens = byte_tokens(text.encode()) if bytewise else tokenizer.encode(text)
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.feed(token) for token in tokens]
    assert detokenizer.finish() == ""
    assert "".join(pieces) == tokenizer.decode(tokens)
    if "\ufffd" not in text:
        assert all("\ufffd" not in piece for piece in pieces)


@pytest.mark.parametrize("text", ["😀", "語", "é"])
def test_a_character_appears_with_its_last_byte(text):
    data = text.encode()
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.feed(token) for token in byte_tokens(data)]
    assert pieces == [""] * (len(data) - 1) + [text]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_an_end_within_a_character_flushes_once(size):
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.feed(token) for token in byte_tokens("😀".encode()[:size])] == [""] * size
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


def test_control_tokens_are_silent_and_tags_are_not():
    detokenizer = Detokenizer(tokenizer)
    ids = tokenizer.encode("<|im_start|><tool_call><|im_end|>", allow_special=True)
    assert "".join(map(detokenizer.feed, ids)) == "<tool_call>"
