"""The store of a GPU with copies that come as late as they may: what comes back is what went, whatever was kept,
dropped and loaded meanwhile."""

from __future__ import annotations

import logging
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from graph_stand_in import with_graphs, with_late_store
from run_world import CODECS, World, ask, tiny_plan, tokens_of

from kakera.contract.request import Sampling
from kakera.contract.step import (
    DemotePages,
    DiskRecord,
    Drop,
    PromotePages,
    ResetSlot,
    RestoreCheckpoint,
    SamplingInput,
    Segment,
    StepPlan,
)
from kakera.kv.store import Int2Store
from kakera.plan import store_sizes
from kakera.plan.store_sizes import StoreSizes
from kakera.run.store import pinned as pinned_store
from kakera.run.store.pinned import pinned_segments
from kakera.target.target import CUDA

POSITION = 320  # its window wraps in the ring


@pytest.fixture(params=[*((codec, 2) for codec in CODECS), ("int2", 1)])
def world(tiny_model, request, monkeypatch):
    codec, places = request.param
    return build(tiny_model, codec, monkeypatch, places)


def build(tiny_model, codec: str, monkeypatch, places: int = 2) -> World:
    """Segments of a few blocks, so that records lie in several."""
    plan = tiny_plan(tiny_model, codec, pages=16, slots=3)
    monkeypatch.setattr(store_sizes, "SEGMENT_BYTES", 7 * plan.page_bytes)
    world = World.build(tiny_model, codec, pages=16, slots=3)
    with_late_store(world, plan, places)
    scramble(world, 0)
    return world


def scramble(world: World, seed: int) -> None:
    """Other content everywhere on the device."""
    torch.manual_seed(seed)
    for tensor in contents(world, copies=False):
        tensor.copy_(torch.rand(tensor.shape) if tensor.is_floating_point() else torch.randint(0, 255, tensor.shape))


def contents(world: World, copies: bool = True) -> list[torch.Tensor]:
    kv, states = world.runner.kv.store, world.runner.states
    recent = (kv.recent.ring, kv.recent.sink) if isinstance(kv, Int2Store) else ()
    tensors = [*kv.page_tensors(), *recent, states.state_LSVKD, states.conv_LSWC]
    return [tensor.clone() for tensor in tensors] if copies else tensors


