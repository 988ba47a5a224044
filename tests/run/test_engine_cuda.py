"""The whole engine with the bundled model on a GPU: graphs, hits, cuts and batches change no answer, and the CPU's
answers come out. Skipped without a GPU."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

import kakera
from kakera.evaluate.data import load_cases
from kakera.evaluate.session import open_reader, plan_for
from kakera.evaluate.suites import run_suite
from kakera.plan.plan import Wishes
from kakera.run.build import build_engine
from kakera.run.engine import LocalEngine
from kakera.run.generate import generate
from kakera.run.offload import Offload
from kakera.run.store import HostStore, tensors_of
from kakera.schedule.request import Boundary, Request, Sampling

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
DATA = Path(kakera.__file__).parent / "data"
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


def answers(of: LocalEngine, texts, tokens: int = 70, prefix: str = "r", **sampling) -> list[list[int]]:
    wanted = {"seed": 3, "temperature": 0.0, **sampling}
    requests = [
        Request(f"{prefix}{i}", text, Sampling(max_tokens=tokens, **wanted), (Boundary(len(text), "message"),))
        for i, text in enumerate(texts)
    ]
    done = generate(of, requests)
    assert all(one.finished.reason == "length" for one in done.values()), [one.finished for one in done.values()]
    return [done[request.id].tokens for request in requests]


def agreement(a: list[list[int]], b: list[list[int]]) -> float:
    """Share of texts that are equal. Sums in another order may turn a token whose two best are equally likely."""
    return sum(x == y for x, y in zip(a, b, strict=True)) / len(a)


def test_graphs_give_what_single_launches_give():
    of = engine()
    by_graphs = answers(of, prompts())
    graphs, of.runner.graphs = of.runner.graphs, None
    of.flush()
    assert graphs.rows == 8
    assert agreement(answers(of, prompts(), prefix="s"), by_graphs) == 1.0


def test_alone_is_as_in_a_batch():
    together = answers(usual(), prompts())
    usual().flush()
    alone = [answers(usual(), [text], prefix=f"a{i}-")[0] for i, text in enumerate(prompts())]
    assert agreement(alone, together) == 1.0


def test_a_hit_is_as_cold_with_state_and_pages_from_the_host():
    usual().flush()
    cold = answers(usual(), prompts(), prefix="c")
    warm = answers(usual(), prompts(), prefix="w")
    assert agreement(warm, cold) == 1.0
    assert usual().stats().counters["checkpoints_saved"] > 0


@pytest.mark.parametrize("chunk", [64, 512])
def test_chunks_change_no_answer(chunk):
    usual().flush()
    whole = answers(usual(), prompts(4), prefix=f"h{chunk}")
    assert agreement(answers(engine(chunk=chunk), prompts(4)), whole) == 1.0


def test_noise_does_not_depend_on_the_batch():
    usual().flush()
    drawn = {"temperature": 0.8, "top_p": 0.9, "top_k": 40}
    together = answers(usual(), prompts(4), 30, "t", **drawn)
    alone = [answers(usual(), [text], 30, f"u{i}-", **drawn)[0] for i, text in enumerate(prompts(4))]
    assert agreement(alone, together) >= 0.75  # a draw may lie within rounding of an edge


def test_answers_are_those_of_the_cpu():
    """The shipped prompts, judged as `kakera eval` does: no more than one differs."""
    reader, cases = open_reader(DATA / "mini"), load_cases("retrieval", None)[:10]
    on_gpu = run_suite("retrieval", cases, usual(), reader)
    on_cpu = run_suite("retrieval", cases, engine(gpus="cpu", context=2048, host_cache=2**28), reader)
    assert sum(a.answer != b.answer for a, b in zip(on_gpu, on_cpu, strict=True)) <= 2
    assert abs(sum(a.ok for a in on_gpu) - sum(b.ok for b in on_cpu)) <= 1


def test_a_checkpoint_from_the_host_is_what_the_device_had():
    runner = usual().runner
    store = HostStore()
    offload = Offload(runner.shape, store, 2)
    for number in range(6):
        staged = offload.stage(64 * number)
        for tensor in tensors_of(staged):
            tensor.copy_(torch.randn(tensor.shape, device="cuda"))
        expected = [tensor.cpu() for tensor in tensors_of(staged)]
        offload.send_checkpoint(number, staged)
        if number % 2:
            offload.wait_for("checkpoint", [number])
            found = store.checkpoints[number]
            assert found.position == 64 * number
            assert all(torch.equal(a, b) for a, b in zip(tensors_of(found), expected, strict=True))
    offload.wait_for("checkpoint", range(6))
    assert [store.checkpoints[i].position for i in range(6)] == [64 * i for i in range(6)]


def test_pages_come_back_from_the_host_as_they_were():
    kv, store = usual().runner.kv, HostStore()
    offload = Offload(usual().runner.shape, store, 2)
    pages = list(range(40))
    before = kv.read_pages(pages)
    offload.send_pages(pages, lambda first, end: kv.read_pages(pages[first:end]))
    offload.wait_for("page", pages)
    for a, b in zip(store.read_pages(pages), before, strict=True):
        assert torch.equal(a, b.cpu())
