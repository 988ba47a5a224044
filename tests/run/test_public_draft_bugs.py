"""Bugs that others had with drafts on hybrid models, numbered: what a request says and leaves behind is what it says
and leaves behind without drafts.

Elsewhere: 2, 22, 23, 27 in test_draft_layer.py; 13, 17 in tests/schedule/test_drafts.py; 20 and 12's reasoning in
tests/server/test_guessed_tokens.py; 24 in tests/model/test_held_rows.py.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from drafted_world import CALL, END, THINK_END, adversary, checkpoints, noting, row_by_row
from run_world import World, ask, logprob_gap, tokens_of

from kakera.cache.host import CacheSizes
from kakera.cache.prefix import PrefixCache
from kakera.contract.request import Constraint, Request, Sampling, ThinkingBudget
from kakera.contract.step import SamplingInput
from kakera.run.engine import LocalEngine
from kakera.run.generate import generate
from kakera.run.scripted import BUNDLED, Script, ScriptedRunner
from kakera.schedule.drafts import Drafts
from kakera.schedule.limits import Limits
from kakera.schedule.look_up import LookUp
from kakera.schedule.scheduler import Scheduler
from kakera.text.tokenizer import Tokenizer

__all__ = ["row_by_row"]  # a fixture
Drafter = Callable[[SamplingInput, int], Sequence[int]]
TEXT = tokens_of(1, 150)
BRACE = ord("{")


@pytest.fixture(scope="module")
def roomy(tiny_model) -> World:
    return World.build(tiny_model)


def said(world: World, request: Request, drafter: Drafter | None = None):
    """Of one request on a cache that knows nothing."""
    world.engine.flush()
    world.engine.scheduler.drafts = drafter and Drafts(drafter)
    return world.one(request)


def fixed(*rounds: Sequence[int]) -> Drafter:
    """Guesses round by round, whatever the text is."""
    left = list(rounds)
    return lambda given, most: (left.pop(0) if left else [])[:most]


def from_text(text: Sequence[int], counts: Sequence[int], wrong: int = 0) -> Drafter:
    """So many right tokens each round, in turn, and `wrong` ones behind them."""
    rounds = [0]

    def draft(given: SamplingInput, most: int) -> list[int]:
        count = counts[rounds[0] % len(counts)]
        rounds[0] += 1
        right = list(text[given.generated :][:count])
        other = [(token + 1) % 256 for token in text[given.generated + len(right) :][:wrong]]
        return (right + other)[:most]

    return draft


def test_1_a_request_between_two_equal_ones_changes_nothing(roomy):
    """vllm#43559, #48375, #57128: A, B, A again."""
    a, b = (ask(name, tokens_of(seed, 200), 40) for name, seed in (("a", 2), ("b", 3)))
    texts = {request.id: said(roomy, request).tokens for request in (a, b)}
    roomy.engine.flush()
    roomy.engine.scheduler.drafts = Drafts(adversary(texts, 1, 0.3))
    for request in (a, b, a):
        answer = roomy.one(request)
        assert answer.tokens == texts[request.id]
    assert answer.finished.usage.cached_tokens == 192


def test_3_the_same_prompt_twice_hits_as_much_as_without_drafts(roomy):
    """vllm#53504, vLLM-2080Ti#149, 1Cat-vLLM#205."""
    request, cached = ask("a", tokens_of(4, 237), 30), []
    text = said(roomy, request).tokens
    for drafter in (None, from_text(text, [3, 0, 7], 1)):
        said(roomy, request, drafter)
        cached.append(roomy.one(request).finished.usage.cached_tokens)
    assert cached == [192, 192]


@pytest.mark.parametrize("counts", [(2, 0), (3, 0, 0), (1,), (3,)])
@pytest.mark.parametrize("wrong", [0, 1, 3])
def test_4_5_rounds_with_and_without_drafts_in_turn(tiny_model, row_by_row, counts, wrong):
    """vllm#39273, #52942, sglang#26351: state behind a round that accepts and one that has none; omlx#2506: behind a
    refusal. To the bit, at every token."""
    plain, drafted = World.build(tiny_model), World.build(tiny_model)
    wanted, found = noting(plain), noting(drafted)
    request = ask("a", TEXT[:60], 24)
    text = plain.one(request).tokens
    drafted.engine.scheduler.drafts = Drafts(from_text(text, counts, wrong))
    assert drafted.one(request).tokens == text
    for place, tensors in found.items():
        assert all(torch.equal(a, b) for a, b in zip(tensors, wanted[place], strict=True))


