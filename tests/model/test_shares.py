"""Ranks that share a model compute what one rank computes, whatever it is stored as and made of."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from model_world import Harness, Row
from safetensors.torch import save_file
from torch import Tensor

from kakera.arch.registry import load_spec, spec_of
from kakera.arch.shard import of_rank, vocabulary
from kakera.errors import CheckpointError
from kakera.kv.batch import Batch, Span
from kakera.kv.cache import KVCache
from kakera.kv.rotation import Frame, Rotation
from kakera.model.coded import CodedProjection
from kakera.model.linear import Embedding, SharedEmbedding
from kakera.model.mtp import draft_hidden
from kakera.model.qwen3_5 import HybridModel
from kakera.model.reader import LinearReader
from kakera.model.state import StatePool
from kakera.ops.exchange import ALONE, Exchange
from kakera.ops.trellis import TrellisLinear, TrellisScratch
from kakera.plan.kv_format import KvFormat
from kakera.plan.weights import from_checkpoint
from kakera.weights import files
from kakera.weights.checkpoint import Checkpoint
from random_leaves import made
from random_model import ESCHA, write_config
from rank_threads import together

SMALL = {
    "vocab_size": 640,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "random_weights": 3,
}
PLAIN = {**SMALL, "quantization_config": None}
MODELS: dict[str, dict[str, Any]] = {
    "coded, int8 rows, biases": SMALL,
    "coded, int8 rows, tied": {**SMALL, "tie_word_embeddings": True},
    "plain": PLAIN,
    "plain, tied, odd rows": {**PLAIN, "tie_word_embeddings": True, "vocab_size": 325},
    "no gate, no GDN": {
        **PLAIN,
        **dict.fromkeys(key for key in (*ESCHA, *SMALL) if key.startswith(("linear_", "layer_types", "full_"))),
        "model_type": "qwen3",
        "rope_parameters": {"rope_theta": 1e6},
    },
}
MOE = {
    **PLAIN,
    "model_type": "qwen3_5_moe_text",
    "intermediate_size": None,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
}
MODELS["experts, plain"] = MOE
MODELS["experts, coded, three blocks"] = {
    **MOE,
    "moe_intermediate_size": 384,
    "quantization_config": {"quant_method": "eschamoe"},
}
TOKENS = torch.randint(0, 320, (90,), generator=torch.Generator().manual_seed(5))


def logits(model: HybridModel) -> Tensor:
    """Of a prompt in two chunks, and of a decode step behind it."""
    harness = Harness(model)
    prefill = harness.prefill(TOKENS[:-1], [64])
    return torch.cat([prefill, *harness.run(Row(TOKENS[-1:], len(TOKENS) - 1, decode=True))])


def write(directory: Path, changes: dict[str, Any]) -> Path:
    config = {key: value for key, value in {**ESCHA, **changes}.items() if value is not None}
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("name", MODELS)
def test_shares_of_a_model_make_the_model(tmp_path, name):
    directory, bias = write(tmp_path / "model", MODELS[name]), "biases" in name

    def work(exchange: Exchange) -> Tensor:
        return logits(HybridModel.load(directory, exchange=exchange, escha_bias=bias))

    expected_RV = work(ALONE)
    first_RV, second_RV = together(2, work)
    assert second_RV.shape == (len(TOKENS), 0)
    torch.testing.assert_close(first_RV, expected_RV, rtol=0, atol=1e-4)
    assert (expected_RV - expected_RV[:1]).abs().max() > 0.1  # it says something of its tokens


def test_every_rank_has_the_same_hidden_states_to_the_bit(tmp_path):
    directory = write(tmp_path / "model", PLAIN)

    def work(exchange: Exchange) -> Tensor:
        model, seen = HybridModel.load(directory, torch.bfloat16, exchange=exchange), []
        heads = model.logits
        model.logits = lambda hidden_RH: (seen.append(hidden_RH.clone()), heads(hidden_RH))[1]  # type: ignore
        model.forward(*_batch(model))
        return seen[0]

    first, second = together(2, work)
    assert torch.equal(first, second) and first.dtype == torch.bfloat16


def _batch(model: HybridModel) -> tuple[Any, ...]:
    kv = KVCache(model.spec, KvFormat("bf16"), 2, 1, dtype=torch.bfloat16)
    batch = Batch(TOKENS, torch.arange(90), (), (Span(0, 90, 0, 0, torch.arange(2)),), torch.arange(90))
    return batch, kv.backend, StatePool(model.spec, 1, dtype=torch.bfloat16)


def test_linears_of_a_rank_that_stay_coded_are_parts_of_those_of_one_rank(tmp_path, monkeypatch):
    """What a GPU would launch, with the reference in the kernels' place: query and gate are regrouped head by head."""
    directory, nothing = write(tmp_path / "model", SMALL), torch.empty(0)
    scratch = TrellisScratch(nothing, nothing, nothing, nothing)

    def into(self, x_TI, y_PTO, scratch):
        for part, y_TO in zip(self.parts, y_PTO, strict=True):
            y_TO.copy_(part.forward(x_TI))

    monkeypatch.setattr(TrellisLinear, "into", into)

    def loaded(rank: int, ranks: int) -> list[Tensor]:
        found = Checkpoint.open(directory, rank=rank, ranks=ranks)
        reader = LinearReader(found, found.spec.tensors(), torch.float16, torch.device("cpu"), True, scratch)
        mixer = next(layer for layer in found.own.layers if layer.block("full")).block("full")
        made = reader.attention_input("model.layers.1.self_attn", mixer)
        assert isinstance(made, CodedProjection) and made.tail is None
        heads = [mixer.heads, mixer.kv_heads, mixer.kv_heads, mixer.heads]
        x_TH = torch.randn(3, 128, generator=torch.Generator().manual_seed(1)).half()
        rows = list(torch.split(made(x_TH), [128 * n for n in heads], dim=1))
        return [*rows, reader.projection(["model.layers.0.mlp.gate_proj"])(x_TH)]

    whole, parts = loaded(0, 1), [loaded(rank, 2) for rank in range(2)]
    for expected_TO, *found_TO in zip(whole, *parts, strict=True):
        torch.testing.assert_close(torch.cat(found_TO, 1), expected_TO, rtol=0, atol=1e-2)


