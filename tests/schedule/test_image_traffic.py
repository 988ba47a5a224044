"""Random traffic with images on tiny pools: what pages, states and checkpoints hold is told apart by image, a row has
the embeddings and positions that it needs, and an answer is that of a request alone."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from driver import Driver, answer, message_ends, prose
from fake_runner import FakeRunner, Prefix
from hypothesis import given, settings
from hypothesis import strategies as st

from kakera.contract.images import ImageSpan, rope_positions
from kakera.contract.request import Request, Sampling
from kakera.contract.step import Action, EncodeImage, ForgetImages, RowResult, SamplingInput, Segment, StepPlan

PAD, START, END = 900_001, 900_002, 900_003
SIZES = [(1, 1), (3, 5), (8, 8), (11, 30)]  # tokens: 1, 15, 64, 330


def picture(number: int) -> ImageSpan:
    rows, columns = SIZES[number % len(SIZES)]
    return ImageSpan(0, rows, columns, number.to_bytes(32, "big"), b"pixels")


def meant(tokens: Prefix, images: list[tuple[int, int, int, bytes]]) -> Prefix:
    """Tokens whose ids say nothing as what they stand for: (place, first, count, digest) of each image."""
    found = list(tokens)
    for place, first, count, digest in images:
        assert set(found[place : place + count]) == {PAD}
        found[place : place + count] = [-(int.from_bytes(digest, "big") * 1000 + first + i + 1) for i in range(count)]
    return tuple(found)


def meant_of(tokens: Prefix, request: Request) -> Prefix:
    return meant(tokens, [(image.start, 0, image.tokens, image.digest) for image in request.images])


class SeeingRunner(FakeRunner):
    driver: Driver

    def apply(self, action: Action) -> None:
        match action:
            case EncodeImage(digest, rows, columns, pixels):
                assert digest not in self.images, "encoded again while it is kept"
                assert (rows, columns) == SIZES[digest[-1] % len(SIZES)] and pixels
                self.images.add(digest)
            case ForgetImages(digests):
                assert self.images.issuperset(digests)
                self.images.difference_update(digests)
            case _:
                super().apply(action)

    def run(self, row: Segment, given: SamplingInput | None) -> RowResult:
        request = self.driver.scheduler.running.get(row.request_id).request
        assert all(part.digest in self.images for part in row.images), "a row without its embeddings"
        assert row.positions == rope_positions(request.images, row.start, row.end)
        parts = [(part.row, part.first, part.count, part.digest) for part in row.images]
        tokens = meant(row.tokens, parts)
        assert PAD not in tokens, "tokens of an image that no part of the row names"
        if given is not None:
            given = replace(given, context=meant_of(tuple(given.context), request))
        return super().run(
            Segment(*(tokens if n == "tokens" else getattr(row, n) for n in row.__struct_fields__)), given
        )

    @staticmethod
    def prefix_of(node) -> Prefix:
        pages = []
        while node.parent is not None:
            tokens, beside = tuple(memoryview(node.key.tokens).cast("i")), node.key.beside
            parts, place = [], 0
            for at in range(0, len(beside), 36):
                digest, first = beside[at : at + 32], int.from_bytes(beside[at + 32 : at + 36], "big")
                place = tokens.index(PAD, place)
                rows, columns = SIZES[digest[-1] % len(SIZES)]
                count = min(rows * columns - first, len(tokens) - place)
                parts.append((place, first, count, digest))
                place += count
            pages.append(meant(tokens, parts))
            assert PAD not in pages[-1], "an image that the key does not name"
            node = node.parent
        return tuple(token for page in reversed(pages) for token in page)


class SeeingDriver(Driver):
    def __init__(self, kept: int, **sizes):
        super().__init__(**sizes)
        self.runner = SeeingRunner(self.cache, self.context_of)
        self.runner.driver, self.runner.images = self, set()
        self.scheduler.embeddings.limit = kept
        self.requests: dict[str, Request] = {}

    def context_of(self, request_id: str) -> Prefix:
        return meant_of(super().context_of(request_id), self.requests[request_id])

    def look(self, parts: list[Prefix | ImageSpan], max_tokens: int) -> str:
        tokens, images, ends = [], [], []
        for part in parts:
            if isinstance(part, ImageSpan):
                images.append(replace(part, start=len(tokens) + 1))
                tokens += [START, *[PAD] * part.tokens, END]
            else:
                tokens += part
            ends.append(len(tokens))
        self._serial += 1
        request = Request(f"r{self._serial}", tuple(tokens), Sampling(max_tokens, seed=1), tuple(message_ends(*ends)))
        self.requests[request.id] = replace(request, images=tuple(images))
        self.scheduler.submit(self.requests[request.id])
        return request.id

    def check(self) -> None:
        kept = self.scheduler.embeddings
        assert set(kept._kept) | set(kept._broken) == self.runner.images


def play(seed: int, pages: int, slots: int, host: float, kept: int, steps: int = 60) -> SeeingDriver:
    rng = random.Random(seed)
    driver = SeeingDriver(kept, pages=pages, slots=slots, host=host, chunk=rng.choice([64, 128, 512]))
    for _ in range(steps):
        if rng.random() < 0.35:
            parts: list[Prefix | ImageSpan] = [prose(rng.choice([3, 64, 130]), seed=rng.randrange(2))]
            for turn in range(rng.randrange(1, 4)):
                parts.append(picture(rng.randrange(8)) if rng.random() < 0.7 else prose(40, seed=5 + turn))
            driver.look([*parts, prose(rng.choice([1, 30]), seed=9)], rng.choice([1, 5, 100]))
        live = [name for name in driver.requests if name not in driver.finished]
        if live and rng.random() < 0.05:
            driver.runner.failing.add(rng.choice(live))
        if live and rng.random() < 0.05:
            driver.scheduler.abort(rng.choice(live))
        if rng.random() < 0.02:
            driver.flush()
        driver.step()
        driver.check()
    driver.run()
    for name, request in driver.requests.items():
        prompt = meant_of(tuple(request.tokens), request)
        right = answer(prompt, request.sampling.max_tokens)
        got = driver.text[name]
        assert got == right[: len(got)], "an answer to another picture"
    driver.assert_idle_is_clean()
    return driver


@pytest.mark.slow
def test_some_traffic_hits_fails_and_encodes_again():
    drivers = [play(seed, 40, 3, 20, 400) for seed in range(4)]
    counters = [driver.cache.counters for driver in drivers]
    for name in ("checkpoints_restored", "images_encoded", "finished: error", "finished: length"):
        assert sum(each[name] for each in counters) > 2, name
    prompts = [image for driver in drivers for request in driver.requests.values() for image in request.images]
    assert sum(each["images_encoded"] for each in counters) < len(prompts)


def test_the_time_of_a_tower_is_none_of_prompts():
    """Else a prompt behind an image would be read page by page, and a card would be said to be spilling."""
    driver = SeeingDriver(10_000, pages=60)

    def encodes(plan: StepPlan) -> bool:
        return any(isinstance(action, EncodeImage) for action in plan.before)

    driver.runner.seconds = lambda plan: 5.0 if encodes(plan) else 0.001 * plan.token_count
    budget, found = driver.scheduler.budget, 0
    for number in range(8):
        driver.look([prose(130, seed=number), picture(number), prose(500, seed=9)], 5)
        while (before := (budget.token_seconds, budget.decode_seconds)) and driver.step():
            if encodes(driver.plans[-1]):
                assert (budget.token_seconds, budget.decode_seconds) == before
                found += 1
    assert found == 8 and 0 < budget.token_seconds < 0.01 and driver.scheduler.lateness.found == 0


@pytest.mark.slow
@settings(max_examples=10)
@given(
    seed=st.integers(0, 2**32),
    pages=st.sampled_from([20, 30, 60]),
    slots=st.sampled_from([1, 2, 5]),
    host=st.sampled_from([0, 1.2, 6, 40]),
    kept=st.sampled_from([0, 100, 700, 10_000]),
)
def test_any_traffic_with_images(seed, pages, slots, host, kept):
    play(seed, pages, slots, host, kept)