class Played:
    """A scripted model with drafts: what it says is known, so what is guessed is as well."""

    def __init__(self, tmp_path: Path, text: str, context: int = 4096):
        path = tmp_path / "script.json"
        path.write_text(json.dumps({"streams": [{"text": text}]}))
        self.script, self.tokenizer = Script.load(path), Tokenizer.load(BUNDLED)
        self.context = context

    def ask(self, drafter: Drafter, prompt: str = "hello", **wishes):
        limits = Limits(self.context, 4096, 4, 512)
        cache = PrefixCache(CacheSizes(4096, 100, 1, 1, 1, False))
        engine = LocalEngine(Scheduler(limits, cache, drafts=Drafts(drafter)), ScriptedRunner(self.script))
        wanted = {"max_tokens": 500, "seed": 1, "stop_token_ids": (self.tokenizer.eos,), **wishes}
        request = Request("r", tuple(self.tokenizer.encode(prompt)), Sampling(**wanted))
        (answer,) = generate(engine, [request]).values()
        return answer, self.tokenizer.decode(answer.tokens), engine

    def oracle(self, given: SamplingInput, most: int) -> list[int]:
        return list((*self.script.streams[0].tokens, self.tokenizer.eos)[given.generated :][:most])


def test_6_counting_misses_no_number_and_repeats_none(tmp_path):
    """mlx-lm#846."""
    numbers = ", ".join(str(n) for n in range(1, 21))
    played = Played(tmp_path, numbers)
    rng = random.Random(2)
    jumpy = lambda given, most: played.oracle(given, rng.randrange(most + 1)) + [17] * rng.randrange(3)  # noqa: E731
    for drafter in (played.oracle, LookUp(), jumpy):
        _, text, _ = played.ask(drafter, prompt=numbers)
        assert text == numbers


def test_7_a_plain_row_before_checked_rows_and_a_prompt_behind_them(tiny_model, row_by_row):
    """vllm#51812, #54928: each as alone, in the same steps."""
    plain, one, two, late = (ask(f"r{i}", tokens_of(20 + i, n), 40) for i, n in enumerate((70, 90, 30, 300)))
    alone = {r.id: World.build(tiny_model).one(r) for r in (plain, one, two, late)}
    texts = {name: answer.tokens for name, answer in alone.items() if name in ("r1", "r2")}
    world = World.build(tiny_model, chunk=64)
    world.engine.scheduler.drafts = Drafts(adversary(texts, 4, 0.3))
    kinds, execute = set(), world.runner.execute

    def look(plan, *sampling):
        kinds.add((tuple(sorted({min(2, len(row.tokens)) for row in plan.decode})), bool(plan.prefill)))
        return execute(plan, *sampling)

    world.runner.execute = look
    for request, answer in zip((plain, one, two, late), world.answer(plain, one, two, late), strict=True):
        assert answer.tokens == alone[request.id].tokens
        assert logprob_gap(answer, alone[request.id]) < 1e-4
    assert ((1, 2), True) in kinds


@pytest.mark.parametrize("prompt", [2, 62, 126, 190, 380])
def test_8_drafts_at_borders_of_pages_and_at_the_edge_of_the_window(roomy, prompt):
    """vllm#52475, #53180: INT2 pages, tiny prompts, and rows whose queries see different windows."""
    request = ask("a", tokens_of(5, prompt), 80)
    plain = said(roomy, request)
    for counts in ((7,), (31,), (5, 1)):
        answer = said(roomy, request, from_text(plain.tokens, counts))
        assert logprob_gap(answer, plain) < 1e-3
        assert answer.finished.usage.rejected_tokens == 0 < answer.finished.usage.accepted_tokens


