"""A batch is sampled as its rows are one by one, without a wait in between, within the bytes that the plan counts."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampler_mixes import mix, sample_rows
from sampler_reference import sample_row
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kakera.constrain.output import ANYTHING, Allowed
from kakera.contract.grid import PAGE
from kakera.contract.request import Sampling
from kakera.contract.step import SamplingInput
from kakera.plan.sizes import SAMPLER_COPIES
from kakera.run.choose.picks import NO_PICK, pick_of
from kakera.run.choose.ranking import PIECE_ROWS, top_ids
from kakera.run.choose.sampler import SORTED_ROWS, collect, launch

VOCABULARY = 317  # more than TOP_BOUND, and no multiple of anything


def picks_of(rows, allowed, vocabulary=VOCABULARY):
    return [pick_of(row, may, vocabulary) for row, may in zip(rows, allowed, strict=True)]


def neighbours(row: SamplingInput, logits_V: torch.Tensor, allowed: Allowed) -> set[int]:
    """What the definition in floats gives within its rounding of where a filter cuts."""
    s, found = row.sampling, set()
    for a, b in itertools.product((-2e-6, 0.0, 2e-6), repeat=2):
        near = replace(s, top_p=s.top_p + a if 0 < s.top_p < 1 else s.top_p, min_p=s.min_p * (1 + b))
        found.add(sample_row(replace(row, sampling=near), logits_V, allowed)[0])
    return found


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.integers(1, 20))
def test_a_batch_gives_what_the_definition_gives_row_by_row(seed, count):
    rows, logits_RV, allowed = mix(seed, count, VOCABULARY)
    for row, logits_V, may, sampled in zip(
        rows, logits_RV, allowed, sample_rows(rows, logits_RV, allowed), strict=True
    ):
        token, logprob = sample_row(row, logits_V, may)
        if sampled.token != token:
            assert sampled.token in neighbours(row, logits_V, may)
            continue
        assert (sampled.logprob is None) == (logprob is None)
        if logprob is not None:
            assert sampled.logprob.logprob == pytest.approx(logprob.logprob, abs=2e-6)
            assert [t for t, _ in sampled.logprob.top] == [t for t, _ in logprob.top]
            assert [p for _, p in sampled.logprob.top] == pytest.approx([p for _, p in logprob.top], abs=2e-6)


@settings(max_examples=40)
@given(st.integers(0, 2**32), st.integers(2, 20), st.randoms(use_true_random=False))
def test_a_row_does_not_depend_on_its_batch_mates(seed, count, order):
    rows, logits_RV, allowed = mix(seed, count, VOCABULARY)
    together = sample_rows(rows, logits_RV, allowed)
    alone = [sample_rows([r], logits_RV[i : i + 1], [allowed[i]])[0] for i, r in enumerate(rows)]
    assert together == alone
    shuffled = order.sample(range(count), count)
    moved = sample_rows([rows[i] for i in shuffled], logits_RV[shuffled], [allowed[i] for i in shuffled])
    assert moved == [together[i] for i in shuffled]


@settings(max_examples=20)
@given(st.integers(0, 2**32), st.integers(0, 8), st.sampled_from([float("nan"), float("inf"), float("-inf")]))
def test_a_row_that_is_not_finite_fails_alone_whatever_it_wishes(seed, broken, bad):
    """On a CPU an index out of range raises, for which a GPU would end the engine."""
    rows, logits_RV, allowed = mix(seed, 9, VOCABULARY)
    wanted = sample_rows(rows, logits_RV, allowed)
    logits_RV[broken] = bad
    found = sample_rows(rows, logits_RV, allowed)
    failed = found.pop(broken)
    assert "not finite" in failed.error and 0 <= failed.token < VOCABULARY
    assert found == wanted[:broken] + wanted[broken + 1 :]


def test_the_models_logits_stay_as_they_are():
    rows, logits_RV, allowed = mix(1, 20, VOCABULARY)
    before_RV = logits_RV.clone()
    sample_rows(rows, logits_RV, allowed)
    assert torch.equal(before_RV, logits_RV)


@given(st.lists(st.sampled_from([-float("inf"), -2.5, -1e-40, -0.0, 0.0, 1e-40, 1.0, 3e38]), min_size=1, max_size=40))
def test_equal_values_rank_by_their_ids(values):
    values_1V = torch.tensor([values])
    for count in (1, len(values)):
        assert torch.equal(
            top_ids(values_1V, count), torch.sort(values_1V, stable=True, descending=True).indices[:, :count]
        )


def test_a_mask_that_is_too_short_or_too_long_allows_nothing_beyond():
    greedy = SamplingInput("r", Sampling(max_tokens=9, seed=1, temperature=0.0), [0], 1)
    logits_RV = torch.arange(20.0).repeat(2, 1)
    short, long = Allowed(bits=b"\xff"), Allowed(bits=b"\xff\xff\x07\xff\xff")
    assert [s.token for s in sample_rows([greedy] * 2, logits_RV, [short, long])] == [7, 18]


class Watch(TorchDispatchMode):
    """The names of the operations that run, and the most bytes of their results that are alive at a time."""

    def __init__(self):
        super().__init__()
        self.names: set[str] = set()
        self.peak = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        self.names.add(func.name())
        self._alive = {key: (ref, size) for key, (ref, size) in self._alive.items() if not ref.expired()}
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in given:
                storage = tensor.untyped_storage()
                self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return out


def test_launching_never_waits_for_a_value():
    rows, logits_RV, allowed = mix(2, 20, VOCABULARY)
    with Watch() as watch:
        launched = launch(picks_of(rows, allowed), logits_RV)
    assert not watch.names & {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select"}
    assert [s.token for s in collect(launched)] == launched.tokens_R.tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_batch_without_filters_ranks_nothing(temperature):
    wish = Sampling(max_tokens=9, seed=1, temperature=temperature, frequency_penalty=0.5)
    rows = [SamplingInput(f"r{i}", wish, [1, 2, 3], 1) for i in range(4)]
    with Watch() as watch:
        launch(picks_of(rows, [ANYTHING] * 4), torch.randn(4, VOCABULARY))
    assert "aten::argmax" in watch.names
    assert not watch.names & {"aten::topk", "aten::sort.stable", "aten::sort", "aten::cumsum", "aten::cumsum_"}


@pytest.mark.parametrize("wish", ["any", "sorted", "drawn", "top", "logprobs", "greedy"])
@pytest.mark.parametrize("count", [1, 40])
def test_what_is_alive_beside_the_logits_stays_within_the_plan(wish, count):
    """A plan counts 3 copies of the logits of 64 rows or more: no chunk is shorter than a page."""
    vocabulary = 20_000
    rows, logits_RV, allowed = mix(3, count, vocabulary)
    base = replace(rows[0].sampling, logit_bias=(), temperature=1.0, top_k=0, logprobs=None)
    only = {
        "sorted": replace(base, top_p=0.9),
        "drawn": replace(base, top_p=1.0, min_p=0.0),
        "top": replace(base, top_k=50),
        "logprobs": replace(base, temperature=0.0, logprobs=5),
        "greedy": replace(base, temperature=0.0),
    }
    if wish != "any":
        rows = [replace(row, sampling=only[wish]) for row in rows]
    row_bytes = vocabulary * 4
    with Watch() as watch:
        launched = launch(picks_of(rows, allowed, vocabulary), logits_RV)
    small = 64 * 2**10 + count * 128 * 64  # what does not grow with the vocabulary; masks are bits
    most = (
        (count + max(4 * min(count, PIECE_ROWS), 5 * min(count, SORTED_ROWS)) + 4) * row_bytes  # 4: ids, and once more
        + count * vocabulary // 8
        + small
    )
    assert 0 < watch.peak <= most
    assert count * row_bytes + most <= SAMPLER_COPIES * max(count, PAGE) * row_bytes
    assert not any(s.error for s in collect(launched))


def test_a_row_without_a_wish_holds_its_place():
    rows, logits_RV, allowed = mix(4, 3, VOCABULARY)
    first, _, last = picks_of(rows, allowed)
    found = collect(launch([first, NO_PICK, last], logits_RV))
    wanted = sample_rows(rows, logits_RV, allowed)
    assert [found[0], found[2]] == [wanted[0], wanted[2]]
