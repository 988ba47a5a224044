"""NgramInput: a side input from a table of hashed n-grams, and what the hash needs. No torch.

A head i has a prime number of rows. The row of an n-gram is offset_i + (xor of id_j * multiplier_j) mod rows_i, in
64-bit integers, token 0 being the newest. Source: transformers' model type qwen4_exp, whose checkpoints store the same
numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate, count, islice
from typing import ClassVar

from kakera.arch.blocks import Block
from kakera.arch.tensors import CODED_ROWS, WHOLE, State, Tensor, gate, small

MASK = 2**64 - 1
GAMMA, MIX_1, MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # of splitmix64
LAYER_STRIDE = 10007  # between the seeds of two tables


@dataclass(frozen=True)
class NgramInput:
    """A side input: h += gate * v + silu(conv(norm(gate * v))), once a stream, with v and the gate's key from rows of a
    table that the last `tokens` token ids choose; ids before an end token count as `eos`.

    `width`: of all streams; `embed`: of the rows of all heads together; `taps`: of the convolution, `tokens` apart;
    `heads`: rows of each head's own part of the table; `rows`: of the table, padded. It reads h and ids, no positions.
    """

    kind: ClassVar[str] = "ngram_input"
    stream: ClassVar[bool] = True

    width: int
    embed: int
    taps: int
    tokens: int
    eos: int
    heads: tuple[int, ...]
    rows: int
    multipliers: tuple[int, ...]
    name: str = "ple"

    @property
    def alive(self) -> int:
        """Rows, keys, queries, gated values before and behind the convolution."""
        return self.embed + 4 * self.width

    def tensors(self, hidden: int) -> tuple[Tensor, ...]:
        derived = (
            ("head_offsets", head_offsets(self.heads)),
            ("head_vocab_sizes", self.heads),
            ("layer_multipliers", self.multipliers),
        )
        table = Tensor(
            "ple_embedding.ngram_embedding",
            (self.rows, self.embed // len(self.heads)),
            "table",
            formats=CODED_ROWS,
            active=len(self.heads),
            part="n-gram table",
            places=("host", "file"),
            derived=derived,
        )
        norms = (small(f"{name}.weight", (self.width,), "delta") for name in ("norm_key", "norm_query", "norm_conv"))
        return (
            gate("key_proj", self.width, self.embed, WHOLE),
            gate("value_proj", hidden, self.embed, WHOLE),
            small("conv1d.weight", (self.width, 1, self.taps), "filter"),
            *norms,
            table,
        )

    def states(self) -> tuple[State, ...]:
        """The last columns before the convolution. The last ids are the tokens', and stored with those."""
        return (State("ple_conv", ((self.taps - 1) * self.tokens, self.width), "slot", "activation", "shift"),)

    def of_rank(self, rank: int, ranks: int) -> Block:
        return self


def head_rows(base: int, heads: int, table: int = 0) -> tuple[int, ...]:
    """Rows of every head: the primes from `base` on. `table`: how many tables of a model come before this one."""
    return tuple(islice((n for n in count(base) if _is_prime(n)), table * heads, (table + 1) * heads))


def head_offsets(rows: tuple[int, ...]) -> tuple[int, ...]:
    """First row of every head."""
    return tuple(accumulate(rows[:-1], initial=0))


def multipliers(vocab: int, tokens: int, seed: int, table: int = 0) -> tuple[int, ...]:
    """Odd factors of the newest token, the one before it, and so on. No product of an id and one exceeds 63 bits."""
    bound = max(1, (2**63 - 1) // vocab // 2)
    start = seed + LAYER_STRIDE * table
    return tuple(2 * (_splitmix64(start + GAMMA * (i + 1)) % bound) + 1 for i in range(tokens))


def _splitmix64(value: int) -> int:
    value = (value + GAMMA) & MASK
    value = ((value ^ (value >> 30)) * MIX_1) & MASK
    value = ((value ^ (value >> 27)) * MIX_2) & MASK
    return value ^ (value >> 31)


def _is_prime(number: int) -> bool:
    if number < 4:
        return number > 1
    return bool(number % 2) and all(number % divisor for divisor in range(3, math.isqrt(number) + 1, 2))
