"""The stand-in tokenizer, and the directory of a model without weights."""

from __future__ import annotations

import json
import random

import pytest

from kakera.arch.registry import load_spec
from kakera.chat.template import ChatTemplate
from kakera.cli.model import BUNDLED, resolve_model, shape_of
from kakera.cli.stand_in import directory_for, stand_in
from kakera.errors import CheckpointError, UsageError
from kakera.evaluate.data import load_documents
from kakera.text.tokenizer import Tokenizer
from random_model import ESCHA


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def pattern():
    return json.loads((BUNDLED / "tokenizer.json").read_text())


@pytest.fixture(scope="module")
def large(pattern):
    return Tokenizer(stand_in(pattern, 248_320), "<|im_end|>")


def test_every_id_of_a_large_vocabulary_has_text(large):
    assert large.vocab == 248_320
    texts = {large.token_bytes(token) for token in range(large.vocab)}
    assert len(texts) == large.vocab and b"" not in texts


def test_prose_takes_about_four_characters_a_token(large):
    text = "\n\n".join(load_documents(None))
    tokens = large.encode(text)
    assert large.decode(tokens) == text
    assert 3.5 < len(text) / len(tokens) < 5


def test_made_up_words_read_back_as_the_tokens_they_were(large):
    said = [random.Random(0).randrange(20_000, 248_300) for _ in range(500)]
    assert large.encode(large.decode(said)) == said


@pytest.mark.parametrize("vocab", [268, 320, 5000, 16_384])
def test_a_small_vocabulary_is_cut_and_still_writes_everything(pattern, vocab):
    tokenizer = Tokenizer(stand_in(pattern, vocab))
    assert tokenizer.vocab == vocab
    assert tokenizer.decode(tokenizer.encode("Grüße, 世界! <|im_end|>")) == "Grüße, 世界! <|im_end|>"
    assert max(tokenizer.encode("the people of the town")) < vocab - 12


def test_no_room_for_the_bytes_is_refused(pattern):
    with pytest.raises(UsageError, match="no room for 256 bytes"):
        stand_in(pattern, 267)


def test_the_directory_is_complete_and_written_once():
    first = directory_for("tiny", ESCHA, BUNDLED)
    stamps = {file.name: file.stat().st_mtime_ns for file in first.iterdir()}
    assert directory_for("tiny", ESCHA, BUNDLED) == first
    assert {file.name: file.stat().st_mtime_ns for file in first.iterdir()} == stamps
    assert len(list(first.parent.iterdir())) == 1
    assert directory_for("tiny", ESCHA, BUNDLED, seed=1) != first

    tokenizer, spec = Tokenizer.load(first), load_spec(first)
    assert (tokenizer.vocab, tokenizer.eos) == (spec.vocab, spec.eos[0])
    template = ChatTemplate.load(first, tokenizer)
    prompt = template.prompt([{"role": "user", "content": "Hello."}])
    assert max(prompt.tokens) < spec.vocab and prompt.opens_thinking


def test_a_known_name_is_the_same_shape_with_and_without_spec():
    assert shape_of("spec:qwen3.8-27b") == shape_of("qwen3.8-27b")
    found = resolve_model("spec:qwen3.8-27b")
    assert found.name == "spec:qwen3.8-27b"
    assert load_spec(found.path).layers == shape_of("qwen3.8-27b")[0].layers


def test_unknown_shapes_and_unknown_models_are_refused(tmp_path):
    with pytest.raises(UsageError, match=r"known shapes are qwen3\.8-27b"):
        resolve_model("spec:qwen9")
    with pytest.raises(UsageError, match=r"spec:qwen3\.8-27b"):
        resolve_model("qwen3.8-27b")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(CheckpointError, match="bert"):
        resolve_model(f"spec:{tmp_path}")
