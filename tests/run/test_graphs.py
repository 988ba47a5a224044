"""Decode by replays that run ahead of the host gives what launch by launch does, whatever ends or comes meanwhile."""

from __future__ import annotations

import random

import pytest
import torch
from graph_stand_in import fake_capture, with_graphs, worlds
from msgspec.structs import replace
from run_world import World, ask, tokens_of

from kakera.contract.request import NO_LIMIT
from kakera.contract.step import Segment
from kakera.run.choose import chooser
from kakera.run.store.host import HostStore
from kakera.schedule.ahead import followers


def drive(world: World, seed: int, slow: bool = False) -> dict[str, tuple[list[int], str]]:
    """Requests that come, stop, are cut off and begin where others ended, by the steps of a clock that both worlds
    share; each one's tokens and why it ended. `slow`: half of the readers take five tokens every seven steps."""
    rng = random.Random(seed)
    told: dict[str, list[int]] = {}
    ended: dict[str, str] = {}
    waiting = [
        (
            rng.randrange(60),
            ask(
                f"r{i}",
                tokens_of(rng.randrange(3), rng.choice([1, 40, 63, 64, 130, 200])) + tokens_of(100 + i, 3),
                rng.choice([1, 2, 30, 90]),
                temperature=rng.choice([0.0, 1.0]),
                top_k=rng.choice([0, 5]),
                repetition_penalty=rng.choice([1.0, 1.3]),
                stop_token_ids=(rng.randrange(256),),
            ),
        )
        for i in range(10)
    ]
    aborts = {rng.randrange(20, 120): f"r{rng.randrange(10)}" for _ in range(3)}
    for step in range(2000):
        for when, request in waiting:
            if when == step:
                world.engine.submit(request, 3 if slow and when % 2 else NO_LIMIT)
            elif when < step and step % 7 == 0:
                world.engine.allow(request.id, len(told.get(request.id, ())) + 5)
        if step in aborts:
            world.engine.abort(aborts[step])
        for event in world.engine.step():
            if hasattr(event, "tokens"):
                told.setdefault(event.request_id, []).extend(event.tokens)
            elif hasattr(event, "reason"):
                ended[event.request_id] = event.reason
        if step > 60 and len(ended) == len(waiting):
            return {name: (told.get(name, []), ended[name]) for name in sorted(ended)}
    raise AssertionError(f"not all ended: {ended}")


@pytest.mark.parametrize("changes", [{}, {"pages": 14, "slots": 3}], ids=["roomy", "crowded"])
def test_what_runs_ahead_changes_no_answer(tiny_model, changes):
    plain, replayed, made = worlds(tiny_model, **changes)
    assert drive(replayed, seed=1) == drive(plain, seed=1)
    assert sum(one.replays for one in made) > 40
    assert isinstance(replayed.runner.store, HostStore)
    assert replayed.engine.stats().counters.get("preemptions", 0) == plain.engine.stats().counters.get("preemptions", 0)


@pytest.mark.parametrize("changes", [{}, {"pages": 14, "slots": 3}], ids=["roomy", "crowded"])
def test_readers_that_lag_change_no_answer_and_others_still_run_ahead(tiny_model, changes):
    plain, replayed, made = worlds(tiny_model, **changes)
    assert drive(replayed, seed=2, slow=True) == drive(plain, seed=2, slow=True)
    assert sum(one.replays for one in made) > 40
    replayed.check_idle()


def test_the_others_run_ahead_of_a_row_that_the_next_step_leaves_out(tiny_model):
    world = World.build(tiny_model)
    one, _, _, _ = made = with_graphs(world, 4)
    world.engine.submit(ask("slow", tokens_of(1, 70), 40), 6)
    world.engine.submit(ask("quick", tokens_of(2, 70), 40))
    while (stats := world.engine.stats()).paused == 0:
        world.engine.step()
    replays, steps = one.replays, stats.steps
    for _ in range(10):
        world.engine.step()
    assert world.engine.stats().steps - steps == 10 and one.replays - replays == 10, (
        "each was let ahead by the one before"
    )
    slot = world.engine.scheduler.running.get("slow").lease.slot
    assert sum(each.replays for each in made) < 40 and world.engine.runner.graphs._ahead
    assert all(key[1] != slot for key in world.engine.runner.graphs._ahead)


def test_a_second_turn_continues_what_ran_ahead_of_its_end(tiny_model):
    plain, replayed, _ = worlds(tiny_model)
    texts = []
    for world in (plain, replayed):
        first = world.one(ask("a", tokens_of(1, 150), 80))
        second = world.one(ask("b", (*tokens_of(1, 150), *first.tokens, *tokens_of(2, 20)), 40))
        assert second.finished.usage.cached_tokens >= 192
        texts.append((first.tokens, second.tokens))
    assert texts[0] == texts[1]


