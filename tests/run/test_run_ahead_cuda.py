"""What can go wrong around a step that runs ahead and copies under way, on a GPU with the bundled model: crowds that
are preempted, aborted and flushed, values that are not finite, plans at the edges. Skipped without a GPU."""

from __future__ import annotations

import gc
import random
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from run_world import World, ask, tokens_of
from test_run_ahead import END, POISON, Ask, play
from torch import Tensor

import kakera
from kakera.arch.spec import ModelSpec
from kakera.cache.host import CacheSizes
from kakera.contract.events import Finished, Tokens
from kakera.kv.rotation import Frame, Rotation
from kakera.model.linear import EmbeddingMap
from kakera.plan.plan import Wishes
from kakera.plan.planner import plan_for
from kakera.run.build import build_engine

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
MINI = Path(kakera.__file__).parent / "data" / "mini"
WISHES = Wishes(gpus="auto", context=4096, max_running=8, chunk=512, host_cache=2**30)


@pytest.fixture(autouse=True)
def memory():
    """Of one engine at a time: each caps what the process may take."""
    yield
    gc.collect()
    torch.cuda.empty_cache()


def build(graphs: bool = True, changes: dict | None = None, **wishes) -> World:
    """`changes`: of the plan."""
    plan = plan_for(MINI, replace(WISHES, **wishes))
    world = World(build_engine(MINI, replace(plan, **(changes or {}))))
    execute = world.runner.execute
    world.runner.execute = lambda *step: replace(execute(*step), seconds=0.01)  # type: ignore[method-assign]
    if not graphs:
        world.runner.graphs = None
    return world


def finish_copies() -> None:
    torch.cuda.synchronize()


def random_game(seed: int, poison: bool = False) -> list:
    rng = random.Random(seed)
    game: list = []
    for _ in range(40):
        kind = rng.random()
        if kind < 0.4:
            own, most = rng.choice([1, 62, 63, 64, 65, 500]), rng.choice([1, 2, 40, 70, 140])
            likes = poison and rng.random() < 0.3
            game.append(Ask(rng.randrange(3), rng.choice([0, 64, 190, 600]), own, most, rng.choice([1, 2, 3]), likes))
            game[-1] = replace(game[-1], warm=likes, likes_poison=likes)
        elif kind < 0.9:
            game.append(("steps", rng.choice([1, 1, 2, 3, 10, 30])))
        else:
            game.append(rng.choice([("abort", rng.randrange(8)), ("flush", 0)]))
    return game


def texts(told: list) -> dict[str, tuple[list[int], str]]:
    """Of requests that ended: tokens and why. An id that comes back is one with a number."""
    found: dict[str, tuple[list[int], str]] = {}
    running: dict[str, list[int]] = {}
    for event in told:
        if isinstance(event, Tokens):
            running.setdefault(event.request_id, []).extend(event.tokens)
        elif isinstance(event, Finished):
            found[f"{event.request_id} {len(found)}"] = running.pop(event.request_id, []), event.reason
    return found


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_crowds_say_what_they_say_launch_by_launch(seed):
    """20 pages for eight slots: rows are preempted and pages demoted while copies are under way."""
    told = []
    for graphs in (True, False):
        world = build(graphs, {"pages": 24})
        told.append(texts(play(world, random_game(seed), finish_copies)))
    ours, wanted = told
    assert "error" not in {reason for _, reason in ours.values()}
    same = sum(wanted.get(name) == text for name, text in ours.items())
    assert same >= 0.8 * len(ours), (same, len(ours))  # prefill beside decode rounds in another order


def test_a_store_for_three_checkpoints_turns_over_while_copies_are_under_way():
    plan = plan_for(MINI, WISHES)
    sizes = CacheSizes.of(plan)
    few = 3 * sizes.checkpoint_bytes + 4 * sizes.sink_bytes + 8 * sizes.page_bytes
    world = build(changes={"pages": 24, "host_cache": few})
    play(world, random_game(4), finish_copies)
    counters = world.cache.counters
    assert counters["checkpoints_evicted"] > 0 and counters["checkpoints_saved"] > 3


