"""Our model gives transformers' logits: any chunking, decode step by step, resumed, alone or in company."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model_world import Harness, Row, hybrid_config, moe_config, save_model
from torch import Tensor

from kakera.arch.computed import COMMON
from kakera.arch.config import Config
from kakera.arch.registry import ARCHITECTURES
from kakera.model.qwen3_5 import HybridModel

PLAIN: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 96,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "head_dim": 24,
    "max_position_embeddings": 1024,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
YARN = {
    **hybrid_config(1, 1)["rope_parameters"],
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS = {
    "group1": ("qwen3_5_text", hybrid_config(3, 3), ""),
    "group2-tied": ("qwen3_5_text", hybrid_config(4, 2, tie_word_embeddings=True), ""),
    "group3-prefixed-yarn": ("qwen3_5_text", hybrid_config(6, 2, rope_parameters=YARN), "model.language_model."),
    "group5-tied-interval": (
        "qwen3_5_text",
        hybrid_config(5, 1, tie_word_embeddings=True, layer_types=None, hidden_size=80),
        "",
    ),
    "group6-wide-values": (
        "qwen3_5_text",
        hybrid_config(12, 2, linear_key_head_dim=16, linear_value_head_dim=48, linear_conv_kernel_dim=3),
        "",
    ),
    "group8": ("qwen3_5_text", hybrid_config(8, 1, linear_num_key_heads=4, linear_num_value_heads=4), ""),
    "moe-7-experts": ("qwen3_5_moe_text", moe_config(7, 3), ""),
    "moe-prefixed": ("qwen3_5_moe_text", moe_config(12, 1), "model.language_model."),
    "qwen3-group2": ("qwen3", {**PLAIN, "num_attention_heads": 4, "num_key_value_heads": 2}, ""),
    "qwen3-group3-tied": (
        "qwen3",
        {**PLAIN, "num_attention_heads": 6, "num_key_value_heads": 2, "tie_word_embeddings": True},
        "",
    ),
}
LENGTH = 255  # three pages and a tail of 63


@pytest.fixture(scope="module", params=MODELS, ids=str)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tokens: Tensor):
    """Our model and the other's logits of the whole sequence."""
    kind, config, prefix = MODELS[request.param]
    directory = tmp_path_factory.mktemp("model")
    reference = save_model(directory, kind, config, prefix)
    with torch.no_grad():
        expected = reference(tokens[None, :LENGTH]).logits[0]
    return HybridModel.load(directory), expected


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4 * max(1.0, expected.abs().max().item() / 10))


@pytest.mark.parametrize("cuts", [[], [64, 128, 192], [128]], ids=["whole", "64s", "128+rest"])
def test_prefill_in_any_chunking(pair, tokens: Tensor, cuts: list[int]):
    model, expected = pair
    close(Harness(model).prefill(tokens[:LENGTH], cuts), expected)


@pytest.mark.parametrize("length", [128, 129, 191])
def test_decode_after_tails_of_0_1_63_tokens(pair, tokens: Tensor, length: int):
    model, expected = pair
    harness = Harness(model)
    close(harness.prefill(tokens[:length], [64]), expected[:length])
    for position in range(length, length + 3):
        (logits,) = harness.run(Row(tokens[position : position + 1], position, decode=True))
        close(logits, expected[position : position + 1])


def test_resume_at_every_boundary_from_a_checkpoint(pair, tokens: Tensor):
    model, expected = pair
    harness = Harness(model)
    saves = tuple(harness.checkpoint(position) for position in (64, 128, 192))
    harness.states.reset(0)
    harness.run(Row(tokens[:LENGTH], 0, saves=saves))
    for save in saves:
        harness.states.load(0, save)
        close(harness.prefill(tokens[:LENGTH], [], start=save.position), expected[save.position :])


def test_batch_mates_are_irrelevant(pair, tokens: Tensor):
    model, expected = pair
    harness = Harness(model)
    harness.prefill(tokens[:100], [], slot=2)
    harness.prefill(tokens[:70], [], slot=0)
    harness.states.reset(1)
    rows = [
        Row(tokens[100:101], 100, 2, decode=True),
        Row(tokens[70:74], 70, 0, decode=True),  # several tokens of one sequence, as a draft's verification brings
        Row(tokens[:130], 0, 1),
    ]
    for row, logits in zip(rows, harness.run(*rows), strict=True):
        close(logits, expected[row.start : row.start + len(row.tokens)])


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("qwen3_5_text", "Qwen3_5TextConfig"),
        ("qwen3_5_moe_text", "Qwen3_5MoeTextConfig"),
        ("qwen3", "Qwen3Config"),
    ],
)
def test_every_key_of_a_config_is_read_or_held_against_what_is_computed_or_changes_nothing(
    kind: str, name: str
) -> None:
    """So that a key which a newer transformers adds is looked at."""
    import transformers

    keys = moe_config(7, 3) if "moe" in kind else hybrid_config(4, 2)
    read = Config({**keys, "model_type": kind, "layer_types": None})
    read.refuse_others(COMMON)
    ARCHITECTURES[kind](read)
    nothing = {"initializer_range", "use_cache", "attention_dropout", "pad_token_id", "bos_token_id"}
    nothing |= {"max_window_layers", "sliding_window"}  # without use_sliding_window
    nothing |= {"output_router_logits", "router_aux_loss_coef"}  # of training
    beside = {"tie_word_embeddings", "eos_token_id", "model_type"}  # of the whole model, too, or of other files
    own = {key for key in vars(getattr(transformers, name))["__annotations__"] if key[:5] not in ("base_", "ignor")}
    assert own - read._asked <= nothing | beside
    assert {"hidden_act", "rope_parameters", "layer_types", "attention_bias", "rms_norm_eps"} <= own & read._asked
