"""On a CPU, what prefill writes has the same bits whatever the chunking, the company and the cache (design: a hit is
the same computation)."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from model_world import Harness, Row
from torch import Tensor

from kakera.kv.batch import Batch
from kakera.model.mixers import gdn, gdn_kernels
from kakera.model.mixers.gdn import CorePass
from kakera.model.mixers.gdn_kernels import KernelCore
from kakera.model.mixers.gdn_plain import PlainCore
from kakera.model.qwen3_5 import HybridModel
from kakera.model.state import StatePool
from kakera.ops.gdn_step import gdn_step_reference

LENGTH = 65 + 192  # the last piece is a single token if resumed at 256


@pytest.fixture
def cold(harness: Harness, tokens: Tensor):
    logits = harness.prefill(tokens[:LENGTH], [])
    return harness.cached(0, LENGTH), harness.state(0), logits


def same(harness: Harness, slot: int, cold) -> None:
    pages, (state, columns), _ = cold
    assert torch.equal(harness.cached(slot, LENGTH), pages)
    assert torch.equal(harness.state(slot)[0], state)
    assert torch.equal(harness.state(slot)[1], columns)


@pytest.mark.parametrize("cuts", [[64, 128, 192, 256], [128], [192], [256]], ids=str)
def test_chunking_changes_no_bit(harness: Harness, tokens: Tensor, cold, cuts: list[int]):
    harness.prefill(tokens[:LENGTH], cuts, slot=1)
    same(harness, 1, cold)


@pytest.mark.parametrize("position", [64, 128, 192, 256])
def test_resuming_from_a_checkpoint_changes_no_bit(harness: Harness, tokens: Tensor, cold, position: int):
    save = harness.checkpoint(position)
    harness.states.reset(0)
    harness.run(Row(tokens[:LENGTH], 0, 0, saves=(save,)))
    same(harness, 0, cold)
    harness.states.reset(0)
    harness.states.load(0, save)
    logits = harness.prefill(tokens[:LENGTH], [], start=position)
    same(harness, 0, cold)
    torch.testing.assert_close(logits, cold[2][position:], rtol=0, atol=1e-4)


def test_company_in_the_batch_changes_no_bit(harness: Harness, tokens: Tensor, cold):
    harness.prefill(tokens[:30], [], slot=2)
    harness.states.reset(1)
    harness.run(Row(tokens[30:31], 30, 2, decode=True), Row(tokens[:128], 0, 1))
    harness.states.reset(3)
    harness.run(Row(tokens[31:32], 31, 2, decode=True), Row(tokens[128:LENGTH], 128, 1), Row(tokens[40:77], 0, 3))
    same(harness, 1, cold)


def test_a_save_inside_a_segment_equals_a_segment_that_ends_there(harness: Harness, tokens: Tensor):
    inside, at_end = harness.checkpoint(128), harness.checkpoint(128)
    harness.run(Row(tokens[:LENGTH], 0, 0, saves=(inside,)))
    harness.run(Row(tokens[:128], 0, 1, saves=(at_end,)))
    assert inside.state_LVKD is not None and inside.state_LVKD.abs().max() > 0
    for name in ("state_LVKD", "conv_LCW", "hidden_H"):
        assert torch.equal(getattr(inside, name), getattr(at_end, name)), name


@dataclass(frozen=True)
class DecodeByKernels:
    """A GPU's core where it has to decode; `gdn_step_reference` stands in for its launch."""

    plain: PlainCore
    kernels: KernelCore
    capturable = False

    def plan(self, batch: Batch, states: StatePool) -> CorePass:
        return (self.kernels if batch.decode else self.plain).plan(batch, states)


@pytest.fixture(params=["plain", "kernels"])
def either(request: pytest.FixtureRequest, tiny: HybridModel, monkeypatch: pytest.MonkeyPatch) -> Harness:
    if request.param == "kernels":
        monkeypatch.setattr(gdn_kernels, "gdn_step", gdn_step_reference)
        both = lambda spec, eps, *_: DecodeByKernels(PlainCore(spec, eps), KernelCore(spec, eps))  # noqa: E731
        monkeypatch.setattr(gdn, "core_for", both)
    return Harness(HybridModel(tiny.spec, tiny.weights))


@pytest.mark.parametrize("last", [1, 5])
def test_decode_saves_what_prefill_would(either: Harness, tokens: Tensor, last: int):
    """A running request crosses a boundary with one token, or with several (a verified draft) and a cut among them."""
    expected, saved = either.checkpoint(128), either.checkpoint(128)
    either.run(Row(tokens[:128], 0, 0, saves=(expected,)))
    either.prefill(tokens[:126], [], slot=1)
    either.run(Row(tokens[126:127], 126, 1, decode=True))
    either.run(Row(tokens[127 : 127 + last], 127, 1, decode=True, saves=(saved,)))
    for name in ("state_LVKD", "conv_LCW", "hidden_H"):
        torch.testing.assert_close(getattr(saved, name), getattr(expected, name), rtol=0, atol=1e-4)


def test_half_precision_checkpoints_round_the_saved_state_only(harness: Harness, tokens: Tensor, cold):
    save = harness.checkpoint(128, torch.float16)
    harness.states.reset(1)
    harness.run(Row(tokens[:LENGTH], 0, 1, saves=(save,)))
    same(harness, 1, cold)
    harness.states.load(1, save)
    rounded = harness.prefill(tokens[:LENGTH], [], slot=1, start=128)
    torch.testing.assert_close(rounded, cold[2][128:], rtol=0, atol=2e-2)
