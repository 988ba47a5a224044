"""However prompts are cut and whoever runs beside them: the same answers."""

import pytest
from run_world import CODECS, World, ask, equal, logprob_gap, tokens_of

MIXED = [ask(f"m{n}", tokens_of(n, n), 8) for n in (5, 63, 64, 65, 150, 321, 450, 512)]
TOLERANCE = 1e-4  # decode rows only: a product of another height rounds differently


@pytest.mark.parametrize("kv", CODECS)
def test_chunked_equals_unchunked(tiny_model, kv):
    prompts = [ask(str(n), tokens_of(n, n), 6) for n in (130, 449)]
    worlds = [World.build(tiny_model, kv, chunk=chunk).watch() for chunk in (64, 128, 1024)]
    for request in prompts:
        answers = [world.one(request) for world in worlds]
        for world, answer in zip(worlds[1:], answers[1:], strict=True):
            assert equal(worlds[0].seen[request.id], world.seen[request.id])
            assert logprob_gap(answers[0], answer) == 0.0


@pytest.mark.parametrize("kv", CODECS)
def test_eight_at_once_equal_each_alone(tiny_model, kv):
    """Short ones decode beside the prefill of long ones: a chunk of 64 takes 30 steps for these prompts."""
    together = World.build(tiny_model, kv, chunk=64).watch()
    answers = together.answer(*MIXED)
    alone = World.build(tiny_model, kv).watch()
    for request, answer in zip(MIXED, answers, strict=True):
        assert logprob_gap(alone.one(request), answer) < TOLERANCE
        assert equal(alone.seen[request.id], together.seen[request.id], 1e-5)
    assert len({tuple(answer.tokens) for answer in answers}) == len(answers)
    together.check_idle()


def test_choices_share_the_prompt_and_nothing_else(tiny_model):
    prompt = tokens_of(3, 333)

    def choices(world):
        sampling = {"seed": 7, "temperature": 1.0, "boundaries": [333]}
        return world.answer(*(ask(f"c{i}", prompt, 10, choice=i, **sampling) for i in range(3)))

    world = World.build(tiny_model)
    answers = choices(world)
    texts = [answer.tokens for answer in answers]
    assert [a.finished.usage.cached_tokens for a in answers] == [0, 320, 320]
    assert len({tuple(text) for text in texts}) == 3
    assert [a.tokens for a in choices(world)] == texts, "warm"
    assert [a.tokens for a in choices(World.build(tiny_model, chunk=64))] == texts, "cold, in other chunks"
    world.check_idle()


@pytest.mark.parametrize("chunk", [64, 512])
def test_echoed_log_probabilities_equal_a_direct_forward(tiny_model, chunk):
    """Windows of a teacher-forced run of the same model, in pieces and beside a neighbour."""
    prompt = tokens_of(9, 300)
    world = World.build(tiny_model, "fp32", chunk=chunk)
    world.one(ask("before", prompt))  # an echo must not be shortened by a hit
    echo, _ = world.answer(ask("echo", prompt, 3, prompt_logprobs=2), ask("beside", tokens_of(8, 200)))
    wanted = direct_logprobs(tiny_model, prompt)
    assert [p.token for p in echo.prompt_logprobs] == list(prompt[1:])
    for i, found in enumerate(echo.prompt_logprobs):
        assert abs(found.logprob - float(wanted[i, prompt[i + 1]])) < 2e-5
        assert found.top[0][0] == int(wanted[i].argmax()) and len(found.top) == 2
    only = world.one(ask("only", prompt, 0, prompt_logprobs=0))
    assert not only.tokens and [p.logprob for p in only.prompt_logprobs] == [p.logprob for p in echo.prompt_logprobs]
    world.check_idle()


def direct_logprobs(directory, prompt):
    """float32 [n, vocabulary], by one forward pass without scheduler and cache."""
    import torch

    from kakera.kv.batch import Batch, Span
    from kakera.kv.cache import KVCache
    from kakera.model.qwen3_5 import HybridModel
    from kakera.model.state import StatePool
    from kakera.plan.kv_format import KvFormat

    model, n = HybridModel.load(directory), len(prompt)
    pages = -(-n // 64)
    index = torch.arange(n)
    batch = Batch(torch.tensor(prompt), index, (), (Span(0, n, 0, 0, torch.arange(pages)),), index)
    kv = KVCache(model.spec, KvFormat("fp32"), pages, 1)
    return torch.log_softmax(model.forward(batch, kv.backend, StatePool(model.spec, 1)), -1)
