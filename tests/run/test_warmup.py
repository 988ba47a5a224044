"""Warm-up with plans of every size runs steps that the runner and the cache can take, and leaves nothing behind."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from graph_stand_in import with_late_store
from run_world import World, ask, tiny_plan, tokens_of

from kakera.cache.host import CacheSizes
from kakera.contract.grid import PAGE, pages_for
from kakera.errors import UsageError
from kakera.run.build import build_engine
from kakera.run.step.warmup import SHORT, prefill_steps, warm_up
from kakera.target.target import CUDA

PLANS = {
    "usual": {},
    "one page": {"pages": 1, "context": 64},
    "less than a page": {"pages": 1, "context": 40},
    "context below the chunk": {"context": 200, "pages": 4},
    "context below the chunk, pages for others": {"context": 200, "chunk": 512},
    "context of one chunk": {"context": 128},
    "smallest chunk": {"chunk": 64},
    "one slot": {"slots": 1},
    "many slots": {"slots": 40, "pages": 70},
    "no store": {"host_cache": 0},
    "a store for less than a checkpoint": {"host_cache": 1000},
}


@pytest.mark.parametrize("changes", PLANS.values(), ids=PLANS)
def test_every_plan_warms_up(tiny_model, monkeypatch, changes):
    plan = replace(tiny_plan(tiny_model), **{"pages": 128, "chunk": 128, **changes})
    world = World(build_engine(tiny_model, plan))
    if CacheSizes.of(replace(plan, target=CUDA)).can_save:
        with_late_store(world, plan)
    told: list[tuple[int, int]] = []
    warm_up(world.runner, plan, lambda done, total: told.append((done, total)))
    assert told and told[-1][0] == told[-1][1] == len(prefill_steps(plan))
    store = world.runner.store
    assert not store.checkpoints and not store.sinks and not store.pages
    assert not torch.count_nonzero(world.runner.states.state_LSVKD)
    prompt = tokens_of(1, min(plan.context, 90) - 8)
    fresh = World(build_engine(tiny_model, plan))
    assert world.one(ask("a", prompt, 4)).tokens == fresh.one(ask("a", prompt, 4)).tokens


@pytest.mark.parametrize("chunk", [64, 128, 512, 8192])
@pytest.mark.parametrize("context", [1, 40, 64, 65, 200, 4096, 4097, 8192, 200_000])
@pytest.mark.parametrize("pages", [1, 2, 3, 9, 5000])
def test_steps_are_those_of_a_request(tiny_model, chunk, context, pages):
    """Within the chunk, the pages of the plan and those of a slot's table; of all few counts of rows, whose products
    have variants of their own; behind history, if a request can have one."""
    plan = replace(tiny_plan(tiny_model), chunk=chunk, context=context, pages=pages)
    rows = [row for step in prefill_steps(plan) for row in step.rows]
    held = min(pages, pages_for(context))
    assert all(row.page_count <= held and not row.start % PAGE and 0 < len(row.tokens) <= chunk for row in rows)
    assert {len(row.tokens) for row in rows} >= {min(chunk, held * PAGE), *SHORT}
    assert any(row.start for row in rows) == (held > 1)


def test_a_plan_that_several_share_is_refused_in_words_where_one_computes(tiny_model, monkeypatch):
    monkeypatch.setattr("kakera.run.build.is_there", lambda target: True)
    shared = replace(tiny_plan(tiny_model), ranks=2)
    with pytest.raises(UsageError, match="among 2 processes, and this computes on one: --gpus cpu"):
        build_engine(tiny_model, shared)
    plan = replace(shared, target=CUDA, device_names=("a", "b"), device_bytes=(12 * 10**9, 12 * 10**9))
    with pytest.raises(UsageError, match="among 2 cards, and this computes on one: --gpus 12GB"):
        build_engine(tiny_model, plan)
