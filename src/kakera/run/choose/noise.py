"""Gumbel noise of a token: a function of (seed, choice, position, token id) and of nothing else.

The token of a row is the one whose logit, divided by the temperature, is the largest with its noise added: a draw from
the softmax. Whoever guesses the same row with the same noise guesses the same token more often than any other way
(Daliri, Musco, Suresh, arXiv 2408.07978), and which filters a row has changes the noise of no token.

The host hashes (seed, choice, position) to a key; the device makes the numbers, by the counter form of SplitMix64
(Steele, Lea, Flood 2014) in wrapping 64-bit integers: 9 operations a token, where Philox takes 60. Logarithms are taken
in float64, so that CPUs and GPUs agree wherever two sums are not equal to 15 digits.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

STEP, MIX_1, MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # of SplitMix64
RANDOM_BITS = 52  # and a half behind them, so that neither 0 nor 1 comes up


def noise_key(seed: int, choice: int, position: int) -> int:
    """A signed number of 64 bits."""
    digest = hashlib.blake2b(f"{seed},{choice},{position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def gumbel(keys_S1: Tensor, ids_SK: Tensor) -> Tensor:
    """float64 [S, K] of int64 keys and token ids, which broadcast. At most two copies of the result are alive."""
    bits_SK = (ids_SK + 1).mul_(_signed(STEP)) + keys_S1
    for shift, factor in ((30, MIX_1), (27, MIX_2)):
        bits_SK.bitwise_xor_(_shifted(bits_SK, shift)).mul_(_signed(factor))
    bits_SK.bitwise_xor_(_shifted(bits_SK, 31))
    uniform_SK = _shifted(bits_SK, 64 - RANDOM_BITS).double()
    del bits_SK
    return uniform_SK.add_(0.5).mul_(2.0**-RANDOM_BITS).log_().neg_().log_().neg_()


def _shifted(bits: Tensor, places: int) -> Tensor:
    """To the right, zeros from the left."""
    return (bits >> places).bitwise_and_((1 << (64 - places)) - 1)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


def gumbel_reference(key: int, token: int) -> Tensor:
    """One token's, in Python's integers; a float64 scalar."""
    mask = (1 << 64) - 1
    bits = (key + (token + 1) * STEP) & mask
    bits = (bits ^ (bits >> 30)) * MIX_1 & mask
    bits = (bits ^ (bits >> 27)) * MIX_2 & mask
    bits ^= bits >> 31
    return -torch.log(-torch.log(torch.tensor(((bits >> 12) + 0.5) * 2.0**-52, dtype=torch.float64)))
