"""An engine that sleeps holds nothing on its device, and when it is woken nobody notices but by the clock."""

from __future__ import annotations

import os
import shutil
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from graph_stand_in import with_late_store
from run_world import World, ask, tiny_plan, tokens_of

from kakera.contract.events import Finished, Tokens
from kakera.disk.home import DiskCache
from kakera.errors import RequestRefused
from kakera.model.qwen3_5 import HybridModel
from kakera.run import asleep, host_copy
from kakera.run.asleep import Sleeper
from kakera.run.build import build_engine
from kakera.run.host_copy import HostCopy
from kakera.run.regions import KV, PAGES, STATES, WEIGHTS
from seeing_model import picture, prompt_of

LASTING = (PAGES, KV, STATES, WEIGHTS)
PROMPT = tokens_of(1, 330)


@pytest.fixture
def card(monkeypatch):
    """The CPU's memory as if it were a card's: all that lasts is copied and given back. `free`: bytes."""
    one = SimpleNamespace(free=10**12, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: one.synchronize())
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 10**9)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (one.free, 2 * 10**12))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    return one


def sleeper_of(world: World) -> Sleeper:
    found = world.engine._sleeper
    assert found is not None
    return found


def held(world: World, *purposes: str) -> int:
    """Bytes on the device, as far as there is a model."""
    regions = world.runner.regions()
    return sum(storage.nbytes() for name in purposes or regions for storage in regions[name])


def steps(world: World, told: dict[str, list[int]], most: int) -> None:
    """That many steps, or until nobody is left."""
    for _ in range(most):
        stats = world.engine.stats()
        if not stats.running + stats.waiting:
            return
        for event in world.engine.step():
            if isinstance(event, Tokens):
                told[event.request_id] += event.tokens


def nap(world: World, *levels: int) -> None:
    for level in levels:
        assert world.engine.sleep(level).level == world.engine.stats().asleep == max(levels[: levels.index(level) + 1])
        assert held(world, PAGES, STATES) == 0 and world.engine.step() == []
    world.engine.wake_up()
    assert world.engine.stats().asleep == 0


@pytest.mark.parametrize("kv", ["int2", "fp32"])  # pages with windows and sinks, and exact ones
def test_a_conversation_goes_on_where_it_was_without_computing_its_prompt_again(tiny_model, kv):
    """At each level, one behind the other."""
    rested, other = World.build(tiny_model, kv), World.build(tiny_model, kv)
    text = PROMPT
    for level in (1, 2):
        turns = [world.one(ask("turn", text, 20)) for world in (rested, other)]
        assert turns[0].tokens == turns[1].tokens
        text = (*text, *turns[0].tokens, *tokens_of(level, 5))
        nap(rested, level)
    last = [world.one(ask("last", text, 8)) for world in (rested, other)]
    assert last[0].tokens == last[1].tokens
    assert last[0].finished.usage.cached_tokens == last[1].finished.usage.cached_tokens >= 0.8 * len(text)
    rested.check_idle()


@pytest.mark.parametrize("levels", [(1, 2), (2, 1)], ids=["deeper", "not less deep"])
def test_who_runs_goes_on_behind_the_sleep_with_the_same_text(tiny_model, levels):
    """One that decodes, one that is half read, one in the queue; whatever was computed to a page's border is kept."""
    requests = [ask("long", PROMPT, 40), ask("late", tokens_of(2, 500), 3), ask("queued", tokens_of(3, 70), 3)]
    texts: list[dict[str, list[int]]] = []
    for naps in (0, 2):
        world, told = World.build(tiny_model, slots=2), {request.id: [] for request in requests}
        world.engine.submit(requests[0])
        steps(world, told, 20)
        for request in requests[1:]:
            world.engine.submit(request)
        steps(world, told, 3)
        for _ in range(naps):
            before = world.engine.stats().counters["prefilled_tokens"]
            nap(world, *levels)
            steps(world, told, 2)
            assert world.engine.stats().counters["prefilled_tokens"] - before < 2 * 128 + 64
        steps(world, told, 500)
        texts.append(told)
        world.check_idle()
    assert texts[0] == texts[1] and all(texts[0].values())