def test_an_id_that_comes_back_reads_its_own_pages(tiny_model):
    """As many as before, in the same slot, and others: two requests of one name, one behind the other."""
    texts = []
    for world, graphs in ((World.build(tiny_model, "fp32"), False), (World.build(tiny_model, "fp32"), True)):
        if graphs:
            with_graphs(world)
        texts.append([world.one(ask("same", tokens_of(seed, 70), 40)).tokens for seed in (1, 2, 3)])
    assert texts[0] == texts[1]


def test_the_next_step_is_launched_before_the_host_has_the_tokens(tiny_model, monkeypatch):
    """But not behind the last token of all, nor where the next one has no page yet."""
    world = World.build(tiny_model)
    made = with_graphs(world)
    before: list[int] = []
    collect = chooser.collect
    monkeypatch.setattr(chooser, "collect", lambda launched: before.append(made[0].replays) or collect(launched))
    world.one(ask("a", tokens_of(1, 60), 8))
    # position 60 is computed in its turn, 61 .. 63 ahead; 64 needs a page; 65, 66 ahead; the eighth token ends it
    assert before == [0, 2, 3, 4, 4, 6, 7, 7]
    assert made[0].replays == 7


def test_graphs_of_all_sizes_leave_their_outputs_in_one_place(tiny_model, monkeypatch):
    """32 graphs with outputs of their own would hold 524 MB of logits of the 27B."""
    world = World.build(tiny_model)
    with_graphs(world)
    fake_capture(monkeypatch)
    told: list[tuple[int, int]] = []
    world.runner.graphs.capture(world.runner.model, lambda done, total: told.append((done, total)))
    assert told == [(done, 8) for done in range(1, 9)] and world.runner.graphs.rows == 8
    outputs = [captured.outputs for captured in world.runner.graphs._captured]
    assert [len(each.hidden_RH) for each in outputs] == [len(each.logits_RV) for each in outputs] == list(range(1, 9))
    assert len({each.logits_RV.data_ptr() for each in outputs} | {each.hidden_RH.data_ptr() for each in outputs}) == 2
    assert all(each.logits_RV.is_contiguous() and bool(each.logits_RV.isfinite().all()) for each in outputs)
    assert torch.equal(outputs[0].logits_RV[0], outputs[7].logits_RV[0])


@pytest.mark.parametrize("most", [8, 2], ids=["a graph for all", "of three rows none"])
def test_rows_that_pause_or_join_are_computed_once(tiny_model, monkeypatch, most):
    """Some ran ahead, others are computed beside them, by a replay or launch by launch."""
    plain, replayed = (World.build(tiny_model) for _ in range(2))
    made = with_graphs(replayed, most)
    requests = [ask(f"r{i}", tokens_of(i, 20 + 9 * i), 60) for i in range(3)]
    wanted = [one.tokens for one in plain.answer(*requests)]
    rng, scheduler, paused = random.Random(3), replayed.engine.scheduler, set()
    all_of, joined = scheduler._decoding, []

    def decoding():
        paused.clear()
        paused.update(s.id for s in all_of() if rng.random() < 0.2)
        chosen = [s for s in all_of() if s.ahead or s.id not in paused] or all_of()
        joined.append(len({s.ahead for s in chosen}) == 2)
        return chosen

    scheduler._decoding = decoding
    monkeypatch.setattr("kakera.schedule.scheduler.followers", lambda rows, last: followers(rows, {*last, *paused}))
    assert [one.tokens for one in replayed.answer(*requests)] == wanted
    assert sum(joined) > 5 and sum(one.replays for one in made) > 20
    replayed.check_idle()


def test_rows_that_were_left_out_of_the_next_plan_are_void_and_fail_nobody(tiny_model):
    world = World.build(tiny_model)
    (one, *_), graphs = with_graphs(world), world.runner.graphs
    rows = [Segment(name, slot, (5,), 20, 0, (slot,), sampled=1) for slot, name in enumerate("ab")]
    world.runner.tables.update(rows)
    graphs.outputs(rows)
    graphs.run_ahead(rows, [0, 1], torch.tensor([3, 4]))
    found, outputs = graphs.outputs([replace(rows[1], start=21)])
    assert found == [replace(rows[1], start=21)] and len(outputs.logits_RV) == 1 and one.replays == 0
    assert graphs.outputs([replace(rows[0], start=21)])[1] is not None and one.replays == 1
