"""A model shared by several ranks: the sizes that one of them computes with. No torch."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from kakera.arch.blocks import Block
from kakera.arch.spec import Layer, ModelSpec
from kakera.arch.tensors import by_rows


def can_share(spec: ModelSpec, ranks: int) -> bool:
    """Whether every tensor and every state can be cut for so many ranks where its declaration allows a cut, and what
    blocks give adds up: one that every rank has whole would be counted by each."""
    if ranks > 1 and not all(block.stream or _summed(block, spec.hidden) for block in spec.distinct):
        return False
    shards = {tensor.shard for block in spec.distinct for tensor in block.tensors(spec.hidden)}
    shards |= {state.shard for state in spec.states} | {by_rows(0, spec.vocab)}
    return all(shard.divides(ranks) for shard in shards)


def _summed(block: Block, hidden: int) -> bool:
    """Whether what a rank's block gives is a part of a sum: a linear of it is cut by its inputs."""
    linears = (tensor for tensor in block.tensors(hidden) if tensor.role in ("linear", "stack"))
    return any(tensor.shard.axis == len(tensor.shape) - 1 for tensor in linears)


@lru_cache(16)
def of_rank(spec: ModelSpec, rank: int, ranks: int) -> ModelSpec:
    """The declaration of what one rank holds: its heads, blocks and rows of the vocabulary, in all layers.

    Its tensors have the shapes of the rank's parts (`Tensor.shard`). Raises ValueError if so many can not share it.
    """
    if ranks == 1:
        return spec
    if not can_share(spec, ranks):
        raise ValueError(f"{ranks} ranks can not share this model evenly")
    (rows,) = by_rows(0, spec.vocab).shape((spec.vocab,), rank, ranks)
    draft = spec.draft and replace(spec.draft, layers=_layers(spec.draft.layers, rank, ranks))
    return replace(spec, vocab=rows, layers=_layers(spec.layers, rank, ranks), draft=draft)


def vocabulary(spec: ModelSpec, ranks: int) -> tuple[range, ...]:
    """Token ids whose rows of embedding and head each rank holds."""
    return tuple(range(*part) for rank in range(ranks) for part in by_rows(0, spec.vocab).parts(rank, ranks))


def _layers(layers: tuple[Layer, ...], rank: int, ranks: int) -> tuple[Layer, ...]:
    return tuple(
        replace(layer, sites=tuple(replace(site, block=site.block.of_rank(rank, ranks)) for site in layer.sites))
        for layer in layers
    )