def test_what_is_asked_and_ended_while_it_sleeps(tiny_model):
    world = World.build(tiny_model)
    world.engine.wake_up()  # which it is
    world.engine.submit(ask("running", PROMPT, 90))
    world.engine.step()
    world.engine.sleep(1)
    world.engine.submit(ask("new", tokens_of(4, 90), 3))
    world.engine.abort("running")
    (ended,) = world.engine.step()
    assert isinstance(ended, Finished) and ended.reason == "abort"
    stats = world.engine.stats()
    assert (stats.running, stats.waiting, stats.idle) == (0, 1, True)
    assert world.engine.sweep() == [] and world.engine.flush().pages == 0
    world.engine.wake_up()
    told: dict[str, list[int]] = {"new": []}
    steps(world, told, 50)
    assert told["new"] == World.build(tiny_model).one(ask("new", tokens_of(4, 90), 3)).tokens
    world.check_idle()


def test_level_2_drops_the_model_and_reads_it_again(tiny_model, tmp_path):
    directory = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    world = World(build_engine(directory, tiny_plan(directory)))
    before, read = world.one(ask("a", PROMPT, 9)).tokens, []
    model = weakref.ref(world.runner.model)
    world.engine.sleep(2)
    assert model() is None, "somebody holds the model, so its memory is not free"
    with pytest.raises(RuntimeError, match="dropped"):
        _ = world.runner.model
    weights = directory / "model.safetensors"
    times = weights.stat()
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns + 10**9))
    with pytest.raises(RequestRefused, match="have changed since the start") as refused:
        world.engine.wake_up()
    assert refused.value.status == 503 and world.engine.stats().asleep == 2 and held(world, WEIGHTS) == 0
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    world.engine.wake_up(lambda done, total: read.append((done, total)))
    assert read and read[-1][0] == read[-1][1]
    again = world.one(ask("b", PROMPT, 9))
    assert again.tokens == before and again.finished.usage.cached_tokens == 320


def test_a_card_keeps_at_level_1_what_it_brings_back(tiny_model, card):
    """A GPU's way: weights, windows and scratch are copied out, bit for bit, and nothing is left."""
    world = World.build(tiny_model)
    side = with_late_store(world, tiny_plan(tiny_model))
    world.engine._sleeper = Sleeper(
        world.runner, tiny_model, partial(HybridModel.load, tiny_model, torch.float32, "cpu")
    )
    sleeper_of(world)._cards = True
    card.synchronize = side.finish
    before, size = world.one(ask("a", PROMPT, 9)).tokens, held(world, *LASTING)
    state = world.engine.sleep(1)
    assert (state.level, state.device_bytes) == (1, 10**12) and held(world) == 0
    assert state.host_bytes > 0
    card.free = -1
    with pytest.raises(RequestRefused, match="close what else uses the card") as refused:
        world.engine.wake_up()
    assert (refused.value.status, refused.value.code) == (503, "no_device_memory")
    assert world.engine.stats().asleep == 1 and held(world) == 0
    card.free = 10**12
    assert world.engine.wake_up().host_bytes == 0 and held(world, *LASTING) == size
    again = world.one(ask("b", PROMPT, 9))
    assert again.tokens == before and again.finished.usage.cached_tokens == 320
    deeper = [world.engine.sleep(level).host_bytes for level in (1, 2)]
    assert deeper[1] < deeper[0] and held(world, KV) == held(world, WEIGHTS) == 0
    world.engine.wake_up()
    assert world.one(ask("c", PROMPT, 9)).tokens == before


