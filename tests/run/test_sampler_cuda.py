"""Sampling on a GPU: the CPU's tokens, in any batch, without a wait, within the plan. Skipped where there is no GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from sampler_mixes import mix, sample_rows

from kakera.constrain.output import ANYTHING
from kakera.contract.grid import PAGE
from kakera.plan.sizes import SAMPLER_COPIES
from kakera.run.choose.picks import pick_of
from kakera.run.choose.sampler import collect, launch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
SMALL, REAL = 317, 248_320


def tokens(sampled):
    assert not any(s.error for s in sampled)
    return [s.token for s in sampled]


def picks_of(rows, allowed, vocabulary):
    return [pick_of(row, may, vocabulary) for row, may in zip(rows, allowed, strict=True)]


@pytest.mark.parametrize(("vocabulary", "count", "mixes"), [(SMALL, 20, 60), (REAL, 32, 2)])
def test_a_gpu_chooses_the_tokens_of_a_cpu(vocabulary, count, mixes):
    """Both sum integers; what is left is exp, which may differ by its last bit: one draw in millions."""
    for seed in range(mixes):
        rows, logits_RV, allowed = mix(seed, count, vocabulary)
        wanted = sample_rows(rows, logits_RV, allowed)
        found = sample_rows(rows, logits_RV.cuda(), allowed)
        assert tokens(found) == tokens(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert (one.logprob is None) == (other.logprob is None)
            if one.logprob is not None:
                assert one.logprob.logprob == pytest.approx(other.logprob.logprob, abs=5e-5)
                assert [t for t, _ in one.logprob.top] == [t for t, _ in other.logprob.top]


@pytest.mark.parametrize(("vocabulary", "mixes"), [(SMALL, 20), (REAL, 2)])
def test_a_row_does_not_depend_on_its_batch_mates(vocabulary, mixes):
    for seed in range(mixes):
        rows, logits_RV, allowed = mix(100 + seed, 13, vocabulary)
        logits_RV = logits_RV.cuda()
        alone = [sample_rows([row], logits_RV[i : i + 1], [allowed[i]]) for i, row in enumerate(rows)]
        assert tokens(sample_rows(rows, logits_RV, allowed)) == [tokens(found)[0] for found in alone]


@pytest.mark.parametrize("vocabulary", [SMALL, REAL])
def test_launching_never_waits_for_the_device(vocabulary):
    rows, logits_RV, allowed = mix(5, 20, vocabulary)
    logits_RV = logits_RV.cuda()
    wishes = picks_of(rows, allowed, vocabulary)
    collect(launch(wishes, logits_RV))  # libraries load at the first call
    torch.cuda.set_sync_debug_mode("error")
    try:
        launched = launch(wishes, logits_RV)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert tokens(collect(launched)) == launched.tokens_R.tolist()


def test_collecting_does_not_wait_for_what_is_queued_behind():
    rows, logits_RV, _ = mix(6, 4, SMALL)
    logits_RV = logits_RV.cuda()
    wishes = picks_of(rows, [ANYTHING] * 4, SMALL)
    collect(launch(wishes, logits_RV))
    launched = launch(wishes, logits_RV)
    torch.cuda._sleep(2_000_000_000)  # about a second of clock cycles
    behind = torch.cuda.Event()
    behind.record()
    collect(launched)
    assert not behind.query()
    torch.cuda.synchronize()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_fails_alone_whatever_it_wishes(bad):
    for seed in range(10):
        rows, logits_RV, allowed = mix(200 + seed, 9, SMALL)
        logits_RV = logits_RV.cuda()
        wanted = sample_rows(rows, logits_RV, allowed)
        logits_RV[4] = bad
        found = sample_rows(rows, logits_RV, allowed)
        assert "not finite" in found[4].error
        assert tokens(found[:4] + found[5:]) == tokens(wanted[:4] + wanted[5:])


@pytest.mark.parametrize("top_k", [0, 20])
@pytest.mark.parametrize("count", [1, 32])
def test_peak_bytes_stay_within_the_plan(count, top_k):
    rows, logits_RV, allowed = mix(7, count, REAL)
    rows = [replace(row, sampling=replace(row.sampling, temperature=1.0, top_k=top_k, logprobs=5)) for row in rows]
    logits_RV = logits_RV.cuda()
    wishes = picks_of(rows, allowed, REAL)
    collect(launch(wishes, logits_RV))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() - logits_RV.nbytes
    collect(launch(wishes, logits_RV))
    assert torch.cuda.max_memory_allocated() - before <= SAMPLER_COPIES * max(count, PAGE) * REAL * 4
