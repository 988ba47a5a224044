"""What rows ask of the sampler, on the host: one Pick a token, and the picks of a batch as a few flat arrays."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from kakera.constrain.output import Allowed
from kakera.contract.request import Sampling
from kakera.contract.step import SamplingInput
from kakera.run.choose.noise import noise_key

TOP_BOUND = 128  # rows with a top_k up to this are drawn from the 128 most likely tokens
REMEMBERED = 256  # requests whose steady part is kept
TEMPERATURES = (1e-30, 1e30)  # float32 can hold these and their inverses

Rank = Literal["top", "sorted", "all"]
RANKS: tuple[Rank, ...] = ("top", "sorted", "all")


@dataclass(frozen=True)
class Changes:
    """Tokens whose logits move: x becomes (x / divisor if x > 0 else x * divisor) - minus + plus.

    ids_N: int64 [N], ascending; steps_3N: float32 [3, N], the divisor, what is subtracted, what is added.
    """

    ids_N: np.ndarray
    steps_3N: np.ndarray


@dataclass(frozen=True)
class Pick:
    """How one row's token is to be chosen. `key`: of its noise; `forced`: this token alone; `bits` as in `Allowed`."""

    sampling: Sampling
    key: int = 0
    forced: int | None = None
    changes: Changes | None = None
    bits: bytes | None = None

    @property
    def drawn(self) -> bool:
        return self.forced is None and self.sampling.temperature > 0.0

    @property
    def rank(self) -> Rank | None:
        """Of what it is drawn: the TOP_BOUND most likely tokens, what filters leave of a sorted vocabulary, or all of
        it as it is. None: it is not drawn."""
        s = self.sampling
        if not self.drawn:
            return None
        if 0 < s.top_k <= TOP_BOUND:
            return "top"
        return "sorted" if s.top_k > 0 or s.top_p < 1.0 or s.min_p > 0.0 else "all"


NO_PICK = Pick(Sampling(max_tokens=0, seed=0, temperature=0.0))  # holds the place of a row that takes no token


def pick_of(given: SamplingInput, allowed: Allowed, vocabulary: int) -> Pick:
    """Raises ValueError for a token id outside the vocabulary: on a GPU it would end the engine, not this row alone."""
    if allowed.forced is not None:
        _check(allowed.forced, allowed.forced, vocabulary)
        return Pick(given.sampling, forced=allowed.forced)
    key = noise_key(given.sampling.seed, given.sampling.choice, position=len(given.context))
    return Pick(given.sampling, key, changes=_changes(given, allowed, vocabulary), bits=allowed.bits)


def _changes(given: SamplingInput, allowed: Allowed, vocabulary: int) -> Changes | None:
    """Penalties, bias and the minimum length. None if nothing applies."""
    s = given.sampling
    steady = _steady(_Same(s), vocabulary)
    banned = [_ids(token for token in allowed.banned if 0 <= token < vocabulary)]
    if given.generated < s.min_tokens:
        banned.append(steady.stops_N)
    per_use = s.presence_penalty or s.frequency_penalty
    if not (any(map(len, banned)) or per_use or s.repetition_penalty != 1.0 or s.logit_bias):
        return None
    seen, _ = _distinct(np.array(given.context if s.repetition_penalty != 1.0 else (), np.int32))
    used, times = _distinct(np.array(given.output if per_use else (), np.int32))
    ids_N, _ = _distinct(np.concatenate([seen, used, steady.biased_N, *banned]))
    if not len(ids_N):
        return None
    _check(ids_N[0], ids_N[-1], vocabulary)
    steps_3N = np.zeros((3, len(ids_N)), np.float32)
    divisor_N, minus_N, plus_N = steps_3N
    divisor_N[:] = 1.0
    divisor_N[ids_N.searchsorted(seen)] = s.repetition_penalty
    per_token = np.float32(s.presence_penalty) + np.float32(s.frequency_penalty) * times.astype(np.float32)
    minus_N[ids_N.searchsorted(used)] = per_token
    plus_N[ids_N.searchsorted(steady.biased_N)] = steady.biases_N
    for stops_N in banned:
        plus_N[ids_N.searchsorted(stops_N)] = -math.inf  # behind the bias: none brings a token back
    return Changes(ids_N, steps_3N)


@dataclass(frozen=True)
class _Steady:
    """What is the same in every step of a request. biased_N, stops_N: int64, distinct; biases_N: float64."""

    biased_N: np.ndarray
    biases_N: np.ndarray
    stops_N: np.ndarray


