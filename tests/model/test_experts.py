"""Experts in a model: a row's bits are its own whoever chooses the same experts; a hit is cold; what is not built."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from model_world import Harness, Row, moe_config, save_model
from torch import Tensor

from kakera.arch.moe import Moe
from kakera.errors import CheckpointError, Unserved
from kakera.model.load import load_weights
from kakera.model.mlp.experts import MoeMlp
from kakera.model.qwen3_5 import HybridModel
from kakera.model.weights import MlpWeights, MoeWeights
from kakera.plan.plan import Wishes
from kakera.plan.planner import plan_for
from kakera.weights.checkpoint import Checkpoint

LENGTH = 65 + 128


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("moe")
    save_model(directory, "qwen3_5_moe_text", moe_config(7, 3))
    return directory


@pytest.fixture(scope="module")
def model(directory: Path) -> HybridModel:
    return HybridModel.load(directory)


@pytest.fixture(scope="module")
def mlp(model: HybridModel) -> MoeMlp:
    block = next(site.block for site in model.spec.layers[0].sites if site.block.kind == "moe")
    return MoeMlp(block, model.weights.layers[0][1].block)


def reference(mlp: MoeMlp, x_TH: Tensor) -> Tensor:
    """Row by row and expert by expert, in the order of the shares."""
    rows = []
    for x_1H in x_TH.split(1):
        gates_G = mlp.weights.gates(x_1H)[0]
        shares_E = gates_G[: mlp.block.experts].softmax(0)
        best = sorted(range(mlp.block.experts), key=lambda e: (-shares_E[e].item(), e))[: mlp.block.top]
        total_H = torch.zeros_like(x_1H[0])
        parts = [(mlp.weights.experts[e], (shares_E[e] / shares_E[best].sum()).item()) for e in best]
        for weights, share in (*parts, (mlp.weights.shared, gates_G[-1].sigmoid().item())):
            gate_H, up_H = weights.gate_up(x_1H)[0].chunk(2)
            total_H += share * weights.down((torch.nn.functional.silu(gate_H) * up_H)[None])[0]
        rows.append(total_H)
    return torch.stack(rows)


def rows_of(mlp: MoeMlp, count: int) -> Tensor:
    return torch.randn(count, mlp.block.hidden, generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize("decode", [0, 3, 9])
def test_the_block_is_the_sum_of_a_rows_experts_and_the_gated_shared_one(mlp, decode):
    x_TH = rows_of(mlp, 9)
    torch.testing.assert_close(mlp(x_TH, decode), reference(mlp, x_TH), rtol=0, atol=2e-5)


def with_gates(mlp: MoeMlp, logits_G: Tensor) -> MoeMlp:
    """With the same logits for every row: of the experts, then of the shared one's gate."""
    gates = lambda x_TI, decode_tokens=0: logits_G.expand(len(x_TI), -1)  # noqa: E731
    return replace(mlp, weights=replace(mlp.weights, gates=gates))


def test_a_gate_of_zero_halves_the_shared_expert(mlp):
    x_TH, none_E = rows_of(mlp, 2), torch.zeros(mlp.block.experts)
    shut, half, wide = (with_gates(mlp, torch.cat([none_E, torch.tensor([g])]))(x_TH) for g in (-200.0, 0.0, 200.0))
    torch.testing.assert_close(half, (shut + wide) / 2)
    assert (wide - shut).abs().max() > 1e-2


def test_what_is_rounded_to_16_bit_and_what_is_not():
    """Logits, shares, an expert's and the shared expert's output and the routed sum are; the softmax, the sum of slots,
    the sigmoid and the last sum are not. The numbers are such that each of these shows."""
    half = lambda number: torch.tensor(number).bfloat16().float().item()  # noqa: E731
    logits, gate, given, shared = (-0.859375, -1.328125), 2.5625, (1.828125, -1.1328125), -0.9453125
    high, low = torch.tensor(logits).softmax(0).tolist()
    routed = half(high) * given[0] + half(low) * given[1]
    sigmoid = torch.tensor(gate).sigmoid().item()
    expected = half(half(routed) + shared * sigmoid)
    others = {
        half(half(high * given[0] + low * given[1]) + shared * sigmoid),
        half(routed + shared * sigmoid),
        half(half(routed) + half(shared * sigmoid)),
        half(half(routed) + shared * half(sigmoid)),
        half(half(half(half(high) * given[0]) + half(half(low) * given[1])) + shared * sigmoid),
    }
    assert expected not in others

    def gives(value: float) -> MlpWeights:
        zeros = lambda x_TI, decode_tokens=0: x_TI.new_zeros(len(x_TI), 2)  # noqa: E731
        return MlpWeights(zeros, lambda x_TI, decode_tokens=0: x_TI.new_full((len(x_TI), 1), value))

    gates_G = torch.tensor([*logits, gate]).bfloat16()
    gates = lambda x_TI, decode_tokens=0: gates_G.expand(len(x_TI), 3)  # noqa: E731
    weights = MoeWeights(gates, tuple(map(gives, given)), gives(shared))
    found = MoeMlp(Moe(2, 2, 1, 1, 1), weights)(torch.zeros(3, 1, dtype=torch.bfloat16), 1)
    assert found.dtype == torch.bfloat16 and found.float().flatten().tolist() == [expected] * 3


