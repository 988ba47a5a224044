"""Aborts, evictions, demotions, preemptions, conversations: the answers are those of an undisturbed engine."""

import functools
import random

import pytest
from run_world import CODECS, World, ask, logprob_gap, tokens_of

from kakera.cache.integrity import check_integrity
from kakera.contract.events import Finished

TOLERANCE = 1e-3  # decode wrote what prefill would write; measured: 3e-6 (fp32, bf16), 6e-4 (int2: codes flip)


def undisturbed(tiny_model, kv, requests):
    world = World.build(tiny_model, kv)
    return {request.id: world.one(request) for request in requests}


@pytest.mark.parametrize(("kv", "seed"), [("fp32", 1), ("bf16", 2), ("int2", 3)])
def test_aborts_at_any_moment_disturb_nobody(tiny_model, kv, seed):
    """Queued, prefilling and decoding requests go; slots and pages are few, so their places are taken at once."""
    rng = random.Random(seed)
    requests = [ask(f"r{i}", tokens_of(i, rng.choice((20, 90, 260, 400))), rng.randrange(4, 20)) for i in range(10)]
    doomed = {f"r{i}": rng.randrange(1, 12) for i in range(0, 10, 2)}
    world = World.build(tiny_model, kv, slots=4, chunk=64, pages=40)
    for request in requests:
        world.engine.submit(request)
    ends, texts, step = {}, {request.id: [] for request in requests}, 0
    while len(ends) < len(requests):
        step += 1
        for id in [id for id, at in doomed.items() if at == step]:
            world.engine.abort(id)
        for event in world.engine.step():
            if isinstance(event, Finished):
                ends[event.request_id] = event.reason
            elif hasattr(event, "tokens"):
                texts[event.request_id] += event.tokens
        check_integrity(world.cache)
    assert "abort" in {ends[id] for id in doomed}
    for id, wanted in undisturbed(tiny_model, kv, requests).items():
        if ends[id] == "abort":
            assert wanted.tokens[: len(texts[id])] == texts[id]
        else:
            assert wanted.tokens == texts[id]
    world.check_idle()


def conversation(seed, turns, system):
    """Prompts that grow by an answer's worth and a question; boundaries at every message."""
    rng, prompt, boundaries = random.Random(seed), tokens_of(1, system), [system]
    for _ in range(turns):
        prompt += tokens_of(rng.randrange(10**6), rng.randrange(20, 120))
        boundaries = [*boundaries, len(prompt)]
        yield prompt, tuple(boundaries)
        prompt += tokens_of(rng.randrange(10**6), rng.randrange(10, 60))
        boundaries = [*boundaries, len(prompt)]


@functools.cache
def talks(tiny_model, kv):
    """Three conversations that take turns over one system prompt: requests, and their answers without company."""
    rounds = list(zip(*(conversation(seed, 3, 170) for seed in (1, 2, 3)), strict=True))
    requests = [
        ask(f"{turn}.{who}", prompt, 6, boundaries=marks)
        for turn, round_ in enumerate(rounds)
        for who, (prompt, marks) in enumerate(round_)
    ]
    return requests, {r.id: World.build(tiny_model, kv).one(r) for r in requests}


@pytest.mark.parametrize("kv", CODECS)
@pytest.mark.parametrize("checkpoints", [3, 40])
def test_a_tiny_pool_and_a_tiny_store_change_no_answer(tiny_model, kv, checkpoints):
    """12 pages hold about one of the conversations."""
    world = World.build(tiny_model, kv, pages=12, chunk=64)
    budget = checkpoints * world.cache.sizes.checkpoint_bytes
    world = World.build(tiny_model, kv, pages=12, chunk=64, host_cache=budget)
    requests, wanted = talks(tiny_model, kv)
    cached = 0
    for request in requests:
        answer = world.one(request)
        cached += answer.finished.usage.cached_tokens
        assert logprob_gap(answer, wanted[request.id]) < TOLERANCE
        world.check_idle()
    counters = world.cache.counters
    assert cached > 0 and counters["checkpoints_evicted"] + counters["pages_demoted"] > 0
    if checkpoints == 40:
        assert counters["pages_promoted"] > 0


@pytest.mark.parametrize("kv", CODECS)
def test_preempted_requests_give_the_same_answer(tiny_model, kv):
    requests = [ask(f"p{i}", tokens_of(i, 100 + 40 * i), 70) for i in range(3)]
    world = World.build(tiny_model, kv, pages=10)
    answers = world.answer(*requests)
    assert world.cache.counters["preemptions"] > 0
    gaps = []
    for answer, wanted in zip(answers, undisturbed(tiny_model, kv, requests).values(), strict=True):
        assert answer.finished.reason == "length" and len(answer.tokens) == 70
        gaps.append(logprob_gap(answer, wanted))
    assert max(gaps) < TOLERANCE
    world.check_idle()


@pytest.mark.parametrize("kv", CODECS)
def test_the_next_turn_starts_behind_the_answer(tiny_model, kv):
    """The answer's pages were written by decode: a hit on them equals a cold prefill within a stated tolerance."""
    world = World.build(tiny_model, kv)
    prompt = tokens_of(11, 230)
    first = world.one(ask("turn 1", prompt, 100))
    follow = prompt + tuple(first.tokens) + tokens_of(12, 40)
    second = world.one(ask("turn 2", follow, 30))
    assert second.finished.usage.cached_tokens == 320
    gap = logprob_gap(second, World.build(tiny_model, kv).one(ask("cold", follow, 30)))
    assert gap < TOLERANCE


@pytest.mark.parametrize("kv", CODECS)
def test_a_client_that_drops_old_thinking_hits_what_remains(tiny_model, kv):
    """The second turn repeats the first without 90 tokens in its middle: everything before them is cached."""
    system, thinking, rest = tokens_of(21, 200), tokens_of(22, 90), tokens_of(23, 160)
    world = World.build(tiny_model, kv)
    world.one(ask("with", system + thinking + rest, boundaries=[200, 290]))
    without = ask("without", system + rest + tokens_of(24, 70), 20, boundaries=[200, 360])
    answer = world.one(without)
    assert answer.finished.usage.cached_tokens == 192 and "diverged" in answer.finished.usage.miss_reason
    assert logprob_gap(answer, World.build(tiny_model, kv).one(without)) < 1e-4


def test_the_sink_of_a_demoted_conversation_comes_back(tiny_model):
    """A hit reads positions 0 .. 63 in 16 bit from the sink, never from its 2-bit page."""
    prompt, again = tokens_of(31, 600), ask("again", tokens_of(31, 600) + tokens_of(32, 60), 20)
    wanted = World.build(tiny_model).one(again)
    gaps = {}
    for spoil in (False, True):
        world = World.build(tiny_model, pages=13).watch()
        world.one(ask("first", prompt, boundaries=[600]))
        world.one(ask("crowd", tokens_of(33, 800)))
        assert world.cache.counters["pages_demoted"] > 0
        if spoil:
            sinks = world.runner.store.sinks
            sinks |= {id: -sink for id, sink in sinks.items()}
        answer = world.one(again)
        assert answer.finished.usage.cached_tokens == 576 and world.cache.counters["pages_promoted"] > 0
        gaps[spoil] = max(abs(a.logprob - b.logprob) for a, b in zip(answer.logprobs, wanted.logprobs, strict=True))
    assert gaps[False] < 1e-4 < 1e-2 < gaps[True]
