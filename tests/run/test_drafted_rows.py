"""Rows with drafts on the tiny model: whatever is guessed, requests say what they say one token a step."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from graph_stand_in import with_graphs
from run_world import World, ask, logprob_gap, tokens_of

from kakera.contract.request import Constraint, Request, ThinkingBudget
from kakera.contract.step import SamplingInput

END, CALL, THINK_END = 258, 259, 262
JSON = 'start: %json {"type":"object","properties":{"n":{"type":"integer","minimum":0,"maximum":99}},' + (
    '"required":["n"],"additionalProperties":false,"x-guidance":{"whitespace_flexible":false}}'
)
DRAWN = {"temperature": 1.0, "logprobs": 2}
Texts = dict[str, list[int]]


def requests() -> list[Request]:
    """Every wish that a sampled token can depend on."""
    budget = ThinkingBudget(9, (10, THINK_END), (THINK_END, CALL))
    wishes = [
        {"stop_token_ids": (7, 8, 9)},
        {**DRAWN, "seed": 3, "choice": 1, "top_k": 5},
        {**DRAWN, "top_p": 0.8, "repetition_penalty": 1.4, "stop_token_ids": tuple(range(20)), "min_tokens": 30},
        {"frequency_penalty": 0.6, "presence_penalty": 0.3, "logit_bias": ((40, 2.0), (41, -3.0))},
        {**DRAWN, "constraint": Constraint(JSON), "stop_token_ids": (END,)},
        {**DRAWN, "constraint": Constraint("start: /([0-9]{3}, )*/"), "stop_token_ids": ()},
        {**DRAWN, "constraint": Constraint("start: /[a-c]{1,12}/", after=THINK_END, at=CALL), "thinking": budget},
        {"logit_bias": ((50, 90.0),), "min_tokens": 80, "stop_token_ids": (50,)},
    ]
    lengths = (3, 20, 60, 64, 90, 127, 130, 200)
    pairs = zip(wishes, lengths, strict=True)
    return [ask(f"r{i}", tokens_of(i, length), 50 + i, **wish) for i, (wish, length) in enumerate(pairs)]


def adversary(texts: Texts, seed: int, wrong: float) -> Callable[[SamplingInput, int], list[int]]:
    """What comes next, up to somewhere; then, as often, something else."""
    rng = random.Random(seed)

    def draft(given: SamplingInput, most: int) -> list[int]:
        right = texts.get(given.request_id, [])[given.generated :][: rng.randrange(min(most, 7) + 1)]
        right += [rng.randrange(256)] * (rng.random() < wrong)
        if right and rng.random() < wrong:
            right[rng.randrange(len(right))] = rng.choice([END, CALL, THINK_END, rng.randrange(256)])
        return right

    return draft


@pytest.fixture(scope="module")
def plain(tiny_model):
    """What the requests say without drafts."""
    return dict(zip([r.id for r in requests()], World.build(tiny_model).answer(*requests()), strict=True))


@pytest.mark.parametrize("wrong", [0.0, 0.4, 1.0], ids=["right", "mixed", "wrong"])
@pytest.mark.parametrize("changes", [{}, {"pages": 14, "slots": 3}], ids=["roomy", "crowded"])
def test_drafts_change_no_text(tiny_model, plain, changes, wrong):
    world = World.build(tiny_model, **changes)
    world.engine.scheduler.drafter = adversary({name: answer.tokens for name, answer in plain.items()}, 1, wrong)
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
def test_behind_drafts_that_were_refused_a_slot_holds_what_it_does_behind_the_tokens_that_stay(tiny_model, kv):
    """To the bit: a row of one good draft and two bad ones leaves the state of the row of one good draft."""
    request = ask("a", tokens_of(1, 70), 40)
    text = World.build(tiny_model, kv).one(request).tokens
    held: list[list[tuple[int, list[torch.Tensor]]]] = []
    for bad in ([], [3, 3]):
        world = World.build(tiny_model, kv)

        def draft(given: SamplingInput, most: int, bad=bad) -> list[int]:
            assert all(token != text[given.generated + 1] for token in bad) or given.generated + 1 >= len(text)
            return (text[given.generated :][:1] + bad)[:most]

        world.engine.scheduler.drafter = draft
        execute, slots = world.runner.execute, []

        def look(plan, *sampling, world=world, execute=execute, slots=slots):
            result = execute(plan, *sampling)
            for row, found in zip(plan.decode, result.rows, strict=False):
                end = row.start + len(found.tokens)
                pages = world.runner.kv.store.read_pages(world.runner.tables.of(row))
                states = [live.clone() for live in world.runner.states.of(row.slot)]
                slots.append((end, [*states, *(page[:, : end // 64] for page in pages)]))
            return result

        world.runner.execute = look
        assert world.one(request).tokens == text
        held.append(slots)
    assert len(held[0]) == len(held[1]) < 25
    for one, other in zip(*held, strict=True):
        assert one[0] == other[0] and all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))


def test_a_second_turn_hits_what_drafted_rows_have_saved(tiny_model):
    texts, seen = [], []
    for drafted in (False, True):
        world = World.build(tiny_model).watch()
        if drafted:
            world.engine.scheduler.drafter = adversary({"a": texts[0][0], "b": texts[0][1]}, 2, 0.5)
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
    """The chunk form mixes the tokens of a row, so that the row may fail; what it wrote is never hit."""
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

    world.engine.scheduler.drafter = draft
    bad, good = world.answer(*requests)
    assert good.tokens == texts["good"] and bad.tokens == texts["bad"][: len(bad.tokens)]
    assert len(bad.tokens) == 60 or "not finite" in bad.finished.message
    world.engine.scheduler.drafter = None
    for name, request in zip("xy", requests, strict=True):
        again = world.one(replace(request, id=name))
        assert again.tokens == texts[request.id] and again.finished.usage.cached_tokens == 64
    world.check_idle()


def test_drafted_rows_go_launch_by_launch_beside_graphs(tiny_model, plain):
    world = World.build(tiny_model)
    made = with_graphs(world)
    texts = {name: answer.tokens for name, answer in plain.items() if name in ("r1", "r4")}
    world.engine.scheduler.drafter = adversary(texts, 5, 0.0)
    answers = world.answer(*requests())
    assert [one.tokens for one in answers] == [one.tokens for one in plain.values()]
    assert sum(one.replays for one in made) > 10
    world.check_idle()