@dataclass(frozen=True)
class Poisoned:
    """One id whose row is NaN."""

    inner: EmbeddingMap

    def __call__(self, tokens_T: Tensor) -> Tensor:
        rows_TH = self.inner(tokens_T)
        return torch.where((tokens_T == POISON)[:, None], torch.full_like(rows_TH, float("nan")), rows_TH)

    @property
    def device(self) -> torch.device:
        return self.inner.device


@pytest.mark.parametrize("kv", ["int2", "bf16"])
def test_values_that_are_not_finite_end_their_own_row_only(kv):
    """And leave nothing in slots, pages and windows that the next request would see."""
    world = build(changes={"pages": 24}, kv=kv)
    model = world.runner.model
    model.weights = replace(model.weights, embedding=Poisoned(model.weights.embedding))
    world.runner.graphs.capture(model)
    told = play(world, random_game(5, poison=True), finish_copies)
    ends = [event for event in told if isinstance(event, Finished)]
    failed = {event.request_id for event in ends if event.reason == "error"}
    assert all("not finite" in event.message for event in ends if event.reason == "error")
    assert failed and len(failed) < len(ends)
    calm = {"temperature": 0.0, "stop_token_ids": (END,), "logit_bias": ((POISON, -99.0),)}
    prompt = tuple(8 if token == POISON else token for token in tokens_of(77, 300))
    after = world.one(ask("after", prompt, 60, **calm)).tokens
    fresh = build(changes={"pages": 24}, kv=kv)
    assert after == fresh.one(ask("after", prompt, 60, **calm)).tokens


@pytest.mark.parametrize(
    "wishes",
    [
        {"context": 64, "chunk": 64, "max_running": 1, "host_cache": 0},
        {"context": 40, "chunk": 64, "max_running": 1},
        {"context": 200, "chunk": 4096, "max_running": 2},
        {"context": 2048, "max_running": 40},
        {"context": 2048, "kv": "bf16", "host_cache": 2**20},
    ],
    ids=str,
)
def test_plans_at_the_edges_start_and_answer(wishes):
    world = build(**wishes)
    most, streams = min(wishes["context"], 300), wishes.get("max_running", WISHES.max_running)
    requests = [ask(f"r{i}", tokens_of(i, most // 2), most // 3) for i in range(streams + 2)]
    answers = world.answer(*requests)  # of 40 rows no graph; of the last of them one
    assert all(answer.finished.reason in ("stop", "length") for answer in answers)
    world.check_idle()


def random_rotation(spec: ModelSpec) -> Rotation:
    shape = (len(spec.full_layers), spec.kv_heads, spec.head_dim)
    frame = Frame(torch.linalg.qr(torch.randn(*shape, spec.head_dim))[0], torch.zeros(shape))
    return Rotation(frame, frame)


@pytest.mark.parametrize("chunk", [512, 4096])
def test_a_rotation_file_starts_and_stays_within_its_plan(tmp_path, chunk):
    """It has no attention kernels; what the plain operations take is in the plan, by which memory is capped."""
    plan = plan_for(MINI, replace(WISHES, chunk=chunk, context=8192))
    random_rotation(plan.spec).save(tmp_path, plan.spec, "none")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    world = build(chunk=chunk, context=8192, rotation=str(tmp_path))
    assert world.runner.graphs is None
    assert world.one(ask("long", tokens_of(3, 8000), 8)).finished.reason in ("stop", "length")
    plan = plan_for(MINI, replace(WISHES, chunk=chunk, context=8192, rotation=str(tmp_path)))
    estimates = ("CUDA context and modules", "CUDA graphs", "gaps in torch's allocator")
    planned = sum(row.bytes for row in plan.rows if row.place == "device" and row.name not in estimates)
    assert torch.cuda.max_memory_allocated() - before <= planned
