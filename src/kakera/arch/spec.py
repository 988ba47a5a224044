"""ModelSpec: the declaration of one model, and what follows from it for every room. No torch.

Written by the file of its architecture from a config.json; every room takes names, shapes and sizes from here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Literal, Protocol

from kakera.arch import rope
from kakera.arch.blocks import AttentionSpec, Block, GdnSpec
from kakera.arch.config import Config
from kakera.arch.tensors import HEAD, ROWS, Kind, Place, State, Tensor, Values, by_rows, small
from kakera.arch.vision import PREFIX, VisionSpec
from kakera.errors import CheckpointError

EMBEDDING, LM_HEAD = "model.embed_tokens", "lm_head"
OF_HEAD = Kind("head", -1)  # head and draft layer have rates of their own and are never given a bit more
OF_DRAFT = Kind("mtp", -1, escha=3)


class Residual(Protocol):
    """How blocks read the residual stream and write to it: read(h) -> x and a token, write(h, y, token) -> h behind the
    block, finish(h) -> x for the head. `kind`: which code does it, a key of the table in model/."""

    kind: ClassVar[str]

    @property
    def streams(self) -> int:
        """The stream is [tokens, streams x hidden]."""
        ...

    def read(self, name: str, hidden: int) -> tuple[Tensor, ...]:
        """Tensors of the read called `name`."""
        ...

    def finish(self, name: str, hidden: int) -> tuple[Tensor, ...]: ...


@dataclass(frozen=True)
class AddNorm:
    """One stream: a block reads its RMS norm and adds to it; a last norm finishes. `values` of the norms' weights."""

    kind: ClassVar[str] = "add_norm"
    streams: ClassVar[int] = 1

    values: Values

    def read(self, name: str, hidden: int) -> tuple[Tensor, ...]:
        return (small(f"{name}.weight", (hidden,), self.values),)

    finish = read


@dataclass(frozen=True)
class Site:
    """A block where it stands in a layer. `read`: the name of its read of the stream; none of a block that takes the
    stream itself (a side input)."""

    block: Block
    read: str = ""


@dataclass(frozen=True)
class Layer:
    """`sites` in the order in which they run; `name`: of the layer's module."""

    name: str
    sites: tuple[Site, ...]

    @property
    def blocks(self) -> tuple[Block, ...]:
        return tuple(site.block for site in self.sites)

    def block(self, kind: str) -> Block | None:
        """The first of that kind."""
        return next((block for block in self.blocks if block.kind == kind), None)


@dataclass(frozen=True)
class Draft:
    """A draft layer: `takes` the hidden state behind the last norm, or the stream before `finish`, `width` values of a
    token; combines it with the next token's embedding by `tensors`; runs `layers`, whose attention is one more KV layer
    each; and has a finish of its own. Embedding and head are the model's. `prefix`: of all its names."""

    takes: Literal["post-norm", "stream"]
    width: int
    tensors: tuple[Tensor, ...]
    layers: tuple[Layer, ...]
    finish: str
    prefix: str = "mtp."


@dataclass(frozen=True)
class Names:
    """What stored names look like: (stored, canonical) prefixes of which the first match wins; modules that are known
    and not served; modules that may be there unasked; files beside those that an index names."""

    wrappers: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()

    def canonical(self, stored: str) -> str:
        """The name without the wrapper that multimodal checkpoints put around the text model."""
        for prefix, replacement in self.wrappers:
            if stored.startswith(prefix):
                return replacement + stored.removeprefix(prefix)
        return stored


QWEN_NAMES = Names(
    wrappers=(
        ("model.language_model.", "model."),
        ("language_model.model.", "model."),
        ("language_model.lm_head", "lm_head"),
        ("visual.", PREFIX),
    ),
    ignored=(PREFIX,),  # the vision tower
    optional=("mtp.",),  # a draft layer
)


