"""A card that gets fuller, for real: memory is mapped, given back and mapped again under graphs, and another process
takes and leaves it in mid-run. Skipped without a GPU."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from test_engine_cuda import DATA, WISHES, answers, equal_texts, prompts

from kakera.contract.request import Request, Sampling
from kakera.contract.step import DemotePages, MovePages, StepPlan
from kakera.kv.pool import PagePool
from kakera.ops.virtual_memory import CudaMapper, VirtualMemory
from kakera.plan.page_pool import GRANULE
from kakera.plan.planner import plan_for
from kakera.run import card_watch
from kakera.run.build import build_engine
from kakera.schedule import lending
from kakera.target.allocator import maps_pages

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(not maps_pages(), reason="nothing is mapped under WSL2"),
]
CUDA = torch.device("cuda")
SLACK = 64 * 2**20  # bytes that a driver takes or leaves beside what it is told
HOLDER = """
import sys, torch
free = torch.cuda.mem_get_info()[0]
held = torch.empty(free - int(sys.argv[1]), dtype=torch.uint8, device="cuda")
print(held.numel(), flush=True)
sys.stdin.read()
"""


def free() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def test_chunks_go_back_to_the_driver_and_the_others_keep_their_bytes():
    memory = VirtualMemory(64 * GRANULE, GRANULE, CudaMapper(CUDA))
    bytes_B = memory.tensor()
    assert bytes_B.is_cuda and bytes_B.data_ptr() == memory.address and bytes_B.numel() == 64 * GRANULE
    words = bytes_B.view(torch.int32)
    words.copy_(torch.arange(len(words), dtype=torch.int32, device=CUDA))
    graph, total = torch.cuda.CUDAGraph(), torch.zeros(1, dtype=torch.int64, device=CUDA)
    head = words[: 16 * GRANULE // 4]
    head.sum()
    with torch.cuda.graph(graph):
        total.copy_(head.sum())
    before = free()
    memory.give_back(16, 64)
    assert free() - before >= 48 * GRANULE - SLACK
    graph.replay()
    assert int(total) == sum(range(len(head))), "a graph reads on under the same addresses"
    assert memory.take(16, 64) and free() - before <= SLACK
    words[len(head) :] = 7
    graph.replay()
    assert int(total) == sum(range(len(head))) and int(words[len(head) :].min()) == 7
    del memory, words, head, bytes_B, graph
    assert free() - before >= 64 * GRANULE - SLACK, "all of it goes back with its last user"


def test_a_pool_gives_back_what_it_says():
    before = free()
    pool = PagePool(1000, CUDA, CudaMapper)
    codes, parameters = pool.empty((4, 1000, 32768), torch.uint8), pool.empty((4, 1000, 4096), torch.float16)
    assert before - free() == pytest.approx(pool.mapped_bytes, abs=SLACK)
    codes[:, :300], parameters[:, :300] = 3, 0.5
    full = free()
    assert pool.hold(300) == 300
    assert free() - full == pytest.approx(pool.shape.freed(300), abs=SLACK) and pool.shape.freed(300) > 10**8
    assert pool.hold(1000) == 1000 and abs(free() - full) <= SLACK
    codes[:, 300:], parameters[:, 300:] = 4, 0.25
    assert int(codes[:, :300].min()) == int(codes[:, :300].max()) == 3 and int(codes[:, 300:].min()) == 4
    assert float(parameters[:, :300].max()) == 0.5


def test_a_holder_takes_memory_in_mid_run_and_gives_it_back(monkeypatch):
    """Texts are those of a quiet card; what was lent is really free for others; all comes back."""
    monkeypatch.setattr(lending, "STEADY_SECONDS", 1.0)
    wishes = replace(WISHES, max_running=4, pool=2**19)
    plan = plan_for(DATA / "mini", wishes)
    engine = build_engine(DATA / "mini", plan)
    assert engine.card is not None, "the pages are mapped"
    kept = engine.card._rule.margin
    quiet = answers(engine, prompts(4))
    pool, whole = engine.runner.kv.store.pool, engine.runner.kv.store.pool.mapped_bytes
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(kept // 4)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        lent = serve_until(engine, lambda: engine.stats().pages_lent > 0)
        assert pool.mapped_bytes < whole and engine.stats().pages_lent > plan.pages // 2
        print(f"lent {engine.stats().pages_lent} of {plan.pages} pages, {(whole - pool.mapped_bytes) / 1e6:.0f} MB")
        assert not lent, "no request failed meanwhile"
        assert engine.sweep(), "what is mapped is read, and nothing else"
        less = answers(engine, prompts(4), prefix="less")
        assert equal_texts(less, quiet) >= 3
    finally:
        holder.communicate(timeout=60)
    serve_until(engine, lambda: engine.stats().pages_lent == 0)
    assert pool.mapped_bytes == whole
    assert equal_texts(answers(engine, prompts(4), prefix="again"), quiet) >= 3


def serve_until(engine, reached, seconds: float = 120.0) -> list[str]:
    """Requests one after the other; messages of those that failed."""
    failed, end, number = [], time.monotonic() + seconds, 0
    while not reached():
        assert time.monotonic() < end, "the card's memory changed and the engine did not follow"
        number += 1
        engine.submit(Request(f"s{end}-{number}", prompts(4)[number % 4], Sampling(64, seed=1, temperature=0.0)))
        while engine.stats().running + engine.stats().waiting:
            failed += [event.message for event in engine.step() if getattr(event, "reason", "") == "error"]
    return failed


def test_looking_costs_next_to_nothing():
    engine = build_engine(DATA / "mini", plan_for(DATA / "mini", WISHES))
    engine.card.follow(engine.scheduler, engine.runner)
    began = time.perf_counter()
    for _ in range(100):
        engine.card._looked_at = float("-inf")
        engine.card.follow(engine.scheduler, engine.runner)
    each = (time.perf_counter() - began) / 100
    print(f"a look takes {1e6 * each:.0f} us, every {card_watch.LOOK_SECONDS} s")
    assert each < 0.005


def test_moved_pages_are_the_same_beside_copies_to_the_host():
    engine = build_engine(DATA / "mini", plan_for(DATA / "mini", WISHES))
    store = engine.runner.kv.store
    pages = list(range(40, 100))
    store.write_pages(pages, [torch.randint_like(t.byte(), 0, 200).to(t.dtype) for t in store.read_pages(pages)])
    held = [tensor.clone() for tensor in store.read_pages(pages)]
    demote = DemotePages(tuple((page, 5000 + page) for page in pages[:8]))
    move = MovePages(tuple((page, page - 40) for page in pages[8:40]))
    engine.runner.execute(StepPlan(0, (demote, move)))
    found = store.read_pages(range(8, 40))
    assert all(torch.equal(new, old[:, 8:40]) for new, old in zip(found, held, strict=True))


def test_pages_go_with_a_sleep_and_come_back():
    engine = build_engine(DATA / "mini", plan_for(DATA / "mini", replace(WISHES, pool=2**19)))
    pool, before = engine.runner.kv.store.pool, answers(engine, prompts(2))
    whole, full = pool.mapped_bytes, free()
    engine.sleep(1)
    assert pool.mapped_bytes == 0 and free() - full >= whole
    began = time.perf_counter()
    engine.wake_up()
    print(f"{whole / 1e6:.0f} MB of pages among what came back in {time.perf_counter() - began:.2f} s")
    assert pool.mapped_bytes == whole
    assert equal_texts(answers(engine, prompts(2), prefix="awake"), before) == 2