def test_9_a_grammar_that_begins_inside_a_draft(roomy):
    """vllm#36138, #44993, #48228: `</think>{{` is guessed; one brace is said."""
    rule = Constraint('start: "{" /[a-c]{1,8}/ "}"', after=THINK_END)
    wish = {"constraint": rule, "stop_token_ids": (END,), "logit_bias": ((THINK_END, 9.0),), "temperature": 1.0}
    for seed in range(4):
        request = ask("a", tokens_of(seed, 40), 40, seed=seed, **wish)
        plain = said(roomy, request)
        answer = said(roomy, request, lambda given, most: [THINK_END, BRACE, BRACE, BRACE][:most])
        assert answer.tokens == plain.tokens and plain.tokens.count(BRACE) <= 1


@pytest.mark.parametrize("budget", [4, 5, 6, 7])
def test_10_a_thinking_budget_that_ends_inside_a_row(roomy, budget):
    """vllm#39573; vllm#55562: the guess closes the reasoning itself, too early or too late."""
    thinking = ThinkingBudget(budget, (10, THINK_END), (THINK_END, CALL))
    request = ask("a", tokens_of(6, 50), 30, thinking=thinking, stop_token_ids=(END,))
    plain = said(roomy, request)
    assert plain.tokens[budget : budget + 2] == [10, THINK_END]
    for drafter in (from_text(plain.tokens, [4]), from_text(plain.tokens, [3], 2), fixed([THINK_END, END, 5])):
        assert said(roomy, request, drafter).tokens == plain.tokens


def test_11_a_stop_inside_an_accepted_draft_is_not_hidden_by_the_length(tmp_path):
    """sglang#31599, #33758: [10, 11, STOP, 20, ..] at once, at most 5 tokens."""
    played = Played(tmp_path, "a b c d e f g h i j")
    tokens = played.script.streams[0].tokens
    answer, _, _ = played.ask(played.oracle, max_tokens=5, stop_token_ids=(tokens[2],))
    assert answer.tokens == list(tokens[:2]) and answer.finished.reason == "stop"
    assert answer.finished.stop_token == tokens[2] and answer.finished.usage.completion_tokens == 3


@pytest.mark.parametrize("most", [1, 2, 7, 8, 9, 64])
def test_12_no_more_tokens_than_were_asked_for(roomy, most):
    """sglang#39826, #37450: rows of eight tokens near the end of what may be said."""
    request = ask("a", TEXT, most)
    plain = said(roomy, request)
    answer = said(roomy, request, from_text(plain.tokens, [7]))
    usage = answer.finished.usage
    assert answer.tokens == plain.tokens and usage.completion_tokens == most == len(answer.tokens)
    assert usage.accepted_tokens < most


def test_14_penalties_and_least_lengths_see_every_accepted_token(roomy):
    """sglang#33643, vllm#18902, trt#17701: counted along the row; log-probabilities are the model's own."""
    wish = {"frequency_penalty": 2.0, "min_tokens": 20, "stop_token_ids": tuple(range(200)), "logprobs": 3}
    request = ask("a", TEXT[:50], 40, **wish)
    plain = said(roomy, request)
    answer = said(roomy, request, from_text(plain.tokens, [5]))
    assert len(plain.tokens) >= 19 and answer.finished.usage.accepted_tokens > 10
    assert logprob_gap(answer, plain) < 1e-3


@pytest.mark.parametrize("room", [1, 2, 3, 8])
def test_15_a_context_that_ends_within_a_draft(tiny_model, room):
    """vllm#38711: no row behind the last place, and as many log-probabilities as tokens."""
    world = World.build(tiny_model, context=100)
    request = ask("a", TEXT[: 100 - room], 50)
    plain = said(world, request)
    answer = said(world, request, from_text([*plain.tokens, *range(20)], [7]))
    assert answer.tokens == plain.tokens and len(plain.tokens) == len(answer.logprobs) == room
    assert logprob_gap(answer, plain) < 1e-3


