"""Drafters for tests: one that knows, one that guesses, and one that is right for a while and then wrong."""

from __future__ import annotations

import random

from fake_runner import VOCAB, next_token

from kakera.contract.step import SamplingInput


def oracle(given: SamplingInput, most: int) -> list[int]:
    """What the fake model says, minimum lengths aside."""
    tokens = list(given.context)
    for _ in range(most):
        tokens.append(next_token(tuple(tokens)))
    return tokens[len(given.context) :]


def first(count: int, drafter=oracle):
    return lambda given, most: drafter(given, min(most, count))


class Random:
    """Any number of tokens, now and then more than are taken; most of them wrong."""

    def __init__(self, seed: int):
        self.rng = random.Random(seed)

    def __call__(self, given: SamplingInput, most: int) -> list[int]:
        return [self.rng.randrange(VOCAB) for _ in range(self.rng.randrange(most + 3))]


class Adversary:
    """Right, then wrong, then right again as if nothing had been; or the tokens that end answers."""

    def __init__(self, seed: int):
        self.rng = random.Random(seed)

    def __call__(self, given: SamplingInput, most: int) -> list[int]:
        right = oracle(given, self.rng.randrange(most + 1))
        if right and self.rng.random() < 0.6:
            at = self.rng.randrange(len(right))
            right[at] = self.rng.choice([*given.sampling.stop_token_ids, (right[at] + 1) % VOCAB])
        return right
