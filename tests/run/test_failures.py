"""One bad request never harms another."""

import pytest
import torch
from run_world import World, ask, equal, logprob_gap, tokens_of

from kakera.errors import RequestRefused
from kakera.run.choose import chooser
from kakera.run.generate import generate
from kakera.run.step import runner as runner_module

GOOD = [ask("good 1", tokens_of(1, 200), 8), ask("good 2", tokens_of(2, 30), 8)]
BAD = tokens_of(66, 300)


@pytest.fixture
def world(tiny_model):
    return World.build(tiny_model, chunk=64)


def poison(world: World, request_id: str, at: int) -> None:
    """The hidden state of one request's token `at` becomes NaN, as a broken kernel or a bit flip would make it."""
    hidden, batch_of = world.runner.model.hidden, world.runner._batch
    rows = []

    def batch(plan):
        made, staged = batch_of(plan)
        spans = zip(plan.rows, made.spans, strict=True)
        rows[:] = [s.offset + at - s.start for r, s in spans if r.request_id == request_id and s.start <= at < s.end]
        return made, staged

    def broken(batch, kv, states):
        out = hidden(batch, kv, states)
        out[rows] = float("nan")
        return out

    world.runner._batch, world.runner.model.hidden = batch, broken


def expect(tiny_model, answers) -> None:
    undisturbed = World.build(tiny_model, chunk=64).answer(*GOOD)
    for answer, wanted in zip(answers, undisturbed, strict=True):
        assert answer.finished.reason == "length" and logprob_gap(answer, wanted) < 1e-4


@pytest.mark.parametrize("at", [10, 299, 303], ids=["first chunk", "prompt's end", "decode"])
def test_values_that_are_not_finite_fail_their_row_alone_and_are_never_cached(tiny_model, world, at):
    poison(world, "bad", at)
    *good, bad = world.answer(*GOOD, ask("bad", BAD, 8))
    assert bad.finished.reason == "error" and "not finite" in bad.finished.message
    assert len(bad.tokens) == max(0, at - 299)
    expect(tiny_model, good)
    again = world.one(ask("again", BAD, 8))
    assert again.finished.usage.cached_tokens <= at // 64 * 64
    assert again.tokens == World.build(tiny_model).one(ask("alone", BAD, 8)).tokens
    world.check_idle()


def test_logits_that_are_not_finite_fail_their_row_alone(tiny_model, world):
    original = world.runner._draw

    def draw(rows, sampling, logits_RV):
        for i, row in enumerate(rows):
            if row.request_id == "bad" and len(sampling["bad"].context) == 302:
                logits_RV[i, 5] = float("nan")
        return original(rows, sampling, logits_RV)

    world.runner._draw = draw
    *good, bad = world.answer(*GOOD, ask("bad", BAD, 8))
    assert bad.finished.reason == "error" and "not finite" in bad.finished.message and len(bad.tokens) == 2
    expect(tiny_model, good)
    world.check_idle()


@pytest.mark.parametrize(("module", "where"), [(chooser, "pick_of"), (runner_module, "logprobs_of")])
def test_a_row_whose_sampling_or_echo_raises_fails_alone(tiny_model, world, monkeypatch, module, where):
    original = getattr(module, where)

    def fails(first, *more):
        if where == "logprobs_of" or first.request_id == "bad":
            raise KeyError("a defect")
        return original(first, *more)

    monkeypatch.setattr(module, where, fails)
    echo = {"prompt_logprobs": 0} if where == "logprobs_of" else {}
    *good, bad = world.answer(*GOOD, ask("bad", BAD, 8, **echo))
    assert bad.finished.reason == "error" and "a defect" in bad.finished.message and bad.finished.code == "engine_error"
    expect(tiny_model, good)
    world.check_idle()


