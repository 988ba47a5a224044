"""Cases about text, choices and log-probabilities."""

from __future__ import annotations

import json
from typing import Any

import pytest

from command_server import CommandServer
from kakera.text.detokenize import Detokenizer
from kakera.text.tokenizer import Tokenizer, byte_alphabet
from tiny_model import byte_tokenizer

LETTER = {byte: letter for letter, byte in byte_alphabet().items()}


def events(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize(
    ("prompt", "stop", "wanted"),
    [("fox", "own fox", "The quick br"), ("turns", "\nUser:", "Hi"), ("half", "\nUser:", "Hi\nUse")],
)
def test_case_33_stop_strings_over_several_tokens_cut_exactly(
    scripted: CommandServer, chat: bool, stream: bool, prompt: str, stop: str, wanted: str
) -> None:
    fields = {"stop": [stop], "stream": stream}
    answer = scripted.chat(prompt, **fields) if chat else scripted.complete(prompt=prompt, **fields)
    choices = [event["choices"][0] for event in events(answer.text)] if stream else answer.json()["choices"]
    part = "delta" if stream else "message"
    texts = [(choice[part].get("content") or "") if chat else choice["text"] for choice in choices]
    assert "".join(texts) == wanted and choices[-1]["finish_reason"] == "stop"


@pytest.mark.parametrize("cut", [1, 2])
def test_case_35_a_character_split_over_two_tokens_is_shown_whole(cut: int) -> None:
    face = "😀".encode()
    document = byte_tokenizer()
    vocabulary = document["model"]["vocab"]
    ids: list[int] = []
    for part in (face[:cut], face[cut:]):
        piece = "".join(LETTER[byte] for byte in part)
        ids.append(vocabulary.setdefault(piece, 300 + len(ids)))
    decoder = Detokenizer(Tokenizer(document))
    assert [decoder.feed(token) for token in ids] == ["", "😀"] and decoder.finish() == ""
    half = Detokenizer(Tokenizer(document))
    assert half.feed(ids[0]) == "" and half.finish() == "\ufffd" and half.finish() == ""


def test_case_36_logprobs_of_impossible_tokens_are_finite(tiny: CommandServer) -> None:
    bias = {str(token): -100 for token in range(40)}
    answer = tiny.chat("hi", max_tokens=4, top_k=1, logprobs=True, top_logprobs=20, logit_bias=bias)
    assert answer.status_code == 200
    for entry in answer.json()["choices"][0]["logprobs"]["content"]:
        assert len(entry["top_logprobs"]) == 20
        assert all(-9999 <= top["logprob"] <= 0 for top in (entry, *entry["top_logprobs"]))


def test_case_38_choices_of_a_stream_are_complete_different_and_repeatable(tiny: CommandServer) -> None:
    def ask() -> dict[int, str]:
        texts = {0: "", 1: "", 2: ""}
        ended = []
        chunks = events(tiny.chat("hi", n=3, seed=7, max_tokens=12, stream=True, temperature=1, top_k=0).text)
        for choice in (chunk["choices"][0] for chunk in chunks):
            texts[choice["index"]] += choice["delta"].get("content") or ""
            ended += [choice["index"]] if choice["finish_reason"] else []
        assert sorted(ended) == [0, 1, 2]
        return texts

    first = ask()
    assert len(set(first.values())) == 3 and ask() == first
