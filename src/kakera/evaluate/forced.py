"""Teacher-forced logits of a token list, computed as the engine computes a prompt: in chunks, through the KV codec.

A key's precision follows from positions alone, so what is measured here is what decoding sees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from kakera.contract.grid import PAGE
from kakera.kv.backend import Attention
from kakera.kv.batch import Batch, Span
from kakera.model.qwen3_5 import HybridModel
from kakera.model.state import StatePool

OnTokens = Callable[[int], None]  # hears that so many more tokens have been read
HEAD_ROWS = 256  # rows of logits at a time: 256 x 248,320 fp32 is 254 MB


def ignore(tokens: int) -> None:
    """Nobody asks how far it has come."""


class Forced:
    """Owns slot 0 and the first pages of a cache that nothing else uses. `chunk` tokens a step, a multiple of PAGE."""

    def __init__(self, model: HybridModel, attention: Attention, states: StatePool, chunk: int):
        self.model = model
        self.attention = attention
        self.states = states
        self.chunk = chunk

    @torch.inference_mode()
    def hidden(self, tokens: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """Yield (start, hidden_NH) chunk by chunk: post-norm hidden states of tokens start .. start + N - 1."""
        device = self.model.weights.embedding.device
        tokens_T = torch.tensor(tokens, dtype=torch.int64, device=device)
        self.states.reset(0)
        for start in range(0, len(tokens), self.chunk):
            end = min(start + self.chunk, len(tokens))
            pages = torch.arange(-(-end // PAGE), device=device)
            batch = Batch(
                tokens_T=tokens_T[start:end],
                positions_T=torch.arange(start, end, device=device),
                decode=(),
                prefill=(Span(offset=0, count=end - start, start=start, slot=0, pages=pages),),
                logit_rows=torch.empty(0, dtype=torch.int64, device=device),
            )
            yield start, self.model.hidden(batch, self.attention, self.states)

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """Yield (start, logits_NV) in float32, at most HEAD_ROWS rows at a time, in order; row i sees tokens 0 .. i."""
        for start, hidden_NH in self.hidden(tokens):
            for row in range(0, len(hidden_NH), HEAD_ROWS):
                yield start + row, self.model.logits(hidden_NH[row : row + HEAD_ROWS]).float()
