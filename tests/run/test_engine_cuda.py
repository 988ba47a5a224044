"""The whole engine with the bundled model on a GPU: graphs, hits, cuts and batches change no answer, and the CPU's
answers come out. Skipped without a GPU."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

import kakera
from kakera.contract.request import Boundary, Request, Sampling
from kakera.contract.step import Drop
from kakera.evaluate.data import load_cases
from kakera.evaluate.session import open_reader
from kakera.evaluate.suites import run_suite
from kakera.plan.plan import Wishes
from kakera.plan.planner import plan_for
from kakera.run.build import build_engine
from kakera.run.engine import LocalEngine
from kakera.run.generate import Completion, generate

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
DATA = Path(kakera.__file__).parent / "data"
NEAR = 0.125  # nats: two steps of a bf16 logit of 8 to 16
WISHES = Wishes(gpus="auto", context=8192, max_running=8, chunk=2048, host_cache=4 * 2**30)


def engine(**wishes) -> LocalEngine:
    return build_engine(DATA / "mini", plan_for(DATA / "mini", replace(WISHES, **wishes)))


@cache
def usual() -> LocalEngine:
    return engine()


@cache
def prompts(count: int = 8) -> list[tuple[int, ...]]:
    """Of about 1,000 tokens, each with a question that the model answers."""
    reader = open_reader(DATA / "mini")
    cases = load_cases("retrieval", None)[:count]
    return [tuple(reader.template.prompt(case["messages"], None, {"enable_thinking": False}).tokens) for case in cases]


def answers(of: LocalEngine, texts, tokens: int = 70, prefix: str = "r", **sampling) -> list[Completion]:
    wanted = {"seed": 3, "temperature": 0.0, "logprobs": 2, **sampling}
    requests = [
        Request(f"{prefix}{i}", text, Sampling(max_tokens=tokens, **wanted), (Boundary(len(text), "message"),))
        for i, text in enumerate(texts)
    ]
    done = generate(of, requests)
    assert all(one.finished.reason == "length" for one in done.values()), [one.finished for one in done.values()]
    return [done[request.id] for request in requests]


def equal_texts(ones: list[Completion], others: list[Completion]) -> int:
    """How many are equal. Sums in another order may turn a token whose two best are all but equally likely, which
    happens behind an answer, where a greedy text babbles; any other difference fails."""
    for one, other in zip(ones, others, strict=True):
        parted = next((i for i, (a, b) in enumerate(zip(one.tokens, other.tokens, strict=True)) if a != b), None)
        if parted is not None:
            (best, first), (second, then) = one.logprobs[parted].top
            assert {best, second} == {one.tokens[parted], other.tokens[parted]}, (parted, one.logprobs[parted])
            assert first - then < NEAR, (parted, one.logprobs[parted])
    return sum(one.tokens == other.tokens for one, other in zip(ones, others, strict=True))


def test_graphs_give_what_single_launches_give():
    of = engine()
    by_graphs = answers(of, prompts())
    graphs, of.runner.graphs = of.runner.graphs, None
    of.flush()
    assert graphs.rows == 8
    assert equal_texts(answers(of, prompts(), prefix="s"), by_graphs) == 8


def test_alone_is_as_in_a_batch():
    together = answers(usual(), prompts())
    usual().flush()
    alone = [answers(usual(), [text], prefix=f"a{i}-")[0] for i, text in enumerate(prompts())]
    assert equal_texts(alone, together) >= 7


def test_a_hit_is_as_cold_with_state_and_pages_from_the_host():
    usual().flush()
    cold = answers(usual(), prompts(), prefix="c")
    warm = answers(usual(), prompts(), prefix="w")
    assert equal_texts(warm, cold) >= 7
    assert usual().stats().counters["checkpoints_saved"] > 0


def test_a_prompt_that_was_left_half_computed_goes_on_where_it_stopped():
    """Beside rows that decode by graphs; another request has its slot meanwhile."""
    of, text = engine(chunk=512), (prompts()[0] * 3)[:2900]
    of.flush()
    (cold,) = answers(of, [text], 8, "cold")
    of.flush()
    of.submit(Request("beside", prompts()[1], Sampling(200, seed=1, temperature=0.0)))
    for _ in range(6):
        of.step()
    of.submit(Request("left", text, Sampling(8, seed=3, temperature=0.0)))
    while not any(active.done > 256 * 5 for active in of.stats().active if active.id == "left"):
        of.step()
    stopped = next(active.done for active in of.stats().active if active.id == "left")
    of.abort("left")
    answers(of, prompts()[2:3], 4, "other")
    (warm,) = answers(of, [text], 8, "warm")
    assert stopped - 256 <= warm.finished.usage.cached_tokens <= stopped
    assert equal_texts([cold], [warm])


@pytest.mark.parametrize("chunk", [64, 512])
def test_chunks_change_no_answer(chunk):
    usual().flush()
    whole = answers(usual(), prompts(4), prefix=f"h{chunk}")
    assert equal_texts(answers(engine(chunk=chunk), prompts(4)), whole) >= 3


def test_noise_does_not_depend_on_the_batch():
    usual().flush()
    drawn = {"temperature": 0.8, "top_p": 0.9, "top_k": 40}
    together = answers(usual(), prompts(4), 30, "t", **drawn)
    alone = [answers(usual(), [text], 30, f"u{i}-", **drawn)[0] for i, text in enumerate(prompts(4))]
    same = sum(one.tokens == other.tokens for one, other in zip(alone, together, strict=True))
    assert same >= 3  # a draw may lie within rounding of an edge


def test_answers_are_those_of_the_cpu():
    """The shipped prompts, judged as `kakera eval` does: no more than one differs."""
    reader, cases = open_reader(DATA / "mini"), load_cases("retrieval", None)[:10]
    on_gpu = run_suite("retrieval", cases, usual(), reader)
    on_cpu = run_suite("retrieval", cases, engine(gpus="cpu", context=2048, host_cache=2**28), reader)
    assert sum(a.answer != b.answer for a, b in zip(on_gpu, on_cpu, strict=True)) <= 2
    assert abs(sum(a.ok for a in on_gpu) - sum(b.ok for b in on_cpu)) <= 1


def test_a_checkpoint_from_the_host_is_what_the_device_had():
    """Six by two places, without a wait of the host in between; then back into other slots."""
    runner = usual().runner
    states, kv, store = runner.states, runner.kv.store, runner.store
    went = []
    for number in range(6):
        states.state_LSVKD[:, 0].normal_()
        states.conv_LSWC[:, 0].normal_()
        kv.recent.ring[:, 0].normal_()
        kv.recent.sink[:, 0].normal_()
        checkpoint = store.new_checkpoint(640)
        states.save(0, checkpoint)
        kv.save_window(0, checkpoint)
        store.keep_checkpoint(1000 + number, checkpoint)
        store.keep_sink(1000 + number, 0)
        went.append([*(tensor.clone() for tensor in [*checkpoint.parts.values()][:-1]), kv.save_sink(0)])
    for number in reversed(range(6)):
        store.load(1 + number, 1000 + number, 1000 + number)
        store.arrive()
        found = store.new_checkpoint(640)
        states.save(1 + number, found)
        kv.save_window(1 + number, found)
        came = [*[*found.parts.values()][:-1], kv.save_sink(1 + number)]
        assert all(torch.equal(a, b) for a, b in zip(came, went[number], strict=True))
    store.drop(Drop(tuple(range(1000, 1006)), tuple(range(1000, 1006))))


def test_pages_come_back_from_the_host_as_they_were():
    """More than a place takes at a time."""
    kv, store = usual().runner.kv.store, usual().runner.store
    pages, others = list(range(100)), list(range(150, 250))
    before = kv.read_pages(pages)
    store.keep_pages([(page, 5000 + page) for page in pages])
    store.load_pages([(5000 + page, other) for page, other in zip(pages, others, strict=True)])
    store.arrive()
    assert all(torch.equal(a, b) for a, b in zip(kv.read_pages(others), before, strict=True))
    store.drop(Drop(host_pages=tuple(5000 + page for page in pages)))


def test_the_computation_goes_on_while_a_load_is_under_way():
    store = usual().runner.store
    store.keep_checkpoint(2000, store.new_checkpoint(640))
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
    torch.cuda.synchronize()
    ends[0].record()
    store._side.run(lambda: torch.cuda._sleep(10**8))  # as if copies before it took 50 ms
    store.load(0, 2000, None)
    ends[1].record()
    store.arrive()
    ends[2].record()
    torch.cuda.synchronize()
    assert ends[0].elapsed_time(ends[1]) < 0.2 * ends[0].elapsed_time(ends[2])
    store.drop(Drop((2000,)))
