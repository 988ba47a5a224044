"""Rows with drafts on the tiny model: whatever is guessed, requests say what they say one token a step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from drafted_world import adversary, checkpoints, noting, requests, row_by_row
from graph_stand_in import with_graphs
from run_world import World, ask, logprob_gap, tokens_of

from kakera.contract.step import SamplingInput
from kakera.schedule.drafts import Drafts

__all__ = ["row_by_row"]  # a fixture


@pytest.fixture(scope="module")
def plain(tiny_model):
    """What the requests say without drafts."""
    return dict(zip([r.id for r in requests()], World.build(tiny_model).answer(*requests()), strict=True))


@pytest.mark.parametrize("wrong", [0.0, 0.4, 1.0], ids=["right", "mixed", "wrong"])
@pytest.mark.parametrize("changes", [{}, {"pages": 14, "slots": 3}], ids=["roomy", "crowded"])
def test_drafts_change_no_text(tiny_model, plain, changes, wrong):
    world = World.build(tiny_model, **changes)
    world.engine.scheduler.drafts = Drafts(adversary({name: answer.tokens for name, answer in plain.items()}, 1, wrong))
    answers = dict(zip(plain, world.answer(*requests()), strict=True))
    for name, wanted in plain.items():
        found = answers[name]
        assert logprob_gap(found, wanted) < 1e-3
        for one, other in zip(found.logprobs, wanted.logprobs, strict=True):
            assert [token for token, _ in one.top] == [token for token, _ in other.top]
        ends = [replace(one.finished, usage=None) for one in (found, wanted)]
        assert ends[0] == ends[1] and found.finished.usage.completion_tokens == wanted.finished.usage.completion_tokens
    assert {one.finished.reason for one in plain.values()} == {"stop", "length"}
    world.check_idle()


@pytest.mark.parametrize("kv", ["fp32", "int2"])
def test_states_pages_checkpoints_and_log_probabilities_have_the_bits_of_plain_decode(tiny_model, row_by_row, kv):
    """Whatever was guessed, right or wrong, at every length of a row and every place in a page, beside others."""
    plain, drafted = World.build(tiny_model, kv), World.build(tiny_model, kv)
    wanted, found = noting(plain), noting(drafted)
    answers = dict(zip((r.id for r in requests()), plain.answer(*requests()), strict=True))
    texts = {name: answer.tokens for name, answer in answers.items()}
    drafted.engine.scheduler.drafts = Drafts(adversary(texts, 3, 0.4))
    for one, other in zip(answers.values(), drafted.answer(*requests()), strict=True):
        assert one.tokens == other.tokens and one.logprobs == other.logprobs
    assert len(found) < 0.6 * len(wanted)
    for place, tensors in found.items():
        assert all(torch.equal(a, b) for a, b in zip(tensors, wanted[place], strict=True)), place
    saved = checkpoints(drafted)
    assert saved.keys() == checkpoints(plain).keys()
    for key, parts in checkpoints(plain).items():
        assert all(torch.equal(a, b) for a, b in zip(parts, saved[key], strict=True))


def test_a_second_turn_hits_what_drafted_rows_have_saved(tiny_model):
    texts, seen = [], []
    for drafted in (False, True):
        world = World.build(tiny_model).watch()
        if drafted:
            world.engine.scheduler.drafts = Drafts(adversary({"a": texts[0][0], "b": texts[0][1]}, 2, 0.5))
        first = world.one(ask("a", tokens_of(1, 150), 80))
        turn = (*tokens_of(1, 150), *first.tokens, *tokens_of(2, 20))
        second = world.one(ask("b", turn, 40))
        assert second.finished.usage.cached_tokens == 192
        texts.append((first.tokens, second.tokens))
        seen.append(world.seen["b"])
        world.check_idle()
    assert texts[0] == texts[1]
    cold = World.build(tiny_model).watch()
    assert cold.one(ask("b", turn, 40)).tokens == texts[0][1]
    assert float((seen[1].logits_V - cold.seen["b"].logits_V).abs().max()) < 1e-2


def test_a_draft_whose_values_are_not_finite_harms_its_own_row_at_most(tiny_model):
    """What the poisoned draft wrote is never read, as its slots are not those of tokens that stay."""
    poison, calm = 200, World.build(tiny_model)
    requests = [
        ask(name, [token % poison for token in tokens_of(i, 100)], 60, logit_bias=((poison, -100.0),))
        for i, name in enumerate(("bad", "good"))
    ]
    texts = {request.id: calm.one(request).tokens for request in requests}
    world = World.build(tiny_model)
    with torch.inference_mode():
        world.runner.model.weights.embedding.rows_VH[poison] = float("nan")

    def draft(given: SamplingInput, most: int) -> list[int]:
        right = texts[given.request_id][given.generated :][:2]
        return (right + [poison] * (given.request_id == "bad" and given.generated > 30))[:most]

    world.engine.scheduler.drafts = Drafts(draft)
    bad, good = world.answer(*requests)
    assert good.tokens == texts["good"] and bad.tokens == texts["bad"]
    world.engine.scheduler.drafts = None
    for name, request in zip("xy", requests, strict=True):
        again = world.one(replace(request, id=name))
        assert again.tokens == texts[request.id] and again.finished.usage.cached_tokens == 64
    world.check_idle()


def test_drafted_rows_go_launch_by_launch_beside_graphs(tiny_model, plain):
    world = World.build(tiny_model)
    made = with_graphs(world)
    texts = {name: answer.tokens for name, answer in plain.items() if name in ("r1", "r4")}
    world.engine.scheduler.drafts = Drafts(adversary(texts, 5, 0.0))
    answers = world.answer(*requests())
    assert [one.tokens for one in answers] == [one.tokens for one in plain.values()]
    assert sum(one.replays for one in made) > 10
    world.check_idle()