@dataclass(frozen=True)
class ModelSpec:
    """`hidden`: values of one residual stream; `vocab`: rows of embedding and head; `eos`: end tokens, the first of
    which counts where one is meant; `finish`: name of the last read; `embedding`: where that may lie, best first;
    `unserved`: why it can be planned and not served, `cpu_only`: why cards can not serve it; `vision`: a tower that its
    config tells of, stored or not, and `blind`: why that one is not computed; `drafting`: its draft layer is loaded and
    computed, so that its tensors and its states count."""

    model_type: str
    vocab: int
    hidden: int
    layers: tuple[Layer, ...]
    residual: Residual
    max_positions: int
    rms_eps: float
    tied: bool
    eos: tuple[int, ...]
    draft: Draft | None = None
    names: Names = QWEN_NAMES
    finish: str = "model.norm"
    embedding: tuple[Place, ...] = ("device",)
    unserved: str = ""
    drafting: bool = False
    vision: VisionSpec | None = None
    blind: str = ""
    cpu_only: str = ""

    @staticmethod
    def of(config: Config, layers: tuple[Layer, ...], residual: Residual, draft: Draft | None = None) -> ModelSpec:
        """With what every config states under the same keys."""
        return ModelSpec(
            model_type=config["model_type"],
            vocab=config.size("vocab_size"),
            hidden=config.size("hidden_size"),
            layers=layers,
            residual=residual,
            max_positions=rope.max_positions(config),
            rms_eps=config.number("rms_norm_eps", 1e-6),
            tied=config.tied(),
            eos=config.end_tokens(),
            draft=draft,
        )

    def __hash__(self) -> int:
        """Of a few sizes: a plan asks for the same shares of a model again and again."""
        return hash((self.model_type, self.vocab, self.hidden, len(self.layers), self.max_positions))

    @property
    def optional(self) -> tuple[str, ...]:
        """Beginnings of names that may be stored or not, whatever is asked for."""
        return self.names.optional + (() if self.draft is None else (self.draft.prefix,))

    def counts(self, stored: str) -> bool:
        """Whether serving loads a stored tensor: no vision tower, and a draft layer only if it is computed."""
        name = self.names.canonical(stored)
        if self.draft is not None and name.startswith(self.draft.prefix):
            return self.drafting
        return not name.startswith((*self.names.ignored, *self.optional))

    def tensors(self, draft: bool = False) -> dict[str, Tensor]:
        """All that a checkpoint must hold, by canonical name. `draft`: with the draft layer, even if it is not
        computed."""
        rows = by_rows(0, self.vocab)
        head = Tensor(LM_HEAD, (self.vocab, self.hidden), "linear", rows, HEAD, OF_HEAD)
        part = "" if self.embedding == ("device",) else "embedding"
        shape = (self.vocab, self.hidden)
        found = [
            Tensor(EMBEDDING, shape, "table", rows, ROWS, active=1, part=part, places=self.embedding),
            *self.residual.finish(self.finish, self.hidden),
            replace(head, alias=EMBEDDING) if self.tied else head,
            *(tensor for layer in self.layers for tensor in self.of_layer(layer)),
        ]
        if (draft or self.drafting) and self.draft is not None:
            found += self._of_draft(self.draft)
        return {tensor.name: tensor for tensor in found}

    def of_layer(self, layer: Layer) -> Iterator[Tensor]:
        """The tensors of a layer under their full names, site by site."""
        for site in layer.sites:
            if site.read:
                yield from self.residual.read(f"{layer.name}.{site.read}", self.hidden)
            prefix = f"{layer.name}.{site.block.name}"
            for tensor in site.block.tensors(self.hidden):
                pieces = tuple(f"{prefix}.{piece}" for piece in tensor.pieces)
                yield replace(tensor, name=f"{prefix}.{tensor.name}", pieces=pieces)

    def _of_draft(self, draft: Draft) -> Iterator[Tensor]:
        parts = (tensor for layer in draft.layers for tensor in self.of_layer(layer))
        for tensor in (*self.residual.finish(draft.finish, self.hidden), *draft.tensors, *parts):
            yield replace(tensor, kind=replace(OF_DRAFT, above=tensor.kind.above)) if tensor.kind else tensor

    @cached_property
    def distinct(self) -> Mapping[Block, int]:
        """Blocks of different sizes, each with the number of layers that have it: what sums over layers need."""
        found: dict[Block, int] = {}
        for layer in self.layers:
            for block in layer.blocks:
                found[block] = found.get(block, 0) + 1
        return found

    @cached_property
    def kinds(self) -> Mapping[Kind, int]:
        """Number of weights of each kind of coded linears over all layers."""
        found: dict[Kind, int] = {}
        for block, layers in self.distinct.items():
            for tensor in block.tensors(self.hidden):
                if tensor.kind is not None:
                    found[tensor.kind] = found.get(tensor.kind, 0) + layers * tensor.count
        return found

    @cached_property
    def active(self) -> int:
        """Weights of coded linears that one token goes through."""
        tensors = ((tensor, n) for block, n in self.distinct.items() for tensor in block.tensors(self.hidden))
        return int(sum(n * tensor.count * tensor.share for tensor, n in tensors if tensor.kind is not None))

    @cached_property
    def states(self) -> Mapping[State, int]:
        """Every state of the layers, and of a draft layer that is computed, with the number of layers that have it."""
        found: dict[State, int] = {}
        drafting = ((block, 1) for layer in self._drafting for block in layer.blocks)
        for block, layers in (*self.distinct.items(), *drafting):
            for state in block.states():
                found[state] = found.get(state, 0) + layers
        return found

    @property
    def _drafting(self) -> tuple[Layer, ...]:
        return self.draft.layers if self.drafting and self.draft is not None else ()

    def with_block(self, kind: str) -> tuple[int, ...]:
        """The layers that have a block of that kind."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.block(kind) is not None)

    @cached_property
    def full_layers(self) -> tuple[int, ...]:
        return self.with_block(AttentionSpec.kind)

    @cached_property
    def kv_layers(self) -> int:
        """Layers whose keys and values are stored: the model's, then the draft layer's if it is computed."""
        return len(self.full_layers) + sum(layer.block(AttentionSpec.kind) is not None for layer in self._drafting)

    @cached_property
    def gdn_layers(self) -> tuple[int, ...]:
        return self.with_block(GdnSpec.kind)

    @cached_property
    def attention(self) -> AttentionSpec:
        """Of all layers that have one: rooms that store keys and values hold layers of one shape.

        Raises CheckpointError if none has.
        """
        found = next((block for block in self.distinct if isinstance(block, AttentionSpec)), None)
        if found is None:
            raise CheckpointError(f"config.json: {self.model_type} without a full-attention layer is not served")
        return found

    @cached_property
    def gdn(self) -> GdnSpec | None:
        return next((block for block in self.distinct if isinstance(block, GdnSpec)), None)

    @property
    def heads(self) -> int:
        return self.attention.heads

    @property
    def kv_heads(self) -> int:
        return self.attention.kv_heads

    @property
    def head_dim(self) -> int:
        return self.attention.head_dim

    @property
    def rotary_dim(self) -> int:
        return self.attention.rotary_dim

    @property
    def rope_theta(self) -> float:
        return self.attention.rope_theta

    @property
    def gated(self) -> bool:
        return self.attention.gated

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.attention.group

    @property
    def kv_values_per_token(self) -> int:
        """Values of K and V of one token over all layers that store them."""
        return 2 * self.kv_layers * self.kv_heads * self.head_dim

    @property
    def draft_layers(self) -> int:
        return 0 if self.draft is None else len(self.draft.layers)
