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
from kakera.ops import linear
from kakera.schedule.drafts import Drafts

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
    return [ask(f"r{i}", tokens_of(i, length), 70 + i, **wish) for i, (wish, length) in enumerate(pairs)]


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


@pytest.fixture
def row_by_row(monkeypatch):
    """Products of one row each where they are few: a library's bits depend on how many rows it gets."""
    product = linear._product

    def one_by_one(x_NI, weight):
        if len(x_NI) == linear.BLOCK_ROWS:
            return product(x_NI, weight)
        return torch.cat([product(x_1I, weight) for x_1I in x_NI.split(1)])

    monkeypatch.setattr(linear, "_product", one_by_one)


def noting(world: World) -> dict[tuple[str, int], list[torch.Tensor]]:
    """From now on: what a slot holds behind each step, by request and tokens computed."""
    held, execute = {}, world.runner.execute

    def look(plan, sampling):
        result = execute(plan, sampling)
        for row, found in zip(plan.decode, result.rows, strict=False):
            end = row.start + len(found.tokens)
            pages = world.runner.kv.store.read_pages(world.runner.tables.of(row))
            states = [live.clone() for live in world.runner.states.of(row.slot)]
            held[row.request_id, end] = [*states, *(page[:, : end // 64] for page in pages)]
        return result

    world.runner.execute = look
    return held


def checkpoints(world: World) -> dict[bytes, list[torch.Tensor]]:
    """What the store holds for each prefix."""
    nodes = [node for node in world.cache.tree.nodes() if node.checkpoint is not None]
    return {node.key: list(world.runner.store.checkpoints[node.checkpoint.id].parts.values()) for node in nodes}


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