class _Same:
    """Equal to itself alone: to compare 20,000 biases in each step would cost what is to be saved."""

    def __init__(self, sampling: Sampling):
        self.sampling = sampling

    def __hash__(self) -> int:
        return id(self.sampling)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.sampling is self.sampling


@lru_cache(maxsize=REMEMBERED)
def _steady(same: _Same, vocabulary: int) -> _Steady:
    """Made once a request: 4 ms for 20,000 biases, and 51 for stops of a whole vocabulary."""
    bias: dict[int, float] = {}
    for token, value in same.sampling.logit_bias:
        bias[token] = bias.get(token, 0.0) + value
    stops = dict.fromkeys(token for token in same.sampling.stop_token_ids if 0 <= token < vocabulary)
    return _Steady(_ids(bias), np.fromiter(bias.values(), np.float64, len(bias)), _ids(stops))


def _check(least: int, most: int, vocabulary: int) -> None:
    if least < 0 or most >= vocabulary:
        raise ValueError(f"sampling names the token ids {least} to {most}; ids are 0 to {vocabulary - 1}")


def _distinct(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ids, ascending, int64, and how often each occurs. With counts numpy sorts: 0.8 ms for 200,000 tokens; without, it
    hashes: 19 ms."""
    ids, times = np.unique(tokens, return_counts=True)
    return ids.astype(np.int64), times


def _ids(tokens: Iterable[int]) -> np.ndarray:
    return np.array([*tokens], np.int64)


def flat(picks: Sequence[Pick], vocabulary: int) -> dict[str, np.ndarray]:
    """The picks of R rows; what nobody asks for is an array of length 0.

    forced_R: int64, -1 = free. ids_N: int64, row * vocabulary + token, unique; steps_3N: float32, see Changes.
    masked_G: int64, rows with a mask; bits_GB: uint8, their bits. asked_A: int64, rows that want log-probabilities.
    Of the rows of each `Rank`, R: R_rows_S: int64; R_keys_S1: int64, of their noise; R_numbers_S4: float64, their
    temperature, top_p, min_p and top_k.
    """
    ranks = {rank: [(i, pick) for i, pick in enumerate(picks) if pick.rank == rank] for rank in RANKS}
    changed = [(i, pick.changes) for i, pick in enumerate(picks) if pick.changes is not None]
    masks = {i: pick.bits for i, pick in enumerate(picks) if pick.bits is not None and pick.forced is None}
    return {
        "forced_R": _ids(-1 if pick.forced is None else pick.forced for pick in picks),
        "ids_N": np.concatenate([_ids(()), *(i * vocabulary + changes.ids_N for i, changes in changed)]),
        "steps_3N": np.concatenate(
            [np.empty((3, 0), np.float32), *(changes.steps_3N for _, changes in changed)], axis=1
        ),
        "masked_G": _ids(masks),
        "bits_GB": _packed(masks.values(), -(-vocabulary // 8)),
        "asked_A": _ids(i for i, pick in enumerate(picks) if pick.sampling.logprobs is not None),
        **{f"{rank}_rows_S": _ids(i for i, _ in rows) for rank, rows in ranks.items()},
        **{f"{rank}_keys_S1": _ids(pick.key for _, pick in rows)[:, None] for rank, rows in ranks.items()},
        **{f"{rank}_numbers_S4": _numbers([pick for _, pick in rows], vocabulary) for rank, rows in ranks.items()},
    }


def _packed(masks: Iterable[bytes], width: int) -> np.ndarray:
    """A token for which a mask has no bit is not allowed."""
    rows = [np.frombuffer(bits[:width].ljust(width, b"\0"), np.uint8) for bits in masks]
    return np.stack(rows) if rows else np.empty((0, width), np.uint8)


def _numbers(picks: Sequence[Pick], vocabulary: int) -> np.ndarray:
    """float64 [rows, 4]: temperature, top_p, min_p, top_k."""
    rows = [
        (
            min(max(pick.sampling.temperature, TEMPERATURES[0]), TEMPERATURES[1]),
            pick.sampling.top_p if pick.sampling.top_p < 1.0 else 2.0,  # 2: rounding must not cut off the last token
            pick.sampling.min_p,
            pick.sampling.top_k if 0 < pick.sampling.top_k < vocabulary else vocabulary,
        )
        for pick in picks
    ]
    return np.array(rows, np.float64).reshape(-1, 4)
