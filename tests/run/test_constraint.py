"""Grammars in the engine: whatever a model with random weights wants, what it says matches."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from run_world import World, ask, tokens_of
from sampler_mixes import sample_rows

from kakera.constrain.output import ANYTHING, Outputs
from kakera.contract.request import Constraint, Sampling, ThinkingBudget
from kakera.contract.step import SamplingInput
from kakera.run.process.messages import Submit, decode_to_engine, encode
from kakera.text.tokenizer import Tokenizer

END, CALL, THINK_END = 258, 259, 262
JSON = 'start: %json {"type":"object","properties":{"n":{"type":"integer","minimum":0,"maximum":99},' + (
    '"s":{"type":"string","maxLength":5},"l":{"type":"array","items":{"enum":["x",true,null]},"maxItems":3}},'
    '"required":["n","s","l"],"additionalProperties":false,"x-guidance":{"whitespace_flexible":false}}'
)
LETTERS = "start: /[a-c]{1,12}/"


@pytest.fixture(scope="module")
def world(tiny_model):
    return World.build(tiny_model)


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return Tokenizer.load(tiny_model)


def wish(id: str, grammar: str | None, max_tokens: int = 200, prompt: int = 1, **more):
    constraint = more.pop("constraint", Constraint(grammar) if grammar else None)
    more = {"temperature": 1.0, "stop_token_ids": (END,), "logprobs": None, **more}
    return ask(id, tokens_of(prompt, 20), max_tokens, constraint=constraint, **more)


def check_json(text: str) -> None:
    value = json.loads(text)
    assert list(value) == ["n", "s", "l"] and 0 <= value["n"] <= 99 and len(value["s"]) <= 5 and len(value["l"]) <= 3
    assert all(item in ("x", True, None) for item in value["l"])


def test_rows_of_one_step_keep_to_their_own_grammars(world, tokenizer):
    requests = [
        wish("json", JSON, seed=3, logprobs=20),
        wish("letters", LETTERS, seed=3, min_tokens=100),
        wish("free", None, max_tokens=10),
        *(wish(f"choice-{n}", JSON, choice=n, repetition_penalty=1.5) for n in range(2)),
    ]
    answers = dict(zip((r.id for r in requests), world.answer(*requests), strict=True))
    texts = {id: tokenizer.decode(answer.tokens) for id, answer in answers.items()}
    for id in ("json", "choice-0", "choice-1"):
        assert answers[id].finished.reason == "stop", answers[id].finished
        check_json(texts[id])
    assert texts["choice-0"] != texts["choice-1"]
    shown = [p for logprob in answers["json"].logprobs for _, p in (*logprob.top, (0, logprob.logprob))]
    assert len(shown) == 21 * len(answers["json"].tokens) and all(-9999 <= p <= 0 for p in shown)
    assert len(texts["letters"]) == 12 and set(texts["letters"]) <= set("abc")  # a grammar wins over min_tokens


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**40),
    temperature=st.sampled_from([0.0, 0.7, 2.0]),
    top_k=st.sampled_from([0, 1, 5]),
    top_p=st.sampled_from([0.1, 1.0]),
    min_tokens=st.sampled_from([0, 100]),
    repetition_penalty=st.sampled_from([1.0, 1.5]),
    logit_bias=st.sampled_from([(), ((END, 100.0),), ((ord("{"), -100.0), (ord("q"), 100.0))]),
)
def test_whatever_the_logits_say_the_text_is_of_the_schema(world, tokenizer, seed, **wishes):
    sampling = Sampling(300, seed, constraint=Constraint(JSON), stop_token_ids=(END,), **wishes)
    outputs, noise = Outputs(world.runner.chooser._outputs._compiler), torch.Generator().manual_seed(seed)
    context, complete = [1, 2, 3], False
    while not complete and END not in context[3:]:
        row = SamplingInput("r", sampling, context, 3)
        if (allowed := outputs.allowed(row)) is None:
            break
        token = sample_rows([row], torch.randn(1, 320, generator=noise) * 4, [allowed])[0].token
        complete = outputs.took(row, token)
        context.append(token)
        assert len(context) < 300
    check_json(tokenizer.decode(context[3:], skip_control=True))


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**40), begins=st.sampled_from([{}, {"after": THINK_END}, {"at": ord("{")}]))
def test_a_position_comes_back_from_drafts_that_were_not_chosen(world, seed, begins):
    """Any number of tokens are taken ahead and given up again; what is allowed is what a fresh position allows. No
    grammar is begun anew where it can come back."""
    compiler, rng = world.runner.chooser._outputs._compiler, random.Random(seed)
    constraint = Constraint(JSON, required=False, **begins)
    sampling = Sampling(300, seed, constraint=constraint, stop_token_ids=(END,))
    kept, outputs = [], Outputs(compiler)

    def allowed(of: Outputs, text: list[int]):
        return of.allowed(SamplingInput("r", sampling, [1, *text], 1))

    for _ in range(12):
        ahead, text = rng.randrange(6), list(kept)
        while len(text) < len(kept) + ahead and (may := allowed(outputs, text)) is not None:
            choices = [t for t in (*range(256), END, THINK_END) if may.permits(t)]
            wanted = [t for t in (THINK_END, ord("{")) if t in choices and t in begins.values()]
            token = rng.choice(wanted or choices)
            if outputs.took(SamplingInput("r", sampling, [1, *text], 1), token) or token == END:
                break
            text.append(token)
        kept = text[: len(kept) + rng.randrange(len(text) - len(kept) + 1)]
        found, fresh = allowed(outputs, kept), allowed(Outputs(compiler), kept)
        assert found == fresh


def test_a_constraint_reaches_the_engine_process_as_plain_data():
    budget = ThinkingBudget(9, (10, THINK_END), (THINK_END, CALL))
    request = wish("r", None, constraint=Constraint(JSON, after=THINK_END, at=CALL, required=False), thinking=budget)
    received = decode_to_engine(encode(Submit.of(request))).request
    assert received == replace(request, tokens=received.tokens) and tuple(received.tokens) == request.tokens


def test_without_an_end_token_a_complete_grammar_still_ends_the_answer(world, tokenizer):
    answer = world.one(wish("r", 'start: "abc" "d"?', stop_token_ids=(), logit_bias=((ord("d"), 100.0),)))
    assert tokenizer.decode(answer.tokens) == "abcd" and answer.finished.reason == "stop"
    assert answer.finished.stop_token is None and answer.finished.usage.completion_tokens == 4


def test_a_grammar_behind_thinking_waits_for_its_end(world, tokenizer):
    """The budget closes the reasoning; the model can not end before the grammar has begun."""
    budget = ThinkingBudget(9, (10, THINK_END), (THINK_END, CALL))
    constraint = Constraint(LETTERS, after=THINK_END, at=CALL)
    sampling = {"thinking": budget, "constraint": constraint, "logit_bias": ((THINK_END, -100.0), (CALL, -100.0))}
    answer = world.one(wish("r", None, **{**sampling, "logit_bias": (*sampling["logit_bias"], (END, 90.0))}))
    assert answer.tokens[9:11] == [10, THINK_END] and THINK_END not in answer.tokens[:9]
    assert END not in answer.tokens and set(tokenizer.decode(answer.tokens[11:])) <= set("abc")
    assert answer.finished.reason == "stop" and len(answer.tokens) > 11


def test_a_budget_is_not_forced_on_reasoning_that_has_ended(world):
    budget = ThinkingBudget(4, (10, THINK_END), (THINK_END,))
    answer = world.one(wish("r", None, 12, thinking=budget, logit_bias=((THINK_END, 100.0),), stop_token_ids=()))
    assert answer.tokens[0] == THINK_END and answer.tokens[4:6] == [THINK_END] * 2  # wanted, not forced


@pytest.mark.parametrize("wants_call", [True, False])
def test_a_call_is_held_to_its_grammar_once_it_begins(world, tokenizer, wants_call):
    constraint = Constraint(f'start: <[{CALL}]> "yes"', at=CALL, required=False)
    bias = ((CALL, 100.0 if wants_call else -100.0),)
    answer = world.one(wish("r", None, 12, constraint=constraint, logit_bias=bias))
    text = tokenizer.decode(answer.tokens)
    if wants_call:
        assert text == "<tool_call>yes" and answer.finished.reason == "stop"
    else:
        assert "<tool_call>" not in text and len(answer.tokens) == 12


def test_preemption_and_forgotten_positions_change_nothing(tiny_model, world, monkeypatch):
    rules = {"constraint": Constraint("start: /([0-9]{3}, )*/"), "stop_token_ids": ()}
    requests = [ask(f"r{i}", tokens_of(i, 100 + 40 * i), 70, **rules) for i in range(3)]
    calm = world.answer(*requests)
    monkeypatch.setattr("kakera.constrain.output.REMEMBERED", 1)
    crowded = World.build(tiny_model, pages=10)
    answers = crowded.answer(*requests)
    assert crowded.engine.stats().counters["preemptions"] > 0
    assert [a.tokens for a in answers] == [a.tokens for a in calm]
    assert all(len(a.tokens) == 70 for a in answers)


def test_a_request_whose_mask_can_not_be_computed_fails_alone(world, tokenizer):
    good, bad = wish("good", LETTERS), wish("bad", "start: /a{100000000}/")
    good, bad = world.answer(good, bad)
    assert bad.finished.reason == "error" and "too many expressions" in bad.finished.message
    assert set(tokenizer.decode(good.tokens)) <= set("abc")
    (never,) = world.answer(wish("never", "start: nothing"))
    assert never.finished.reason == "error" and never.tokens == []
    world.check_idle()


def test_nothing_is_sampled_where_the_chosen_token_breaks_the_grammar(world, monkeypatch):
    """Whatever the sampler does: a token that the matcher refuses is never shown."""
    outputs: Outputs = world.runner.chooser._outputs
    monkeypatch.setattr(outputs, "allowed", lambda row: ANYTHING)
    (answer,) = world.answer(wish("r", 'start: "@@@@"', logit_bias=((5, 100.0),)))
    assert answer.finished.reason == "error" and answer.tokens == []
