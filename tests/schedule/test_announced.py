"""What the cache announces over random traffic: a subscriber's index credits no less and no more than what is a hit."""

from __future__ import annotations

import random

import pytest
from driver import Driver, prose
from fake_disk import FakeDisk
from hypothesis import given, settings
from hypothesis import strategies as st
from test_fuzz import conversation_prompt, play

from kakera.cache.announced import Announced
from kakera.cache.keys import page_keys
from kakera.contract.cached import AllRemoved, CacheEvent, PagesRemoved, PagesStored
from kakera.contract.grid import PAGE

PAGE_BYTES = 4 * PAGE


class Router:
    """Rebuilds the index as routers do: it looks at the tokens of events, and takes hashes for names."""

    def __init__(self) -> None:
        self.pages: dict[tuple[bytes | None, bytes], bytes] = {}  # (parent, tokens) -> hash
        self.places: dict[bytes, set[str]] = {}

    def hear(self, event: CacheEvent) -> None:
        match event:
            case AllRemoved():
                self.__init__()
            case PagesRemoved(hashes, medium):
                for name in hashes:
                    self.places[name].remove(medium)
                    if not self.places[name]:
                        del self.places[name]
                        self.pages = {key: value for key, value in self.pages.items() if value != name}
            case PagesStored(hashes, parent, tokens, medium):
                assert parent is None or parent in self.places, "unanchored"
                for i, name in enumerate(hashes):
                    self.pages[parent, tokens[i * PAGE_BYTES : (i + 1) * PAGE_BYTES]] = name
                    assert medium not in self.places.setdefault(name, set()), "stored twice"
                    self.places[name].add(medium)
                    parent = name

    def credit(self, prompt: tuple[int, ...]) -> int:
        """Tokens of the longest prefix that is there."""
        parent, count = None, 0
        for key in page_keys(prompt):
            parent = self.pages.get((parent, key.tokens))
            if parent is None:
                break
            count += PAGE
        return count


class Watch:
    """Compares the index with the cache after each step, or, if `rarely`, whenever the publisher had room."""

    def __init__(self, seed: int, rarely: bool = False) -> None:
        self.router, self.rng, self.rarely = Router(), random.Random(seed), rarely
        self.announced: Announced | None = None
        self.compared = self.leaves = 0

    def __call__(self, driver: Driver) -> None:
        if self.announced is None:
            self.announced = driver.cache.announce()
        if self.rng.random() < 0.02:
            self.announced.again()
        if self.rarely and self.rng.random() < 0.9:
            return
        for event in self.announced.take():
            self.router.hear(event)
        self.compare(driver)

    def compare(self, driver: Driver) -> None:
        cache, router = driver.cache, self.router
        prompt, _ = conversation_prompt(self.rng)
        credit, hit = router.credit(prompt), cache.match(page_keys(prompt), len(prompt)).position
        assert credit >= hit, "a hit that no router knows of"
        self.compared += hit > 0
        stems = {parent for parent, _ in router.pages}
        ends = [node for node in cache.tree.nodes() if node.key.hash in router.places.keys() - stems]
        assert len(ends) == len(router.places.keys() - stems), "a page that is gone"
        for end in ends:
            keys, node = [], end
            while node.depth:
                assert router.places[node.key.hash] == {"CPU" if node.device is None else "GPU"}
                keys.append(node.key)
                node = node.parent
            hit = cache.match(keys[::-1], end.depth * PAGE + 1).position
            assert hit == end.depth * PAGE, "credit for what can not be resumed"
            self.leaves += 1


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    pages=st.sampled_from([8, 12, 20, 60]),
    slots=st.sampled_from([1, 2, 5]),
    host=st.sampled_from([0, 0.5, 1.2, 2.5, 6, 40]),
    windowed=st.booleans(),
    disk=st.booleans(),
    rarely=st.booleans(),
)
def test_what_is_announced_is_what_can_be_hit(seed, pages, slots, host, windowed, disk, rarely):
    watch = Watch(seed, rarely)
    play(seed, pages, slots, host, windowed, steps=80, disk=FakeDisk(seed) if disk else None, watch=watch)


@pytest.mark.slow
def test_the_traffic_does_hit_move_and_lose_what_is_announced():
    watch = Watch(5)
    driver = play(5, pages=20, slots=5, host=6, windowed=True, steps=200, mishaps=0.01, watch=watch)
    assert watch.compared > 20 and watch.leaves > 100
    assert driver.cache.counters["pages_demoted"] and driver.cache.counters["checkpoints_evicted"]


def test_a_path_is_one_event_and_pages_without_a_checkpoint_are_none():
    driver = Driver()
    announced = driver.cache.announce()
    prompt = prose(5 * PAGE + 3, seed=1)
    driver.submit(prompt, max_tokens=1)
    driver.run()
    [event] = announced.take()
    assert isinstance(event, PagesStored) and (event.parent, event.medium) == (None, "GPU")
    depth = driver.cache.match(page_keys(prompt), len(prompt)).position // PAGE
    assert list(event.hashes) == [key.hash for key in page_keys(prompt)][:depth]
    driver.submit(prose(3 * PAGE, seed=2), max_tokens=1, cache=False)
    driver.submit(prompt, max_tokens=1, salt=b"of somebody else")
    driver.run()
    assert announced.take() == []
    driver.flush()
    assert announced.take() == [PagesRemoved(event.hashes[::-1], "GPU")]
