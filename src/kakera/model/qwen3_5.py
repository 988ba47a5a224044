"""HybridModel: a declared text model, from a batch of spans to hidden states and logits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from kakera.arch.shard import vocabulary
from kakera.arch.spec import ModelSpec
from kakera.kv.backend import Attention
from kakera.kv.batch import Batch, Kept
from kakera.model.load import Progress, load_weights
from kakera.model.stack import Stack
from kakera.model.state import StatePool
from kakera.model.weights import ModelWeights
from kakera.ops.exchange import ALONE, Exchange
from kakera.weights.checkpoint import Checkpoint


class HybridModel:
    """A model, or a rank's share of one: then `spec` and `weights` are of what the rank holds, hidden states are those
    of the whole model, with the same bits on every rank, and all ranks run the same passes in the same order.

    `vocab`: tokens of each rank's part of the head.
    """

    def __init__(
        self, spec: ModelSpec, weights: ModelWeights, exchange: Exchange = ALONE, vocab: Sequence[int] | None = None
    ):
        self.spec = spec
        self.weights = weights
        self.exchange = exchange
        self._vocab = vocab or (spec.vocab,)
        table, mtp = weights.embedding, weights.mtp
        self._layers = Stack(spec, weights.layers, weights.finish, table.device, table.dtype, exchange)
        self.draft = Stack(spec, mtp.layers, mtp.finish, table.device, table.dtype, exchange) if mtp else None

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can capture a pass of decode rows, as far as the model goes: plain operations ask the
        host here and there."""
        return self._layers.capturable and self.exchange.capturable

    @staticmethod
    def load(
        path: Path,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        progress: Progress | None = None,
        *,
        escha_bias: bool = False,
        draft: bool = False,
        embedding_on_host: bool = False,
        exchange: Exchange = ALONE,
        spec: ModelSpec | None = None,
    ) -> HybridModel:
        """Read a model directory; `escha_bias` as in `Checkpoint.open`, `draft`: its draft layer too, if it has one,
        `embedding_on_host` as in `load_weights`; `exchange`: of the rank whose share it is; `spec`: that share's
        declaration, with a tower from elsewhere. Raises CheckpointError."""
        rank, ranks, device = exchange.rank, exchange.ranks, torch.device(device)
        checkpoint = Checkpoint.open(path, escha_bias=escha_bias, rank=rank, ranks=ranks)
        options = {"draft": draft, "embedding_on_host": embedding_on_host}
        weights = load_weights(checkpoint, dtype, device, progress, **options, exchange=exchange)
        vocab = [len(ids) for ids in vocabulary(checkpoint.spec, ranks)]
        return HybridModel(spec or checkpoint.own, weights, exchange, vocab)

    @torch.inference_mode()
    def forward(self, batch: Batch, attention: Attention, states: StatePool) -> Tensor:
        """Run the batch and return float32 logits [R, vocabulary] of `batch.logit_rows`, as `logits` has them."""
        return self.logits(self.hidden(batch, attention, states)[batch.logit_rows])

    @torch.inference_mode()
    def hidden(self, batch: Batch, attention: Attention, states: StatePool) -> Tensor:
        """Hidden states after the final norm, [T, H]. Writes the batch's keys, values and states, fills its saves.

        On a CPU the values of prefill rows have the same bits whatever else is in the batch and wherever the prompt
        was cut (at multiples of 64).
        """
        x_TH = self.weights.embedding(batch.tokens_T)
        for row, embeds_NH in batch.images:
            x_TH[row : row + len(embeds_NH)] = embeds_NH.to(x_TH)
        hidden_TH = self._layers.run(x_TH, batch, attention, states)
        _save_hidden(batch, hidden_TH)
        return hidden_TH

    @torch.inference_mode()
    def commit(self, kept: Sequence[Kept], states: StatePool) -> None:
        """Of held spans that `hidden` has computed: take on their states by the tokens that stay."""
        self._layers.commit(kept, states)

    @torch.inference_mode()
    def logits(self, hidden_RH: Tensor) -> Tensor:
        """The head over post-norm hidden states: float32 [R, vocabulary], vocabulary contiguous; of the whole
        vocabulary on rank 0, which chooses tokens, and of none of it, [R, 0], on the others."""
        part_RV = self.weights.head(hidden_RH, decode_tokens=len(hidden_RH))
        return self.exchange.gather(part_RV, self._vocab).float().contiguous()


def _save_hidden(batch: Batch, hidden_TH: Tensor) -> None:
    """Each checkpoint carries the hidden state of the last token before it."""
    for span in batch.spans:
        for save in span.saves:
            if save.into.hidden_H is not None:
                save.into.hidden_H.copy_(hidden_TH[span.offset + save.position - 1 - span.start])