@pytest.mark.parametrize("company", [1, 63, 200])
def test_a_rows_bits_are_its_own_beside_rows_that_choose_the_same_experts(mlp, company):
    own_1H = rows_of(mlp, 1)
    others_TH = own_1H + 1e-3 * rows_of(mlp, company)
    alone_1H = mlp(own_1H)
    for position in (0, company // 2, company):
        x_TH = torch.cat([others_TH[:position], own_1H, others_TH[position:]])
        assert torch.equal(mlp(x_TH)[position], alone_1H[0])


def slots_of(mlp: MoeMlp, x_TH: Tensor, decode: int) -> Tensor:
    """What the experts 4, 0 and 2 give, all rows to the same."""
    expert_TK = torch.tensor([[4, 0, 2]]).expand(len(x_TH), 3)
    return mlp._slots(x_TH, expert_TK, decode).view(len(x_TH), 3, -1)


def test_experts_give_a_decode_row_the_same_bits_alone_and_in_any_batch(mlp):
    x_TH = rows_of(mlp, 40)
    together = slots_of(mlp, x_TH, 13)
    for row in (0, 7, 12):
        assert torch.equal(slots_of(mlp, x_TH[row : row + 1], 1)[0], together[row])
    assert torch.equal(slots_of(mlp, x_TH[13:], 0), together[13:])


def test_an_expert_that_nobody_chooses_and_one_that_everybody_does(mlp):
    x_TH = rows_of(mlp, 70)
    everybody = with_gates(mlp, torch.tensor([9.0, 8.0, 7.0, 0.0, 0.0, 0.0, 0.0, 0.0]))
    torch.testing.assert_close(everybody(x_TH, 5), reference(everybody, x_TH), rtol=0, atol=2e-5)


def test_chunks_company_and_checkpoints_change_no_bit(model, tokens):
    cold = Harness(model)
    saves = cold.checkpoint(64), cold.checkpoint(128)
    cold.run(Row(tokens[:LENGTH], 0, 0, saves=saves))
    expected = (cold.cached(0, LENGTH), *cold.state(0))

    def same(harness: Harness, slot: int) -> None:
        found = (harness.cached(slot, LENGTH), *harness.state(slot))
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))

    chunked = Harness(model)
    chunked.prefill(tokens[:LENGTH], [64, 128], slot=1)
    same(chunked, 1)
    for save in saves:
        cold.states.load(0, save)
        cold.prefill(tokens[:LENGTH], [], start=save.position)
        same(cold, 0)
    chunked.prefill(tokens[:30], [], slot=2)
    chunked.states.reset(1)
    chunked.run(Row(tokens[30:31], 30, 2, decode=True), Row(tokens[:128], 0, 1))
    chunked.run(Row(tokens[31:32], 31, 2, decode=True), Row(tokens[128:LENGTH], 128, 1), Row(tokens[40:77], 0, 3))
    same(chunked, 1)


@pytest.mark.parametrize("gpus", ["12GB", "12GB,12GB"])
def test_cards_are_refused_in_words(directory, gpus, monkeypatch):
    from kakera.plan import planner
    from kakera.target.devices import resolve

    monkeypatch.setattr(planner, "resolve_to_compute", resolve)
    with pytest.raises(Unserved, match=r"mixtures of experts .* on a CPU so far \(--gpus cpu\)"):
        plan_for(directory, Wishes(gpus=gpus))
    assert plan_for(directory, Wishes(gpus="cpu")).context


def test_a_loader_refuses_a_card_too(directory):
    with pytest.raises(CheckpointError, match="on a CPU so far"):
        load_weights(Checkpoint.open(directory), torch.bfloat16, torch.device("cuda"))
