"""Qwen3.6-35B-A3B-Escha-W2 against the bytes of the published file, from its config alone."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import pytest

from kakera.arch.registry import spec_of
from kakera.arch.spec import EMBEDDING, LM_HEAD
from kakera.plan.known import KNOWN
from kakera.plan.weights import from_config, from_tensors
from kakera.weights.synthetic import RandomTensor, random_tensors

CONFIG = KNOWN["qwen3.6-35b-a3b"]
SPEC = spec_of(CONFIG)
# Bytes of the published Escha file, part by part; scales of rows and norms are 2.7 MB together.
LEDGER = {
    "codes of gate_up": 5_368_709_120,
    "codes of down": 4_026_531_840,
    "rin, rout": 115_343_360,
    "s_in, s_out": 230_686_720,
    "shared": 125_829_120,
    "gates": 42_106_880,
    "attention": 272_629_760,
    "GDN": 1_016_463_360,
    "embedding": 508_559_360,
    "head": 508_559_360,
}


@pytest.fixture(scope="module")
def made() -> list[RandomTensor]:
    return random_tensors(SPEC, {**CONFIG, "random_weights": 0}, Path("nowhere"))


def part_of(name: str) -> str:
    """Of the ledger; "" of scales, norms and descriptors."""
    module, _, leaf = name.rpartition(".")
    stacks = {"escha_code": f"codes of {module.rpartition('.')[2].removesuffix('_proj')}"}
    stacks |= dict.fromkeys(("escha_rin", "escha_rout"), "rin, rout")
    stacks |= dict.fromkeys(("escha_s_in", "escha_s_out"), "s_in, s_out")
    if ".experts." in name:
        return stacks.get(leaf, "")
    if leaf == "weight_scale" or "norm" in name or leaf in ("A_log", "dt_bias"):
        return ""
    parts = {".shared_expert.": "shared", ".mlp.": "gates", ".self_attn.": "attention", ".linear_attn.": "GDN"}
    parts |= {EMBEDDING: "embedding", LM_HEAD: "head"}
    return next(part for begin, part in parts.items() if begin in name)


def test_random_weights_are_the_published_file_to_the_byte(made):
    """That file has 1,345 tensors without what it holds of a draft layer."""
    found: Counter[str] = Counter()
    for tensor in made:
        found[part_of(tensor.name)] += tensor.bytes
    rest = found.pop("")
    assert found == LEDGER
    assert len(made) == 1345 and rest == pytest.approx(2.7e6, rel=0.02)
    shapes = {tensor.name: (tensor.dtype, tensor.shape) for tensor in made}
    prefix = "model.layers.0.mlp.experts"
    assert shapes[f"{prefix}.gate_up_proj.escha_code"] == ("I16", (256, 128, 64, 32))
    assert shapes[f"{prefix}.down_proj.escha_code"] == ("I16", (256, 32, 128, 48))
    assert shapes[f"{prefix}.down_proj.escha_rout"] == ("F16", (256, 2048))
    assert shapes[f"{prefix}.down_proj.escha_config"] == ("I32", (9,))
    assert shapes["model.layers.0.mlp.gate.weight"] == ("F16", (256, 2048))


def test_a_plan_counts_them_before_and_after_a_download(made):
    planned, stored = from_config(SPEC, CONFIG), from_tensors(made, SPEC, "")
    assert planned.coded == stored.coded and planned.parts == stored.parts
    (experts,) = planned.parts
    assert (experts.name, experts.units, experts.taken) == ("experts", 256, 8)
    total = planned.coded + experts.bytes
    assert total == sum(tensor.bytes for tensor in made) and round(total / 1e6) == 12_218
    assert experts.read == math.ceil(experts.bytes * 8 / 256)