def of_slot(world: World, slot: int) -> list[torch.Tensor]:
    """What a checkpoint at POSITION and a sink hold, as copies."""
    kv, states = world.runner.kv.store, world.runner.states
    held = [states.state_LSVKD[:, slot].clone(), states.conv_LSWC[:, slot].clone()]
    if isinstance(kv, Int2Store):
        places = kv.recent.places_of(POSITION // 64 - kv.window_pages, POSITION // 64 - 1)
        held += [kv.recent.ring[:, slot, places].clone(), kv.recent.sink[:, slot].clone()]
    return held


def keep(world: World, number: int, slot: int) -> None:
    """As the runner does for a decode row."""
    checkpoint = world.runner.store.new_checkpoint(POSITION)
    world.runner.states.save(slot, checkpoint)
    world.runner.kv.store.save_window(slot, checkpoint)
    world.runner.store.keep_checkpoint(number, checkpoint)


def execute(world: World, *actions) -> None:
    world.runner.execute(StepPlan(1, tuple(actions)))


def all_equal(ones, others) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


def sink_of(world: World, number: int) -> int | None:
    return number if world.cache.sizes.windowed else None


def test_slots_and_pages_come_back_as_they_went(world):
    """Through fewer places than records, out of scattered blocks, into other slots and pages."""
    store, rng = world.runner.store, random.Random(1)
    went: dict[int, list] = {}
    for number in range(8):
        scramble(world, number)
        if number >= 4:  # every other one of those before: holes in the memory
            even = 2 * number - 8
            store.drop(Drop((even,), (even,), (10 * even + 1, 10 * even + 3)))
        keep(world, number, number % 3)
        if world.cache.sizes.windowed:
            store.keep_sink(number, number % 3)
        pages = rng.sample(range(16), 5)
        store.keep_pages([(page, 10 * number + i) for i, page in enumerate(pages)])
        went[number] = [of_slot(world, number % 3), world.runner.kv.store.read_pages(pages)]
    scramble(world, 99)
    for number in (1, 3, 5, 7):
        slot, pages = (number + 1) % 3, rng.sample(range(16), 4)
        load = RestoreCheckpoint(slot, number, POSITION, sink_of(world, number))
        execute(world, load, PromotePages(tuple((10 * number + 1 + i, page) for i, page in enumerate(pages))))
        assert all_equal(of_slot(world, slot), went[number][0])
        assert all_equal(world.runner.kv.store.read_pages(pages), [pages[:, 1:] for pages in went[number][1]])


def test_a_slot_that_is_given_again_before_its_load_has_come_is_reset(world):
    keep(world, 1, 0)
    execute(world, RestoreCheckpoint(0, 1, POSITION, None), ResetSlot(0))
    world.runner.store._side.finish()
    assert not torch.count_nonzero(world.runner.states.state_LSVKD[:, 0])


def test_pages_that_are_demoted_as_soon_as_they_were_promoted_hold_what_was_promoted(world):
    before = world.runner.kv.store.read_pages([3])
    execute(world, DemotePages(((3, 1),)))
    scramble(world, 5)
    execute(world, PromotePages(((1, 4),)), DemotePages(((4, 2),)), Drop(host_pages=(1,)), PromotePages(((2, 9),)))
    assert all_equal(world.runner.kv.store.read_pages([9]), before)


def test_what_is_kept_again_under_a_dropped_name_is_the_later_content(world):
    for seed in (1, 2):
        scramble(world, seed)
        wanted = of_slot(world, 0)
        world.runner.store.drop(Drop(checkpoints=(7,)))
        keep(world, 7, 0)
    execute(world, RestoreCheckpoint(1, 7, POSITION, None))
    assert all_equal(of_slot(world, 1)[:3], wanted[:3])


def test_all_blocks_are_free_when_all_is_dropped(world):
    for number in range(3):
        keep(world, number, 0)
    world.runner.store.keep_pages([(page, page) for page in range(16)])
    assert world.runner.store.bytes() == 3 * world.cache.sizes.checkpoint_bytes + 16 * world.cache.sizes.page_bytes
    world.runner.store.drop(Drop((0, 1, 2), (), tuple(range(16))))
    assert world.runner.store.bytes() == 0


def test_a_prompt_that_was_left_half_computed_comes_back_late_and_whole(tiny_model, monkeypatch):
    """Its slot is saved by the step in which another request gets the slot; the other takes its pages as well."""
    world, prompt = build(tiny_model, "int2", monkeypatch), tokens_of(7, 900)
    cold = world.one(replace(ask("cold", prompt), cache=False))
    world.engine.submit(ask("left", prompt))
    for _ in range(6):
        world.engine.step()
    world.engine.abort("left")
    world.one(ask("other", tokens_of(8, 500)))
    assert world.cache.counters["pages_demoted"] > 0
    warm = world.one(ask("warm", prompt))
    assert warm.finished.usage.cached_tokens == 768 and warm.tokens == cold.tokens


@pytest.mark.parametrize("slot", [0, 1])
def test_decode_waits_for_a_load_into_its_own_slot_only(tiny_model, monkeypatch, slot):
    """A prompt goes on from a checkpoint beside a row that decodes: the replay is queued before the copies are waited
    for."""
    world = build(tiny_model, "int2", monkeypatch)
    (replay, *_), side = with_graphs(world), world.runner.store._side
    keep(world, 1, 0)
    side.finish()
    seen, original = [], replay.replay
    replay.replay = lambda: seen.append(side.queued - side._done) or original()
    chosen = Sampling(max_tokens=9, seed=1, temperature=0.0)
    decode = Segment("d", slot, (5,), POSITION, 0, tuple(range(6)), sampled=1)
    prefill = Segment("p", 1, (5,) * 7, POSITION, 0, tuple(range(6, 12)), sampled=1)
    given = {
        row.request_id: SamplingInput(row.request_id, chosen, (5,) * row.end, row.end) for row in (decode, prefill)
    }
    load = RestoreCheckpoint(1, 1, POSITION, None)
    result = world.runner.execute(StepPlan(1, (load,), (decode,), (prefill,)), given)
    assert seen[0] == (1 if slot == 0 else 0)
    assert not any(row.error for row in result.rows) and side.queued == side._done


def test_without_pinned_memory_the_store_says_so_and_goes_on(tiny_model, monkeypatch, caplog):
    plan = tiny_plan(tiny_model)
    monkeypatch.setattr(store_sizes, "SEGMENT_BYTES", 7 * plan.page_bytes)
    given, told = [], []

    def empty(size, dtype, pin_memory=False):
        given.append(pin_memory)
        if pin_memory and len(given) > 2:
            raise RuntimeError("CUDA error: out of memory\nFor debugging consider this and that.")
        return torch.empty(size, dtype=dtype)

    fake = SimpleNamespace(empty=empty, cuda=SimpleNamespace(is_available=lambda: True), uint8=torch.uint8)
    monkeypatch.setattr(pinned_store, "torch", fake)
    sizes = StoreSizes.of_plan(replace(plan, target=CUDA, host_cache=40 * plan.page_bytes))
    segments = pinned_segments(sizes, lambda *numbers: told.append(numbers))
    assert given == [True, True, True, False, False, False, False]
    assert [segment.numel() // sizes.block for segment in segments] == [7, 7, 7, 7, 7, 5]
    assert told == [(i + 1, 6) for i in range(6)]
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    megabytes = [number * sizes.block // 10**6 for number in (26, 40)]
    assert f"{megabytes[0]} of {megabytes[1]} MB" in record.message and "--host-cache" in record.message
    assert "(CUDA error: out of memory):" in record.message and "\n" not in record.message


def test_checkpoints_fit_into_their_blocks(tiny_model):
    for codec in CODECS:
        world = World.build(tiny_model, codec, pages=16, slots=3)
        with_late_store(world, tiny_plan(tiny_model, codec, pages=16, slots=3))
        for place in world.runner.store._places:
            ends = [t.storage_offset() * t.element_size() + t.nbytes for t in place.checkpoint.parts.values()]
            assert max(ends) <= world.runner.store._sizes.checkpoint * world.runner.store._sizes.block


def test_records_go_elsewhere_and_come_back_under_other_ids_with_their_bytes(world):
    """As to a disk: what was just sent has arrived, and blocks that were given back are not written by both."""
    store, kv = world.runner.store, world.runner.kv.store
    keep(world, 1, 0)
    store.keep_pages([(3, 31), (4, 32)])
    gone = [_record("checkpoint", 1), _record("page", 31), _record("page", 32), _record("page", 5, on_device=True)]
    if world.cache.sizes.windowed:
        store.keep_sink(1, 0)
        gone.append(_record("sink", 1))
    went = [of_slot(world, 0), kv.read_pages([3, 4, 5])]
    copies = store.copies(gone)
    store.drop(Drop((1,), (1,), (31, 32)))
    scramble(world, 9)
    back = [_record("page" if r.kind == "page" else r.kind, 50 + i) for i, r in enumerate(gone)]
    for place, copy in zip(store.places(back), copies, strict=True):
        assert [len(part) for part in place] and sum(map(len, place)) == sum(map(len, copy))
        _fill(place, b"".join(copy))
    sink = 54 if world.cache.sizes.windowed else None
    execute(world, RestoreCheckpoint(1, 50, POSITION, sink), PromotePages(((51, 8), (52, 9), (53, 10))))
    assert all_equal(of_slot(world, 1), went[0]) and all_equal(kv.read_pages([8, 9, 10]), went[1])


def _record(kind: str, number: int, on_device: bool = False) -> DiskRecord:
    return DiskRecord(kind, number, b"k" * 16, b"p" * 16, bytes(256), POSITION, on_device)


def _fill(place, data: bytes) -> None:
    for part in place:
        part[:], data = data[: len(part)], data[len(part) :]