@pytest.mark.parametrize(("kv", "error"), [("fp32", RuntimeError), ("bf16", IndexError), ("int2", MemoryError)])
def test_a_forward_pass_that_raises_fails_its_rows_and_the_engine_goes_on(tiny_model, kv, error):
    world = World.build(tiny_model, kv, chunk=64, slots=3).watch()
    hidden, calls = world.runner.model.hidden, []

    def broken(batch, kv, states):
        calls.append(batch)
        out = hidden(batch, kv, states)  # states, pages and windows are written: the worst moment
        if len(calls) == 6:
            raise error("out of memory")
        return out

    world.runner.model.hidden = broken
    requests = [*GOOD, ask("long", BAD, 8), ask("waits", tokens_of(5, 100), 8)]
    answers = dict(zip([r.id for r in requests], world.answer(*requests), strict=True))
    failed = {id for id, answer in answers.items() if answer.finished.reason == "error"}
    assert failed and "waits" not in failed
    assert all("out of memory" in answers[id].finished.message for id in failed)
    fresh = World.build(tiny_model, kv, chunk=64).watch()
    for request in requests:
        wanted = fresh.one(request)
        assert logprob_gap(world.one(request), wanted) < 1e-4
        assert equal(world.seen[request.id], fresh.seen[request.id], 1e-5)
    world.check_idle()


def test_an_engine_whose_device_is_lost_ends_instead_of_failing_requests_for_ever(world, monkeypatch):
    """After an illegal access every call to a GPU fails, the one that asks how it is included."""

    def lost(*_):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    world.runner.model.hidden = lost
    monkeypatch.setattr(runner_module, "touch", lost)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        world.answer(*GOOD)


def test_what_would_fail_a_step_is_refused_before_it_can(tiny_model, world):
    wrong = {
        "the token id 320; ids are 0 to 319": ask("bad", [1, 2, 320]),
        "the token id -1": ask("bad", [-1, 2]),
        "empty": ask("bad", []),
        "logit_bias holds the token id 320": ask("bad", range(64), logit_bias=((320, 1.0),)),
        "logit_bias holds the token id -1": ask("bad", range(64), logit_bias=((-1, 1.0),)),
        "max_tokens is -1": ask("bad", range(64), -1),
        "maximum context length is 2048 tokens": ask("bad", tokens_of(1, 2048)),
    }
    for text, request in wrong.items():
        with pytest.raises(RequestRefused, match=text) as refusal:
            world.answer(*GOOD, request)
        assert refusal.value.status == 400
    expect(tiny_model, world.answer(*GOOD))
    world.check_idle()


def test_a_device_that_computes_passes_the_touch():
    runner_module.touch(torch.device("cpu"))


def test_stop_tokens_outside_the_vocabulary_never_come(world):
    assert len(world.one(ask("a", range(64), 4, min_tokens=2, stop_token_ids=(5000, -3))).tokens) == 4


@pytest.mark.parametrize("where", ["between steps", "within a step"])
def test_generate_leaves_nothing_behind_when_it_is_interrupted(tiny_model, world, where):
    def interrupt(*_):
        raise KeyboardInterrupt

    hidden = world.runner.model.hidden
    if where == "within a step":
        world.runner.model.hidden = interrupt
    with pytest.raises(KeyboardInterrupt):
        generate(world.engine, GOOD, interrupt)
    world.runner.model.hidden = hidden
    expect(tiny_model, world.answer(*GOOD))
    world.check_idle()


def test_generate_does_not_mind_the_requests_of_others(world):
    world.engine.submit(ask("other", tokens_of(3, 70), 2))
    shown = []
    (mine,) = generate(world.engine, [ask("mine", tokens_of(4, 300), 6)], shown.append).values()
    assert len(mine.tokens) == 6 and {event.request_id for event in shown} == {"mine", "other"}


def test_logits_are_checked_by_their_largest_value():
    """NaN wins torch's argmax, wherever it is: the check needs no pass of its own over the vocabulary."""
    for bad in (float("nan"), float("inf")):
        for at in (0, 7, 319):
            logits_V = torch.randn(320)
            logits_V[at] = bad
            assert not logits_V[logits_V.argmax()].isfinite()
