"""Records on their way to the host, copied as late as may be: each arrives as it was sent, and errors go to the right
one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from graph_stand_in import with_late_offload
from run_world import World, tiny_plan

from kakera.kv.cache import KVCache
from kakera.plan.kv_format import KvFormat
from kakera.run.store import CheckpointShape, tensors_of
from kakera.schedule.step import Drop, StepPlan


@pytest.fixture
def world(tiny_model, monkeypatch):
    world = World.build(tiny_model)
    with_late_offload(world, monkeypatch)
    return world


def fill(tensors, value: float) -> None:
    for tensor in tensors_of(tensors):
        tensor.fill_(value)


def send(world: World, number: int) -> None:
    staged = world.runner.offload.stage(64 * number)
    fill(staged, number)
    world.runner.offload.send_checkpoint(number, staged)


def test_places_are_filled_again_only_behind_their_copy(world):
    for number in range(7):
        send(world, number)
    world.runner.offload.wait_for("checkpoint", range(7))
    kept = world.runner.store.checkpoints
    assert [kept[number].position for number in range(7)] == [64 * number for number in range(7)]
    assert all(bool((tensor == number).all()) for number in range(7) for tensor in tensors_of(kept[number]))


def test_a_dropped_record_does_not_come_back_when_its_copy_is_late(world):
    send(world, 1)
    world.runner.execute(StepPlan(1, (Drop((1,)),)))
    world.runner.offload._thread.finish()
    assert not world.runner.store.checkpoints


def test_an_id_that_is_given_again_holds_the_later_content(world):
    offload, store = world.runner.offload, world.runner.store
    for value in (1.0, 2.0):
        offload.send_pages([5], lambda first, end, value=value: (torch.full((1, end - first, 3), value),))
        if value == 1.0:
            world.runner.execute(StepPlan(1, (Drop(host_pages=(5,)),)))
    offload.wait_for("page", [5])
    assert store.pages[5][0].tolist() == [[2.0] * 3]


def test_a_copy_that_fails_is_told_to_who_wants_it_and_to_nobody_else(world, monkeypatch):
    keep = world.runner.store.keep_checkpoint

    def fails(checkpoint, tensors):
        if checkpoint == 0:
            raise MemoryError("no memory on the host")
        keep(checkpoint, tensors)

    monkeypatch.setattr(world.runner.store, "keep_checkpoint", fails)
    for number in range(6):  # the places of the failed one serve again
        send(world, number)
    with pytest.raises(MemoryError, match="no memory on the host"):
        world.runner.offload.wait_for("checkpoint", [0])
    world.runner.offload.wait_for("checkpoint", range(1, 6))
    assert sorted(world.runner.store.checkpoints) == [1, 2, 3, 4, 5]


def test_dropping_what_could_not_be_kept_ends_nothing(world, monkeypatch):
    def fails(*_):
        raise MemoryError("no memory on the host")

    monkeypatch.setattr(world.runner.store, "keep_checkpoint", fails)
    send(world, 3)
    assert world.runner.execute(StepPlan(1, (Drop((3,)),))).rows == ()


@pytest.mark.parametrize("codec", ["bf16", "int2"])
def test_pages_larger_than_a_checkpoint_go_through(tiny_model, monkeypatch, codec):
    """As for a model without Gated DeltaNet over exact pages: its checkpoint is a hidden state."""
    world = World.build(tiny_model)
    bare = replace(tiny_plan(tiny_model).spec, gdn=None, layers=("full",) * 4)
    fmt = KvFormat(codec, group=32, window_pages=1)
    kv = KVCache(bare, fmt, pages=8, slots=1)
    for tensor in kv._pool.tensors():
        tensor.copy_(torch.randint(0, 200, tensor.shape))
    if kv._recent is not None:
        kv._recent.sink.normal_()
    world.runner.shape = CheckpointShape(bare, fmt, torch.float16, torch.bfloat16, torch.device("cpu"))
    with_late_offload(world, monkeypatch)
    offload, ids = world.runner.offload, [7, 2, 5, 0, 1]
    offload.send_pages(range(5), lambda first, end: kv.read_pages(ids[first:end]))
    offload.send_sink(9, kv.save_sink(0))
    offload.wait_for("page", range(5))
    offload.wait_for("sink", [9])
    found = world.runner.store.read_pages(range(5))
    assert all(torch.equal(a, b) for a, b in zip(found, kv.read_pages(ids), strict=True))
    assert torch.equal(world.runner.store.sinks[9], kv.save_sink(0))
