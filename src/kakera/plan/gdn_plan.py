"""The scratch of Gated DeltaNet's prefill kernels. No GPU is needed to know it."""

from __future__ import annotations

from kakera.arch.blocks import GdnSpec
from kakera.contract.grid import PAGE

CHUNK = PAGE  # tokens of a chunk of the delta rule
RANGE = 8192  # tokens whose temporaries exist at once; a longer span is taken range by range


def scratch_bytes(spec: GdnSpec, tokens: int) -> int:
    """What `ops.gdn_prefill` allocates for a span of `tokens` beside its output, until it returns.

    Per token, in 16 bits: q and k of every key head, v and o of every value head, and two rows of 64 values (of the
    inverse and of the scores). In 32: a row of 64 (of K K^T) of every key head, and three decays of every value head.
    """
    padded = -(-min(tokens, RANGE) // CHUNK) * CHUNK
    halves = 2 * spec.k_heads * spec.k_dim + 2 * spec.v_heads * spec.v_dim + 2 * spec.v_heads * CHUNK
    return padded * (2 * halves + 4 * (CHUNK * spec.k_heads + 3 * spec.v_heads))
