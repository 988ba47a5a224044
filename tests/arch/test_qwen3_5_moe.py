"""Qwen3.6-35B-A3B against the published counts and bytes, and configs that are other models."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from kakera.arch.registry import spec_of
from kakera.arch.shard import of_rank
from kakera.arch.spec import ModelSpec
from kakera.arch.stored import TensorHeader
from kakera.arch.weigh import by_tensor
from kakera.errors import CheckpointError
from kakera.plan.known import KNOWN
from kakera.plan.weights import from_config

NAME = "qwen3.6-35b-a3b"
CONFIG = KNOWN[NAME]


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return spec_of(CONFIG)


def test_every_layer_has_a_mixer_and_experts(spec):
    assert Counter(site.block.kind for layer in spec.layers for site in layer.sites) == {
        "gdn": 30,
        "full": 10,
        "moe": 40,
    }
    assert spec.full_layers == tuple(range(3, 40, 4)) and spec.group == 8
    tensors = spec.tensors()
    assert len(tensors) == 30 * 18 + 10 * 15 + 3 and sum(t.count for t in tensors.values()) == pytest.approx(
        34.66e9, rel=1e-3
    )
    stacks = [tensor for tensor in tensors.values() if tensor.role == "stack"]
    assert sum(t.count for t in stacks) == 32_212_254_720
    assert {t.shape for t in stacks} == {(256, 1024, 2048), (256, 2048, 512)}
    assert spec.draft is None and spec.counts("model.layers.0.mlp.gate.weight") and not spec.counts("mtp.fc.weight")


@pytest.mark.parametrize(("name", "gigabytes"), [(f"{NAME}-exl3-3.0bpw", 14.2), (f"{NAME}-bf16", 69.3)])
def test_other_builds_are_planned_by_their_config(name, gigabytes):
    weights = from_config(spec_of(KNOWN[name]), KNOWN[name])
    assert (weights.coded + weights.parts[0].bytes) / 1e9 == pytest.approx(gigabytes, rel=0.01)


def test_experts_are_found_in_every_form_that_files_have(spec):
    names = ("experts.gate_up_proj", "experts.7.up_proj.weight", "experts.255.gate_proj.trellis")
    headers = [TensorHeader(f"model.language_model.layers.3.mlp.{n}", Path("x"), "F16", (1,), 0, 2) for n in names]
    assert list(by_tensor(spec, headers)) == ["model.layers.3.mlp.experts.gate_up_proj"]


def test_an_expert_is_cut_in_two_on_blocks_of_128(spec):
    whole, parts = spec.tensors(), [of_rank(spec, rank, 2).tensors() for rank in range(2)]
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert [list(whole[name].shard.parts(rank, 2)) for rank in range(2)] == [
        [(0, 256), (512, 768)],
        [(256, 512), (768, 1024)],
    ]
    assert all(part[name].shape == (256, 512, 2048) for part in parts)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"norm_topk_prob": False}, "norm_topk_prob is False"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step is 2"),
        ({"mlp_only_layers": [0]}, r"mlp_only_layers is \[0\]"),
        ({"num_experts_per_tok": 257}, "257 of 256 experts"),
        ({"n_routed_experts": 256}, "n_routed_experts is not known of qwen3_5_moe_text"),
        ({"routed_scaling_factor": 2.5}, "routed_scaling_factor is not known"),
        ({"model_type": "qwen3_next"}, "'qwen3_next' is not supported"),
        ({"model_type": "qwen3_5_text", "intermediate_size": 512}, "num_experts"),
        ({"moe_intermediate_size": None}, "wrong type"),
    ],
)
def test_another_model_is_refused_in_words(changes, words):
    with pytest.raises(CheckpointError, match=words):
        spec_of({**CONFIG, **changes})


def test_what_a_config_may_say_beside(spec):
    keys = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "router_aux_loss_coef": 0.001}
    assert spec_of({**CONFIG, **keys}) == spec
    other = spec_of({**CONFIG, "num_experts": 200, "num_experts_per_tok": 10})
    assert next(t for t in other.tensors().values() if t.role == "stack").shape[0] == 200
