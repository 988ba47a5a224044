"""End tokens are all that any file names: ids, lists, names, in whatever form they come."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kakera.arch.registry import load_spec
from kakera.errors import CheckpointError
from tiny_model import CONFIG, SPECIAL, byte_tokenizer

TEXT, TURN = 256 + SPECIAL.index("<|endoftext|>"), 256 + SPECIAL.index("<|im_end|>")
DECODER = {"added_tokens_decoder": {str(TEXT): {"content": "<|endoftext|>"}, str(TURN): {"content": "<|im_end|>"}}}
ABSENT = "(absent)"  # a name that is the same in every process: ids of tests must be


def ends(directory: Path, config: Any, generation: Any, tokenizer: Any, whole: Any = ABSENT) -> tuple[int, ...]:
    """`whole`: config.json's own key where `config` is that of its text model."""
    said = {key: value for key, value in CONFIG.items() if key != "eos_token_id"}
    said |= {} if config is ABSENT else {"eos_token_id": config}
    if whole is not ABSENT:
        said = {"model_type": "qwen3_5", "text_config": said, "eos_token_id": whole}
    (directory / "config.json").write_text(json.dumps(said))
    (directory / "tokenizer.json").write_text(json.dumps(byte_tokenizer()))
    if generation is not ABSENT:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    if tokenizer is not ABSENT:
        (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return load_spec(directory).eos


@pytest.mark.parametrize(
    ("config", "generation", "tokenizer", "expected"),
    [
        (TURN, {"eos_token_id": [TURN, TEXT]}, {"eos_token": "<|im_end|>"}, (TURN, TEXT)),
        (TEXT, ABSENT, {"eos_token": "<|im_end|>"}, (TEXT, TURN)),
        (TEXT, {"eos_token_id": TEXT}, {"eos_token": "<|im_end|>"}, (TEXT, TURN)),
        (TEXT, {"eos_token_id": TURN}, ABSENT, (TURN, TEXT)),
        (TURN, {"eos_token_id": [TEXT]}, {"eos_token": None}, (TEXT, TURN)),
        (ABSENT, ABSENT, {"eos_token": "<|im_end|>"}, (TURN,)),
        (ABSENT, ABSENT, {"eos_token": "<|im_end|>", **DECODER}, (TURN,)),
        (None, {"eos_token_id": None}, {"eos_token": {"content": "<|im_end|>", "__type": "AddedToken"}}, (TURN,)),
        (ABSENT, {"eos_token_id": [TEXT, TEXT]}, ABSENT, (TEXT,)),
        (ABSENT, {"eos_token_id": [None, TURN]}, {"eos_token": "<|endoftext|>", **DECODER}, (TURN, TEXT)),
        (ABSENT, {"eos_token_id": "<|im_end|>"}, {"eos_token": None}, (TURN,)),
        (ABSENT, {"eos_token_id": ["<|im_end|>", TEXT]}, {"eos_token": "</s>"}, (TURN, TEXT)),
        (str(TURN), {"eos_token_id": float(TEXT)}, ABSENT, (TEXT, TURN)),
        (-1, {"eos_token_id": [10**9, 10**30]}, {"eos_token": "<|im_end|>"}, (TURN,)),
        ([], {}, {}, ()),
        (TURN, {}, {"eos_token_id": TEXT}, (TURN, TEXT)),
        (TURN, {}, {"added_tokens_decoder": [1], "eos_token": "<|endoftext|>"}, (TURN, TEXT)),
        (TURN, {}, {"added_tokens_decoder": {"x": None, "7": 3}, "eos_token": "<|endoftext|>"}, (TURN, TEXT)),
    ],
    ids=str,
)
def test_end_tokens_are_those_of_all_files(tmp_path, config, generation, tokenizer, expected):
    assert ends(tmp_path, config, generation, tokenizer) == expected


def test_the_whole_models_word_counts_like_the_text_models(tmp_path):
    assert ends(tmp_path, TEXT, ABSENT, ABSENT, whole=[TURN]) == (TEXT, TURN)
    assert ends(tmp_path, None, ABSENT, ABSENT, whole=TURN) == (TURN,)


@pytest.mark.parametrize("value", [True, 1.5, float("nan"), {"id": 5}, [[5]], [False]], ids=str)
def test_what_is_no_token_is_refused_with_its_file(tmp_path, value):
    with pytest.raises(CheckpointError, match=r"config.json: eos_token_id holds .*, which is no token"):
        ends(tmp_path, value, ABSENT, ABSENT)
    with pytest.raises(CheckpointError, match=r"generation_config.json: eos_token_id holds .*, which is no token"):
        ends(tmp_path, TURN, {"eos_token_id": value}, ABSENT)
