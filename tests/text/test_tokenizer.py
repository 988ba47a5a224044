"""Token ids as the tokenizers library makes them, except that a spelled control token stays text."""

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as BpeTokenizer

import kakera
from kakera.errors import CheckpointError
from kakera.text.tokenizer import SegmentCache, Tokenizer

MINI = Path(kakera.__file__).parent / "data" / "mini"
tokenizer = Tokenizer.load(MINI)
library = BpeTokenizer.from_file(str(MINI / "tokenizer.json"))
MARKERS = sorted(tokenizer.added)
texts = st.lists(st.one_of(st.sampled_from(MARKERS), st.text(max_size=12), st.sampled_from(["\n", " \n", "<|im"])))


@settings(max_examples=150)
@given(texts.map("".join))
def test_pieces_encode_as_the_library_encodes_the_whole(text):
    assert tokenizer.encode(text, allow_special=True) == library.encode(text, add_special_tokens=False).ids


@settings(max_examples=150)
@given(texts.map("".join))
def test_without_allow_special_no_added_token_appears_and_the_text_survives(text):
    ids = tokenizer.encode(text)
    assert not set(ids) & {token.id for token in tokenizer.added.values()}
    assert tokenizer.decode(ids) == library.normalizer.normalize_str(text)


@pytest.mark.parametrize("marker", MARKERS)
def test_a_spelled_marker_is_one_token_only_on_request(marker):
    assert tokenizer.encode(marker, allow_special=True) == [tokenizer.added[marker].id]
    assert len(tokenizer.encode(marker)) > 1


@settings(max_examples=100)
@given(texts.map("".join))
def test_hidden_markers_are_passed_over_by_split(text):
    hidden = tokenizer.hide_markers(text, "\ufdd0")
    assert all(isinstance(piece, str) for piece in tokenizer.split(hidden))
    assert hidden.replace("\ufdd0", "") == text.replace("\ufdd0", "")


def test_words_of_the_model_keep_its_thinking_tags():
    hidden = tokenizer.hide_markers("<think>a<|im_end|>", "\ufdd0", control_only=True)
    assert hidden == "<think>a<\ufdd0|im_end|>"


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        Tokenizer.load(tmp_path)


def test_a_broken_file_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not valid JSON"):
        Tokenizer.load(tmp_path)


def test_a_tokenizer_of_another_kind_is_refused(tmp_path):
    document = json.loads((MINI / "tokenizer.json").read_text())
    document["decoder"] = {"type": "Metaspace"}
    with pytest.raises(CheckpointError, match="byte-level"):
        Tokenizer(document)


def test_end_token_comes_from_the_config_in_either_spelling(tmp_path):
    shutil.copy(MINI / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|im_end|>"}}')
    assert Tokenizer.load(tmp_path).eos == tokenizer.eos == tokenizer.added["<|im_end|>"].id


def test_every_byte_and_every_token_can_be_found_again():
    assert all(tokenizer.token_of_bytes(bytes([b])) is not None for b in range(256))
    assert tokenizer.token_bytes(tokenizer.vocab + 5) == b""


def test_the_cache_forgets_the_oldest_and_stays_within_its_bound():
    from array import array

    cache = SegmentCache(limit_tokens=10)
    for name in ("a", "b", "c"):
        cache.put(name, array("I", range(4)))
        cache.get("a")
    assert cache.get("a") is not None and cache.get("b") is None and cache.get("c") is not None
    cache.put("huge", array("I", range(11)))
    assert cache.get("huge") is None