def test_a_draft_layer_is_shared_as_the_layers_are(tmp_path):
    config = {**ESCHA, **PLAIN, "mtp_num_hidden_layers": 1}
    del config["random_weights"], config["quantization_config"]
    generator = torch.Generator().manual_seed(2)
    tensors = {}
    for name, declared in spec_of(config).tensors(draft=True).items():
        stored = name if declared.role == "small" else f"{name}.weight"
        tensors[stored] = torch.randn(declared.shape, generator=generator) * declared.shape[-1] ** -0.5
    save_file(tensors, write_config(tmp_path / "m", **{**config, "quantization_config": None}) / "model.safetensors")
    hidden_NH = torch.randn(len(TOKENS) - 1, 128, generator=generator)

    def work(exchange: Exchange) -> Tensor:
        model = HybridModel.load(tmp_path / "m", exchange=exchange, draft=True)
        return draft_hidden(model, TOKENS[1:], hidden_NH)

    expected_NH = work(ALONE)
    for found_NH in together(2, work):
        torch.testing.assert_close(found_NH, expected_NH, rtol=0, atol=1e-4)


@pytest.mark.parametrize("form", ["plain", "escha 2", "exl3 3 mcg", "exl3 3 signs"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rank_reads_as_many_bytes_as_are_planned_for_its_card(tmp_path, monkeypatch, form, ranks):
    """Biases of summed outputs, vectors of both sides and flags included."""
    method = form.split()[0]
    config = {**ESCHA, **SMALL, "quantization_config": {"quant_method": method, "bits": 3} if method != "plain" else {}}
    del config["random_weights"]
    spec, tensors = spec_of(config), {}
    for name, declared in spec.tensors().items():
        if declared.role == "small":
            tensors[name] = torch.rand(declared.shape).half()
            continue
        stored = {"exl3": form, "escha": form, "int8": "int8"}.get(declared.stored_as(method), "plain")
        tensors |= {f"{name}.{leaf}": tensor for leaf, tensor in made(stored, *declared.shape, seed=0).items()}
        if declared.kind is not None and declared.name != "lm_head":
            tensors[f"{name}.bias"] = torch.rand(declared.shape[0]).half()
    save_file(tensors, write(tmp_path / "m", config) / "model.safetensors")
    read, fill = {}, files._fill

    def count(descriptor: int, raw: Tensor, stored: files.StoredTensor, offset: int) -> None:
        read[offset] = raw.nbytes  # a few biases are read twice
        fill(descriptor, raw, stored, offset)

    monkeypatch.setattr(files, "_fill", count)
    planned = from_checkpoint(tmp_path / "m", spec)
    found = []
    for rank in range(ranks):
        read.clear()
        exchange: Any = SimpleNamespace(rank=rank, ranks=ranks)
        HybridModel.load(tmp_path / "m", exchange=exchange, escha_bias=method == "escha")
        found.append(sum(read.values()))
    assert found == [planned.of_rank(rank, ranks) for rank in range(ranks)]
    stored = sum(tensor.nbytes for tensor in tensors.values())
    assert found == [stored] if ranks == 1 else sum(found) > stored > max(found)


def test_a_rank_looks_up_its_own_tokens_and_has_zeros_for_others():
    table_VH = torch.randn(10, 4).bfloat16()
    tokens_T = torch.tensor([0, 9, 3, 4, 3])

    def work(exchange: Exchange) -> Tensor:
        ids = (range(4), range(4, 10))[exchange.rank]
        shared = SharedEmbedding(Embedding(table_VH[ids.start : ids.stop]), ids, exchange)
        assert (shared.dtype, shared.device.type) == (torch.bfloat16, "cpu")
        return shared(tokens_T)

    for found_TH in together(2, work):
        assert torch.equal(found_TH, table_VH[tokens_T])


def test_a_rank_takes_the_rotations_of_its_own_kv_heads(tmp_path):
    spec = load_spec(write(tmp_path / "m", {**PLAIN, "num_key_value_heads": 4}))
    layers, heads, dim = len(spec.full_layers), 4, spec.head_dim
    frame = Frame(torch.randn(layers, heads, dim, dim), torch.randn(layers, heads, dim))
    whole = Rotation(frame, Frame(None, torch.zeros(layers, heads, dim)))
    for rank in range(2):
        part = whole.of_rank(spec, rank, 2)
        part.check(of_rank(spec, rank, 2))
        assert part.k.rotation_LKDD is not None and part.v.rotation_LKDD is None
        assert torch.equal(part.k.rotation_LKDD, frame.rotation_LKDD[:, 2 * rank : 2 * rank + 2])
        assert torch.equal(part.k.centre_LKD, frame.centre_LKD[:, 2 * rank : 2 * rank + 2])


def test_what_can_not_be_shared_is_refused_before_anything_is_read(tmp_path):
    directory = write(tmp_path / "m", PLAIN)
    with pytest.raises(CheckpointError, match="3 cards can not share this model evenly"):
        Checkpoint.open(directory, rank=0, ranks=3)
    coded = write(tmp_path / "coded", {**SMALL, "linear_key_head_dim": 64, "linear_value_head_dim": 64})
    with pytest.raises(CheckpointError, match=r"in_proj_qkv.* can not be cut between cards: channel 64 is inside"):
        Checkpoint.open(coded, rank=0, ranks=2).linear("model.layers.0.linear_attn.in_proj_qkv", 512, 128)


def test_tokens_of_the_vocabulary_are_each_some_ranks():
    spec = spec_of({**ESCHA, **PLAIN})
    for vocab in (640, 325, 16 * 21):
        for ranks in (1, 2, 4):
            parts = vocabulary(replace(spec, vocab=vocab), ranks)
            assert [token for ids in parts for token in ids] == list(range(vocab))