@pytest.mark.parametrize("level", [1, 2])
def test_a_vision_tower_sleeps_as_well(seeing_model, card, level):
    """It is no part of the model that level 2 reads again: it is copied."""
    sees = {"vision": "device", "image_tokens": 256, "image_store": 400, "pixel_bytes": 10**8}
    world, other = (World.build(seeing_model, **sees) for _ in range(2))
    sleeper_of(world)._cards = True
    tokens, images = prompt_of(tokens_of(1, 70), picture(1, 9, 12), tokens_of(2, 20))
    seen = replace(ask("a", tokens, 9), images=images)
    before = world.one(seen).tokens
    world.engine.flush()  # the embeddings go, so that the tower is asked again
    world.engine.sleep(level)
    assert held(world) == 0
    world.engine.wake_up()
    assert world.one(seen).tokens == before == other.one(seen).tokens
    assert world.cache.counters["images_encoded"] == 2


@pytest.mark.parametrize("given", [True, False], ids=["as the system says", "as it turns out"])
def test_a_host_without_room_refuses_level_1_and_the_engine_goes_on(tiny_model, card, monkeypatch, given):
    world = World.build(tiny_model)
    sleeper_of(world)._cards = True
    monkeypatch.setattr(asleep, "host_memory", lambda: (10**9, 10**9 - 1000 if given else 0))

    def none(*_):
        raise OSError("Cannot allocate memory")

    monkeypatch.setattr(host_copy.mmap, "mmap", none)
    told: dict[str, list[int]] = {"a": []}
    world.engine.submit(ask("a", PROMPT, 9))
    steps(world, told, 4)
    with pytest.raises(RequestRefused, match=r"level 2\s+keeps no weights"):
        world.engine.sleep(1)
    assert world.engine.stats().asleep == 0
    steps(world, told, 50)
    assert told["a"] == World.build(tiny_model).one(ask("a", PROMPT, 9)).tokens


def test_a_waking_that_fails_half_way_gives_back_what_it_took(tiny_model, card, monkeypatch):
    world = World.build(tiny_model)
    sleeper = sleeper_of(world)
    sleeper._cards = True
    before = world.one(ask("a", PROMPT, 9)).tokens
    world.engine.sleep(1)
    bring_back = HostCopy.bring_back

    def fails(self):
        bring_back(self)
        raise torch.OutOfMemoryError("CUDA out of memory.\nand much more")

    with monkeypatch.context() as patch:
        patch.setattr(HostCopy, "bring_back", fails)
        with pytest.raises(RequestRefused, match=r"sleeps on: CUDA out of memory\.$"):
            world.engine.wake_up()
    assert held(world) == 0 and world.engine.stats().asleep == 1
    world.engine.wake_up()
    assert world.one(ask("b", PROMPT, 9)).tokens == before


def test_a_host_copy_holds_the_bytes_of_storages_of_any_size(monkeypatch):
    """And views of them are what they were."""
    monkeypatch.setattr(host_copy, "PIECE", 1000)
    tensors = [torch.randint(0, 256, (count,), dtype=torch.uint8) for count in (0, 1, 65, 1000, 30_007)]
    views, before = [tensor[len(tensor) // 2 :] for tensor in tensors], [tensor.clone() for tensor in tensors]
    copy = HostCopy([tensor.untyped_storage() for tensor in tensors])
    copy.empty()
    assert sum(tensor.untyped_storage().nbytes() for tensor in tensors) == 0
    copy.bring_back()
    assert all(map(torch.equal, tensors, before))
    assert all(torch.equal(view, old[len(old) // 2 :]) for view, old in zip(views, before, strict=True))


def test_what_a_sleeping_engine_holds_goes_to_the_disk_at_its_end(tiny_model, tmp_path):
    home = DiskCache(tmp_path / "disk", 10**8)
    world = World(build_engine(tiny_model, tiny_plan(tiny_model), disk=home))
    world.engine.submit(ask("a", PROMPT, 20))
    for _ in range(6):
        world.engine.step()
    world.engine.sleep(2)
    world.engine.keep(5.0)
    after = World(build_engine(tiny_model, tiny_plan(tiny_model), disk=home))
    assert after.one(ask("b", PROMPT, 3)).finished.usage.cached_tokens == 320
