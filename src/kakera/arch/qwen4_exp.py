"""Qwen3.8-Flash-Next (`qwen4_exp`, `qwen4_exp_text`): Gated DeltaNet and attention that selects, experts in every
layer, four residual streams, a table of hashed n-grams, a draft layer. No torch.

Nothing serves it yet; a plan and a summary of its files follow from what stands here.

* h is the embedding, once a stream. A read normalises every stream by itself, weights it channel by channel and takes
  the mean; what a block gives is added to each stream times a scalar of its own. There is no other norm: the last read
  gives the head its input.
* Norms are stored as their distance from 1, but the one inside Gated DeltaNet, whose gate is `output_gate_type` here.
* `ple_layer_ids` count from 1. `seed` is 1234 and `norm_topk_prob` true where a config leaves them out or null.
* The vision tower (27 layers, model.visual.*) is known and not loaded; pixels never enter the n-grams' hash.

Source: transformers' model type qwen4_exp; of the draft layer and of what is coded, vLLM and exllamav3.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from kakera.arch.blocks import AttentionSpec, Block, GdnSpec
from kakera.arch.config import LARGEST, Config
from kakera.arch.moe import Moe, moe_of
from kakera.arch.ngram import NgramInput, head_rows, multipliers
from kakera.arch.qwen3_5 import attention_of, gdn_of, mixer_kinds
from kakera.arch.spec import OF_DRAFT, QWEN_NAMES, Draft, Layer, ModelSpec, Site
from kakera.arch.tensors import WHOLE, Kind, State, Tensor, gate, linear, small
from kakera.contract.grid import PAGE
from kakera.errors import CheckpointError

MIXERS = {
    "linear_attention": "gdn",
    "full_attention": "full",
    "deepseek_sparse_attention": "full",  # what transformers calls the same layer inside
    "hybrid_indexed": "full",
}
READS = ("attn_hyper_connection", "mlp_hyper_connection")
INDEX_QK = Kind("attention.index", 5, above=0)
GROUPS = ("linear_", "hc_", "indexer_", "ple_", "ngram_", "moe_", "num_experts", "shared_expert_", "mtp_")
UNSERVED = (
    "kakera can plan Qwen3.8-Flash-Next (qwen4_exp) and not serve it yet: nothing here computes routed experts, four "
    "residual streams, attention that selects what it reads, or n-gram rows"
)
NAMES = replace(
    QWEN_NAMES,
    beside=("ngram_embedding.safetensors", "mtp_hyper_connection_mixer_patch.safetensors"),
)


@dataclass(frozen=True)
class HyperConnections:
    """`streams` of the hidden width. n is the RMS norm of every stream, u = silu(down n / streams) of `rank` channels:

    read(h) -> mean over streams of sigmoid(up u) * n;  write(h, y) -> h_s + 2 sigmoid(inject n / streams)_s * y;
    finish(h) is a read of its own. Every rank holds all of it: a cut would be a message a read.
    """

    kind: ClassVar[str] = "hyper_connections"

    streams: int
    rank: int

    def read(self, name: str, hidden: int) -> tuple[Tensor, ...]:
        inject = gate(f"{name}.block_inject_weight", self.streams, self.streams * hidden, WHOLE)
        return (*self.finish(name, hidden), inject)

    def finish(self, name: str, hidden: int) -> tuple[Tensor, ...]:
        width = self.streams * hidden
        return (
            small(f"{name}.hc_norm.weight", (width,), "delta"),
            gate(f"{name}.input_mix_weight_down", self.rank, width, WHOLE),
            gate(f"{name}.input_mix_weight_up", width, self.rank, WHOLE),
        )


@dataclass(frozen=True)
class BlockIndex:
    """Which tokens attention reads: of blocks of `ratio` consecutive ones the `budget` / ratio best and the tail that
    fills no block, one set for all heads; all of them up to budget + ratio - 1 tokens.

    A block's key is the mean of its raw keys, normed and turned at its first token; its score the sum over `heads` of
    relu(q . k). Of equal scores the lower block wins. Kept by every rank, in 16 bit: never coded below 8.
    """

    kind: ClassVar[str] = "block_index"

    heads: int
    dim: int
    budget: int
    ratio: int

    @property
    def alive(self) -> int:
        """Queries and the raw key, and the blocks that were chosen."""
        return (self.heads + 1) * self.dim + self.budget // self.ratio

    @property
    def tokens(self) -> int:
        return self.budget + self.ratio - 1

    def tensors(self, hidden: int) -> tuple[Tensor, ...]:
        return (
            linear("indexer.index_qk_proj", (self.heads + 1) * self.dim, hidden, INDEX_QK, WHOLE),
            small("indexer.q_layernorm.weight", (self.dim,), "delta"),
            small("indexer.k_layernorm.weight", (self.dim,), "delta"),
        )

    def states(self) -> tuple[State, ...]:
        """Keys of blocks by page; raw keys of the last block and of as many tokens that a draft may lose again. Pages
        end where blocks end, so that a checkpoint has no raw keys."""
        raw = State("index_raw", (2 * self.ratio, self.dim), "slot", "activation", "shift", kept=False)
        return State("index", (self.dim,), "page", "bf16", "derived", tokens_per_entry=self.ratio), raw


def declare(config: Config) -> ModelSpec:
    hidden = config.size("hidden_size")
    residual = HyperConnections(config.size("hc_count"), config.size("hc_lowrank"))
    mixers: dict[str, Block] = {"gdn": _gdn(config), "full": _attention(config)}
    moe, sides = moe_of(config, hidden), dict(_sides(config, hidden, residual.streams))
    kinds = mixer_kinds(config, MIXERS)
    if beyond := sorted(set(sides) - set(range(len(kinds)))):
        raise CheckpointError(f"ple_layer_ids: there is no layer {beyond[0] + 1} of {len(kinds)}; they count from 1")
    layers = tuple(_layer(f"model.layers.{i}", mixers[kind], moe, sides.get(i)) for i, kind in enumerate(kinds))
    drafts = tuple(
        _layer(f"mtp.layers.{i}", mixers["full"], moe) for i in range(config.layers("mtp_num_hidden_layers", 0))
    )
    if config.get("mtp_use_dedicated_embeddings"):
        raise CheckpointError("mtp_use_dedicated_embeddings: draft layers share the model's embedding in what is known")
    config.refuse_unknown(GROUPS)
    return replace(
        ModelSpec.of(config, layers, residual, _draft(hidden, residual, drafts) if drafts else None),
        names=NAMES,
        finish="model.hyper_connection_mixer",
        embedding=("device", "host"),
        unserved=UNSERVED,
    )


def _layer(name: str, mixer: Block, moe: Moe, side: Block | None = None) -> Layer:
    sites = (Site(mixer, READS[0]), Site(moe, READS[1]))
    return Layer(name, (Site(side), *sites) if side else sites)


def _attention(config: Config) -> AttentionSpec:
    own = attention_of(config)
    if (keys := config.get("indexer_kv_heads", 1)) != 1:
        raise CheckpointError(f"indexer_kv_heads is {keys}: one key head is known")
    index = BlockIndex(
        config.size("indexer_n_heads"),
        config.size("indexer_head_dim"),
        config.size("indexer_budget"),
        config.size("indexer_compress_ratio"),
    )
    if index.budget % index.ratio or PAGE % index.ratio:
        raise CheckpointError(
            f"indexer_compress_ratio {index.ratio} must divide indexer_budget {index.budget} and a page's {PAGE} tokens"
        )
    if own.rotary_dim > index.dim:
        raise CheckpointError(f"indexer_head_dim {index.dim} is less than the {own.rotary_dim} channels that turn")
    return replace(own, selector=index)


def _gdn(config: Config) -> GdnSpec:
    gate_type = config.get("output_gate_type") or config.get("hidden_act") or "silu"
    activation = {"swish": "silu"}.get(gate_type, gate_type)
    if activation not in ("sigmoid", "silu"):
        raise CheckpointError(f"output_gate_type {gate_type!r}: sigmoid and silu are known")
    return replace(gdn_of(config), activation=activation)


def _sides(config: Config, hidden: int, streams: int) -> Iterator[tuple[int, NgramInput]]:
    """Layer (counted from 0) and side input. Every table has primes and multipliers of its own."""
    ids = sorted(set(config.get("ple_layer_ids") or ()))
    keys = ("ple_embed_dim", "ple_conv_kernel_size", "ngram_size", "heads_per_ngram", "ngram_vocab_size_base")
    defaults, most = (hidden, 4, 3, 8, 20_000_000), (LARGEST, 64, 16, 64, LARGEST)
    embed, taps, tokens, heads, base = (
        config.size(key, default, most=bound) if ids else config.get(key)
        for key, default, bound in zip(keys, defaults, most, strict=True)
    )
    divisor, seed = config.size("make_ngram_vocab_size_divisible_by", 128), config.get("seed")
    config.get("split_ngram_parts")  # how files cut the table: their own shapes say it
    ends = config.get("eos_token_id")
    eos = ends[0] if isinstance(ends, list) and ends else ends
    if not ids:
        return
    count = (tokens - 1) * heads
    if count < 1 or embed % count:
        raise CheckpointError(f"ple_embed_dim {embed} must divide by {count} n-gram heads")
    if not isinstance(eos, int):
        raise CheckpointError(f"config.json: eos_token_id is {ends!r}; n-grams begin anew behind an end token")
    for table, layer in enumerate(ids):
        rows = head_rows(base, count, table)
        yield (
            layer - 1,
            NgramInput(
                width=streams * hidden,
                embed=embed,
                taps=taps,
                tokens=tokens,
                eos=eos,
                heads=rows,
                rows=-(-sum(rows) // divisor) * divisor,
                multipliers=multipliers(config.size("vocab_size"), tokens, 1234 if seed is None else seed, table),
            ),
        )


def _draft(hidden: int, residual: HyperConnections, layers: tuple[Layer, ...]) -> Draft:
    """Takes all streams before the last read: fc_hidden of each, plus fc_embedding of the token in each."""
    width, kind = residual.streams * hidden, replace(OF_DRAFT, above=1)
    tensors = (
        small("mtp.pre_fc_norm_embedding.weight", (hidden,), "delta"),
        small("mtp.pre_fc_norm_hidden.weight", (width,), "delta"),
        linear("mtp.fc_embedding", hidden, hidden, kind, WHOLE),
        linear("mtp.fc_hidden", hidden, hidden, kind, WHOLE),
    )
    return Draft("stream", width, tensors, layers, "mtp.hyper_connection_mixer")
