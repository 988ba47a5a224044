"""Random rows with every wish a request can have, for tests of the sampler on a CPU and on a GPU."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from kakera.constrain.output import ANYTHING, Allowed
from kakera.contract.request import Sampling
from kakera.contract.step import SamplingInput
from kakera.run.choose.picks import pick_of
from kakera.run.choose.sampler import Sampled, collect, launch


def mix(seed: int, rows: int, vocabulary: int) -> tuple[list[SamplingInput], Tensor, list[Allowed]]:
    """Logits are rounded to 1/16 as those of a 16-bit head are, so that many of them are equal."""
    rng = random.Random(seed)
    noise = torch.Generator().manual_seed(seed)
    logits_RV = (torch.randn(rows, vocabulary, generator=noise) * 48).round() / 16 * rng.choice([0.1, 1.0, 4.0])
    made = [_row(rng, i, vocabulary) for i in range(rows)]
    return made, logits_RV, [_allowed(rng, row, vocabulary) for row in made]


def _row(rng: random.Random, index: int, vocabulary: int) -> SamplingInput:
    def tokens(count: int) -> Sequence[int]:
        return [rng.randrange(vocabulary) for _ in range(rng.randint(0, count))]

    def rarely(value: float, otherwise: float) -> float:
        return value if rng.random() < 0.3 else otherwise

    sampling = Sampling(
        max_tokens=99,
        seed=rng.getrandbits(40),
        choice=rng.randrange(3),
        temperature=rng.choice([0.0, 0.0, 1e-40, 0.3, 1.0, 1.0, 2.0]),
        top_p=rarely(rng.choice([0.0, 0.05, 0.5, 0.9, 0.99]), 1.0),
        top_k=rng.choice([0, 0, 1, 2, 20, 50, 128, 129, vocabulary - 1, vocabulary, 10 * vocabulary]),
        min_p=rarely(rng.choice([0.01, 0.3, 1.0]), 0.0),
        presence_penalty=rarely(rng.uniform(-2, 2), 0.0),
        frequency_penalty=rarely(rng.uniform(-2, 2), 0.0),
        repetition_penalty=rarely(rng.uniform(0.5, 2), 1.0),
        logit_bias=tuple((t, rng.uniform(-9, 9)) for t in sorted(set(tokens(4)))) if rng.random() < 0.3 else (),
        min_tokens=rng.choice([0, 0, 40]),
        stop_token_ids=tuple(tokens(3)),
        logprobs=rng.choice([None, None, 0, 1, 5]),
    )
    prompt, output = [0, *tokens(30)], tokens(30)
    context = [*prompt, *output, *output[:5]]
    return SamplingInput(f"r{index}", sampling, context, len(prompt))


def _allowed(rng: random.Random, row: SamplingInput, vocabulary: int) -> Allowed:
    match rng.randrange(8):
        case 0:
            return Allowed(forced=rng.randrange(vocabulary))
        case 1:
            return Allowed(banned=(rng.randrange(vocabulary), vocabulary - 1))
        case 2 | 3:
            ends = row.sampling.stop_token_ids
            few = {rng.randrange(vocabulary) for _ in range(rng.choice([1, 3, vocabulary]))} - {*ends}
            bits = bytearray(-(-vocabulary // 8))
            for token in few or {t for t in range(vocabulary) if t not in ends}:
                bits[token // 8] |= 1 << token % 8
            return Allowed(bits=bytes(bits))
    return ANYTHING


def sample_rows(
    rows: Sequence[SamplingInput], logits_RV: Tensor, allowed: Sequence[Allowed] | None = None
) -> list[Sampled]:
    """A token for each row, among those that `allowed` (one entry a row) lets it have."""
    allowed = allowed or [ANYTHING] * len(rows)
    picks = [pick_of(row, may, logits_RV.shape[-1]) for row, may in zip(rows, allowed, strict=True)]
    return collect(launch(picks, logits_RV))
