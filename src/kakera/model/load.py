"""From a checkpoint to the weights of a model, block by block as it is declared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kakera.arch.shard import vocabulary
from kakera.arch.spec import Draft, Layer, ModelSpec
from kakera.errors import CheckpointError
from kakera.model.kinds import KINDS
from kakera.model.linear import SharedEmbedding
from kakera.model.loader import Loader
from kakera.model.reader import LinearReader
from kakera.model.residual import RULES, Rule
from kakera.model.weights import LayerWeights, ModelWeights, MtpWeights, SiteWeights
from kakera.ops.exchange import ALONE, Exchange
from kakera.target.as_torch import is_card
from kakera.weights.checkpoint import Checkpoint

Progress = Callable[[int, int], None]  # layers done, layers in all


def load_weights(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
    *,
    draft: bool = False,
    embedding_on_host: bool = False,
    exchange: Exchange = ALONE,
) -> ModelWeights:
    """Read and decode every tensor of the text model; of its draft layer only on request, since serving has no use
    for it. `embedding_on_host`: of a GPU, its rows stay in host memory, where a kernel reads them. `exchange`: of the
    rank whose checkpoint it is.

    Raises CheckpointError naming what is missing or not expected (before anything is read), misshaped or damaged, or
    what kakera has no code for.
    """
    spec, own = checkpoint.spec, checkpoint.own
    check_computable(spec)
    if spec.cpu_only and is_card(device):
        raise CheckpointError(spec.cpu_only)
    drafts = own.draft if draft and own.draft and checkpoint.has(own.draft.tensors[-1].name) else None
    tensors = spec.tensors(drafts is not None)
    checkpoint.check_complete(tensors)
    linears = LinearReader.of(checkpoint, tensors, dtype, device)
    layers = _Layers(Loader(checkpoint, tensors, device, linears), RULES[spec.residual.kind])
    embedding, head = linears.embedding_and_head(embedding_on_host)
    if exchange.ranks > 1:
        embedding = SharedEmbedding(embedding, vocabulary(spec, exchange.ranks)[exchange.rank], exchange)
    loaded = []
    for done, layer in enumerate(own.layers, 1):
        loaded.append(layers.load(layer))
        if progress is not None:
            progress(done, len(spec.layers))
    finish = layers.rule.load(layers.loader, spec.finish)
    return ModelWeights(embedding, tuple(loaded), finish, head, None if drafts is None else layers.draft(drafts))


def check_computable(spec: ModelSpec) -> None:
    """Raise CheckpointError for a model that can be planned and not computed."""
    unknown = sorted({block.kind for block in spec.distinct} - set(KINDS))
    unknown += [spec.residual.kind] if spec.residual.kind not in RULES else []
    if unknown:
        raise CheckpointError(
            f"{spec.model_type}: kakera can plan this model and not compute it yet; it has no code for {unknown}"
        )


@dataclass(frozen=True)
class _Layers:
    loader: Loader
    rule: Rule

    def load(self, layer: Layer) -> LayerWeights:
        return tuple(
            SiteWeights(
                site.block.kind,
                self.rule.load(self.loader, f"{layer.name}.{site.read}"),
                KINDS[site.block.kind].load(self.loader, f"{layer.name}.{site.block.name}", site.block),
            )
            for site in layer.sites
        )

    def draft(self, declared: Draft) -> MtpWeights:
        embedding, hidden, fc = (tensor.name for tensor in declared.tensors)
        return MtpWeights(
            embedding_scale_H=self.loader.norm(embedding.removesuffix(".weight")),
            hidden_scale_H=self.loader.norm(hidden.removesuffix(".weight")),
            fc=self.loader.linears.projection([fc]),
            layers=tuple(self.load(layer) for layer in declared.layers),
            finish=self.rule.load(self.loader, declared.finish),
        )