def test_16_seeds_decide_and_nothing_else(roomy):
    """vllm#6038, trt#17599, #19487: seeds 1, 1, 2 in one batch at T = 1, and alone, with any number of drafts."""
    drawn = {"temperature": 1.0, "top_k": 50}
    asked = [ask(f"s{i}", TEXT[:70], 30, seed=seed, **drawn) for i, seed in enumerate((1, 1, 2))]
    one, same, other = roomy.answer(*asked)
    assert one.tokens == same.tokens != other.tokens
    texts = {"s0": one.tokens, "s1": one.tokens, "s2": other.tokens}
    for seed, wrong in ((1, 0.0), (2, 0.5), (3, 1.0)):
        roomy.engine.flush()
        roomy.engine.scheduler.drafts = Drafts(adversary(texts, seed, wrong))
        assert [a.tokens for a in roomy.answer(*asked)] == list(texts.values())
        assert said(roomy, asked[2], adversary(texts, seed, wrong)).tokens == other.tokens


def test_18_a_look_up_that_is_always_refused_at_its_first_token(roomy):
    """llama.cpp#23268, #25819: every round says something, and it ends."""
    request = ask("a", TEXT, 60)
    plain = said(roomy, request)
    steps = roomy.engine.stats().steps
    answer = said(roomy, request, from_text(plain.tokens, [0], 5))
    assert answer.tokens == plain.tokens and answer.finished.usage.accepted_tokens == 0
    assert roomy.engine.stats().steps - steps <= 60 + 2


def test_19_definitions_in_the_prompt_do_not_lead_a_call_astray(tmp_path):
    """vllm#56077, #40875: what the prompt says of one function is guessed for another."""
    definition = (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>\n"
    )
    call = definition.replace("get_weather", "get_time").replace("Paris", "Prague")
    played = Played(tmp_path, call * 2)
    answer, text, _ = played.ask(LookUp(), prompt=definition * 3)
    assert text == call * 2
    assert 0 < answer.finished.usage.accepted_tokens < len(played.script.streams[0].tokens)


@pytest.mark.parametrize("behind", [1, 0, 2])
def test_21_what_is_saved_right_behind_a_refusal_restores_the_run(tiny_model, row_by_row, behind):
    """am17an/llama.cpp#16: the round before a border, at it and behind it refuses."""
    request = ask("a", TEXT[: 128 - 20 - behind], 60)
    plain, drafted = World.build(tiny_model), World.build(tiny_model)
    text = plain.one(request).tokens
    drafted.engine.scheduler.drafts = Drafts(from_text(text, [2], 2))
    assert drafted.one(request).tokens == text
    saved = checkpoints(drafted)
    assert saved and saved.keys() == checkpoints(plain).keys()
    for key, parts in checkpoints(plain).items():
        assert all(torch.equal(a, b) for a, b in zip(parts, saved[key], strict=True))
    again = ask("b", (*request.tokens, *text[:40]), 20)
    hit = drafted.one(again)
    assert hit.finished.usage.cached_tokens == 128 and hit.tokens == text[40:60]


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 64, 16))
def test_25_all_lengths_of_prompts_and_all_depths(roomy, first):
    """syv-ai, vllm-ascend#16638: one length in 128 was wrong; rows without drafts are rows of one token."""
    for residue in range(first, first + 16):
        request = ask("a", TEXT[: 64 + residue], 10)
        plain = said(roomy, request)
        for depth in (0, 1 + residue % 7):
            assert said(roomy, request, from_text(plain.tokens, [depth], residue % 2)).tokens == plain.tokens


def test_26_eight_requests_of_different_depths_that_end_one_by_one(roomy):
    """vllm#6034, #9441."""
    asked = [ask(f"r{i}", tokens_of(40 + i, 20 + 9 * i), 12 + 3 * i) for i in range(8)]
    texts = {r.id: said(roomy, r).tokens for r in asked}
    depth = {r.id: i for i, r in enumerate(asked)}
    roomy.engine.flush()
    roomy.engine.scheduler.drafts = Drafts(
        lambda given, most: texts[given.request_id][given.generated :][: min(most, depth[given.request_id])]
    )
    assert {a.finished.request_id: a.tokens for a in roomy.answer(*asked)} == texts
