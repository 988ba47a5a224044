"""A card that gets fuller under the real engine: a driver that is not there, a program that takes memory and gives it
back. Same texts, pages that are really given back, words in the log once a change."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
from run_world import World, ask, tokens_of

from fake_card import FakeCard
from kakera.errors import RequestRefused
from kakera.run import build, card_watch
from kakera.run.generate import generate


@pytest.fixture
def card(monkeypatch) -> FakeCard:
    """The engine's pages are 1.5 KB a token there, in chunks of 4 KiB, and the margin is a fraction of them."""
    card = FakeCard()
    monkeypatch.setattr("kakera.plan.page_pool.GRANULE", card.granularity)
    monkeypatch.setattr(build, "mapper_for", lambda target: card)
    monkeypatch.setattr(build, "free_bytes", card.free)
    monkeypatch.setattr(build, "LEAST_TOKENS", 512)
    monkeypatch.setattr(card_watch, "LOOK_SECONDS", 0.0)
    return card


def build_world(model, card: FakeCard, **changes) -> World:
    world = World.build(model, pages=64, slots=4, **changes)
    assert card.used >= world.runner.kv.store.bytes().pages
    card.filled()
    watch = world.engine.card
    watch._clock, watch._rule = card.clock, replace(watch._rule, margin=card.margin)
    return world


@pytest.mark.parametrize("kv", ["int2", "bf16"])
def test_a_program_that_takes_memory_in_mid_run_harms_nobody(tiny_model, card, kv, caplog):
    caplog.set_level(logging.WARNING, card_watch.__name__)
    quiet = World.build(tiny_model, kv, pages=64, slots=4)
    requests = [ask(f"r{i}", tokens_of(i, 300 + 400 * i), max_tokens=20) for i in range(3)]
    texts = {request.id: quiet.one(request).tokens for request in requests}

    world = build_world(tiny_model, card, kv=kv)
    whole, step = card.used, 0

    def on_event(event) -> None:
        nonlocal step
        step += 1
        card.seconds += 1.0
        card.others = {6: card.margin * 3 // 4, 12: 10 * card.margin, 40: 0}.get(step, card.others)

    done = generate(world.engine, requests, on_event)
    assert {name: one.tokens for name, one in done.items()} == texts
    assert card.least_used < whole, "memory went back while they ran"
    card.others = 0
    for _ in range(30):
        card.seconds += 1.0
        world.engine.step()
    assert card.used == whole and world.engine.stats().pages_lent == 0
    said = [record.message for record in caplog.records]
    assert "given back until it is free again" in said[0] and said[-1].endswith("all 64 KV pages are in use again")
    assert len(said) == len(set(said)) <= 12, said
    world.check_idle()
    again = world.one(ask("again", requests[1].tokens, max_tokens=20))
    assert again.tokens == texts["r1"] and again.finished.usage.cached_tokens > 600, "a hit on pages that have moved"


def test_cached_conversations_go_to_the_host_and_are_hit_from_there(tiny_model, card):
    world = build_world(tiny_model, card)
    prompt = tokens_of(1, 1500)
    cold = world.one(ask("cold", prompt, boundaries=(1400,)))
    card.others = 10 * card.margin
    world.engine.step()
    stats = world.engine.stats()
    assert stats.pages_lent == 56 and stats.pages_cached <= 8 and stats.host_bytes["page"] > 0
    reads = world.engine.sweep()
    assert all(read.region != "KV pages" or read.bytes for read in reads), "what is away is not read"
    world.engine.submit(ask("waits", prompt + tokens_of(2, 100)))
    for _ in range(5):
        assert not world.engine.step()
    assert world.engine.stats().held_back == 1 and world.engine.stats().idle
    short = world.one(ask("short", tokens_of(3, 100)))
    assert len(short.tokens) == 4, "whoever fits passes"
    card.others = 0
    events = []
    for _ in range(60):
        card.seconds += 1.0
        events += world.engine.step()
    (finished,) = [event for event in events if hasattr(event, "usage")]
    assert finished.usage.cached_tokens >= 1344 and finished.request_id == "waits"
    assert world.one(ask("warm", prompt, boundaries=(1400,))).tokens == cold.tokens
    world.check_idle()


def test_looks_are_seldom_and_a_driver_that_has_no_more_is_asked_again(tiny_model, card, monkeypatch):
    monkeypatch.setattr(card_watch, "LOOK_SECONDS", 0.5)
    world = build_world(tiny_model, card)
    card.looks = 0
    for _ in range(100):
        card.seconds += 0.01
        world.engine.step()
    assert card.looks <= 3
    card.others, card.seconds = 10 * card.margin, card.seconds + 1
    world.engine.step()
    assert world.engine.stats().pages_lent == 56 and world.engine.stats().slots_lent == 3
    card.others, room = 0, card.room
    monkeypatch.setattr(card, "free", lambda: room)  # it was free a moment ago, and somebody was faster
    card.room = card.used
    for _ in range(30):
        card.seconds += 1.0
        world.engine.step()
    assert world.engine.stats().pages_lent == 56
    card.room = room
    for _ in range(15):
        card.seconds += 1.0
        world.engine.step()
    assert world.engine.stats().pages_lent == world.engine.stats().slots_lent == 0


@pytest.mark.parametrize("lent", [False, True])
def test_an_engine_that_sleeps_has_no_pages_and_wakes_with_those_that_it_had(tiny_model, card, lent):
    world = build_world(tiny_model, card)
    prompt = tokens_of(1, 400)
    cold = world.one(ask("cold", prompt, boundaries=(384,)))
    card.others = 10 * card.margin if lent else 0
    world.engine.step()
    before, pages = card.used, world.engine.stats().pages_lent
    assert (pages == 56) is lent
    world.engine.sleep(2)
    assert card.used == 0
    for _ in range(30):
        card.seconds += 1.0
        world.engine.step()
    assert card.used == 0, "asleep nobody takes pages back"
    room, card.room = card.room, card.granularity
    with pytest.raises(RequestRefused, match="no room for the KV pages"):
        world.engine.wake_up()
    assert card.used == 0 and world.engine.asleep
    card.room = room
    world.engine.wake_up()
    assert card.used == before and world.engine.stats().pages_lent == pages
    warm = world.one(ask("warm", prompt, boundaries=(384,)))
    assert warm.tokens == cold.tokens and warm.finished.usage.cached_tokens == 384
    card.others = 0
    for _ in range(30):
        card.seconds += 1.0
        world.engine.step()
    world.check_idle()
