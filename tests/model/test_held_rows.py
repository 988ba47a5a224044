"""Rows whose states are only read, and commits of what stays: to the bit one token after the other."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from kakera.arch.blocks import GdnSpec
from kakera.kv.batch import Batch, Held, Kept, Span
from kakera.model.mixers import gdn_kernels
from kakera.model.mixers.gdn import Core
from kakera.model.mixers.gdn_kernels import KernelCore
from kakera.model.mixers.gdn_plain import PlainCore
from kakera.model.state import StatePool
from kakera.model.weights import GdnWeights
from kakera.ops.gdn_step import gdn_step_reference

SPEC, EPS, SLOTS = GdnSpec(2, 6, 16, 16, 4), 1e-6, 3
WIDTH = SPEC.conv_channels + SPEC.values + 2 * SPEC.v_heads


@pytest.fixture(params=["plain", "kernels"])
def core(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Core:
    """`gdn_step_reference` stands in for the launch."""
    if request.param == "plain":
        return PlainCore(SPEC, EPS)
    monkeypatch.setattr(gdn_kernels, "gdn_step", gdn_step_reference)
    return KernelCore(SPEC, EPS)


def pool() -> StatePool:
    spec = SimpleNamespace(states=dict.fromkeys(SPEC.states(), 1), drafting=False)
    return StatePool(spec, SLOTS)  # type: ignore[arg-type]


def weights() -> GdnWeights:
    torch.manual_seed(0)
    make = torch.randn
    V = SPEC.v_heads
    return GdnWeights(None, None, make(4, SPEC.conv_channels) / 2, -make(V).exp(), make(V), make(SPEC.v_dim))


def run(core: Core, of: GdnWeights, states: StatePool, spans: list[Span], mixed_TX: Tensor) -> Tensor:
    none = torch.zeros(0, dtype=torch.int64)
    return core.plan(Batch(torch.zeros(len(mixed_TX)), none, tuple(spans), (), none), states).run(0, of, mixed_TX)


def test_24_hundreds_of_rounds_with_refusals_leave_the_state_of_one_token_after_the_other(core):
    """sglang#28695. Three sequences, each round with other drafts and other numbers that stay, none among them."""
    of, rng, single, held = weights(), random.Random(1), pool(), pool()
    for _ in range(150):
        counts = [rng.randrange(1, 9) for _ in range(SLOTS)]
        mixed = [torch.randn(count, WIDTH) * 2 for count in counts]
        spans, offset = [], 0
        for slot, count in enumerate(counts):
            held_row = Held(ends=[] if rng.random() < 0.5 else None)
            held_row.inputs["gdn"].append(mixed[slot])
            spans.append(Span(offset, count, 0, slot, torch.empty(0), (), held_row))
            offset += count
        before = held.state_LSVKD.clone(), held.conv_LSWC.clone()
        y_TI = run(core, of, held, spans, torch.cat(mixed))
        assert torch.equal(held.state_LSVKD, before[0]) and torch.equal(held.conv_LSWC, before[1])
        stay = [rng.choice([count, rng.randrange(count + 1)]) for count in counts]
        kept = [(Kept(spans[slot].held, slot, n), mixed[slot][:n]) for slot, n in enumerate(stay) if n]
        if kept:
            core.commit(0, of, kept, held)
        for slot, n in enumerate(stay):
            for i in range(n):
                one = run(core, of, single, [Span(0, 1, 0, slot, torch.empty(0))], mixed[slot][i : i + 1])
                torch.testing.assert_close(one[0], y_TI[spans[slot].offset + i], rtol=0, atol=1e-6)
        assert torch.equal(held.state_LSVKD, single.state_LSVKD) and torch.equal(held.conv_LSWC, single.conv_LSWC)
