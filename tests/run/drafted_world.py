"""Requests with every wish that a token can depend on, drafters that know their texts, and eyes for what slots hold."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from run_world import World, ask, tokens_of

from kakera.contract.request import Constraint, Request, ThinkingBudget
from kakera.contract.step import SamplingInput
from kakera.ops import linear

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
