"""Random traffic through replays that run ahead and copies that come late gives, step by step, what neither gives."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from graph_stand_in import in_blocks, with_graphs, with_late_store
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from run_world import World, ask, tiny_plan, tokens_of

from kakera.contract.events import Finished, Tokens
from kakera.contract.request import NO_LIMIT, Constraint, Request, ThinkingBudget
from kakera.errors import RequestRefused

POISON = 7  # an id whose embedding is NaN: no prompt has it, some requests like to say it
END, THINK, CLOSE = 258, 261, 262
GRAMMARS = (None, None, None, "start: /[a-c]{1,12}/", "start: /[a-d]{70,90}/", "start: /(/")
SIZES = (
    {"kv": "fp32"},
    {"kv": "fp32", "pages": 13, "slots": 3},
    {"pages": 16, "slots": 5, "host_cache": 300_000},
    {"chunk": 64, "pages": 40},
)
TOLERANCE = 2e-3  # of log-probabilities: rows that are sampled together share a product, and codes of INT2 flip


@dataclass(frozen=True)
class Ask:
    """`n` requests that differ in their choice only, over one of three texts."""

    text: int
    shared: int
    own: int
    max_tokens: int
    n: int = 1
    warm: bool = False
    likes_poison: bool = False
    grammar: int = 0
    thinks: bool = False
    stops: bool = False
    echo: bool = False
    allowed: int = NO_LIMIT

    def requests(self, number: int) -> list[Request]:
        tokens = (*tokens_of(self.text, self.shared), *tokens_of(1000 + number, self.own))
        tokens = tuple(8 if token == POISON else token for token in tokens)
        sampling = {
            "temperature": 1.0 if self.warm else 0.0,
            "repetition_penalty": 1.2 if self.warm else 1.0,
            "logit_bias": ((POISON, 6.0),) if self.likes_poison else ((POISON, -99.0),),
            "constraint": Constraint(GRAMMARS[self.grammar]) if GRAMMARS[self.grammar] else None,
            "thinking": ThinkingBudget(3, (65, CLOSE), (CLOSE,)) if self.thinks else None,
            "stop_token_ids": (END, *range(100, 110)) if self.stops else (END,),
            "prompt_logprobs": 1 if self.echo else None,
        }
        marks = [mark for mark in (self.shared,) if 0 < mark < len(tokens)]
        return [
            ask(f"r{number}.{choice}", tokens, self.max_tokens, marks, choice=choice, **sampling)
            for choice in range(self.n)
        ]


asks = st.builds(
    Ask,
    text=st.integers(0, 2),
    shared=st.sampled_from([0, 50, 64, 128, 190]),
    own=st.sampled_from([1, 13, 62, 63, 64, 65, 130]),
    max_tokens=st.sampled_from([0, 1, 2, 9, 40, 70, 140]),
    n=st.sampled_from([1, 1, 2, 3]),
    warm=st.booleans(),
    likes_poison=st.sampled_from([False, False, True]),
    grammar=st.integers(0, len(GRAMMARS) - 1),
    thinks=st.sampled_from([False, False, True]),
    stops=st.booleans(),
    echo=st.sampled_from([False, False, False, True]),
    allowed=st.sampled_from([NO_LIMIT, 1, 20]),
)
moves = st.one_of(
    asks,
    st.tuples(st.just("steps"), st.sampled_from([1, 1, 2, 3, 10, 30])),
    st.tuples(st.just("abort"), st.integers(0, 7)),
    st.tuples(st.just("read"), st.sampled_from([3, 25])),
    st.tuples(st.just("flush"), st.just(0)),
    st.tuples(st.just("copies"), st.just(0)),
)


def play(world: World, game: list, finish_copies=lambda: None) -> list:
    """Everything that is told, in order. The youngest requests but so many are aborted; ids come back."""
    told: list = []
    number = 0
    for move in game:
        if isinstance(move, Ask):
            for request in move.requests(number % 3 if number % 4 == 3 else number):
                try:
                    world.engine.submit(request, move.allowed)
                except RequestRefused as error:
                    told.append(error.code)
            number += 1
            continue
        kind, count = move
        if kind == "steps":
            for _ in range(count):
                told += world.engine.step()
        elif kind == "abort":
            world.engine.abort(f"r{max(0, number - 1 - count // 2)}.{count % 2}")
        elif kind == "read":
            read(world, count)
        elif kind == "flush":
            told.append(replace(world.engine.flush(), host_bytes=0))
        elif kind == "lend":
            lend(world, count, finish_copies)
        else:
            finish_copies()
    lend(world, 16, finish_copies)
    for _ in range(4000):
        told += world.engine.step()
        read(world, 9)
        stats = world.engine.stats()
        if not stats.running + stats.waiting:
            world.settle()
            finish_copies()
            world.check_idle()
            return told
    raise AssertionError("some requests never end")


def lend(world: World, sixteenths: int, finish_copies) -> None:
    """So much of pages and slots stays; what the others held is spoiled, once all that is queued has run."""
    scheduler = world.engine.scheduler
    pages, slots = (max(1, count * sixteenths // 16) for count in (scheduler.limits.pages, scheduler.limits.slots))
    scheduler.admit_up_to(slots)
    there, plan = scheduler.resize(pages)
    world.runner.execute(plan)
    finish_copies()
    for tensor in world.runner.kv.store.page_tensors():
        tensor[:, there:] = float("nan") if tensor.is_floating_point() else 0xFF


def read(world: World, count: int) -> None:
    """All readers come so many tokens further."""
    scheduler = world.engine.scheduler
    for sequence in (*scheduler.running.oldest_first(), *scheduler.waiting):
        world.engine.allow(sequence.id, sequence.completion_tokens + count)


def seen(event: object) -> object:
    """Without times and log-probabilities."""
    if isinstance(event, Finished):
        return event.request_id, event.reason, event.code, event.stop_token, event.usage.completion_tokens
    if isinstance(event, Tokens):
        return event.request_id, event.tokens
    return event if not hasattr(event, "logprobs") else event.request_id


def build(tiny_model, **size) -> World:
    world = World.build(tiny_model, **size)
    with torch.inference_mode():
        world.runner.model.weights.embedding.rows_VH[POISON] = float("nan")
    scheduler = world.engine.scheduler
    scheduler.limits = scheduler.admission.limits = replace(scheduler.limits, saves=2, room=70)
    execute = world.runner.execute
    world.runner.execute = lambda *step: replace(execute(*step), seconds=0.01)  # type: ignore[method-assign]
    return world


@settings(max_examples=8, print_blob=False, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(SIZES), st.lists(moves, min_size=4, max_size=14))
def test_random_traffic(tiny_model, size, game):
    assert_alike(tiny_model, size, game)


@settings(max_examples=6, print_blob=False, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from(SIZES),
    st.lists(st.one_of(moves, st.tuples(st.just("lend"), st.sampled_from([1, 4, 9, 16]))), min_size=6, max_size=14),
)
def test_random_traffic_on_a_card_that_others_use_too(tiny_model, size, game):
    assert_alike(tiny_model, size, game)


def assert_alike(tiny_model, size, game) -> None:
    plain, replayed = build(tiny_model, **size), build(tiny_model, **size)
    plan = tiny_plan(tiny_model, **size)
    side = with_late_store(replayed, plan)
    with_graphs(replayed, 4)
    ours = play(replayed, game, side.finish)
    wanted = play(in_blocks(plain, plan), game)
    assert [seen(event) for event in ours] == [seen(event) for event in wanted]
    for one, other in zip(ours, wanted, strict=True):
        pairs = zip(getattr(one, "logprobs", ()), getattr(other, "logprobs", ()), strict=True)
        assert max((abs(a.logprob - b.logprob) for a, b in pairs), default=0.0) < TOLERANCE
