"""Qwen3.5 (`qwen3_5`, `qwen3_5_text`): Gated DeltaNet and gated full attention, SwiGLU, a draft layer. No torch.

Norms are stored as their distance from 1, but the one inside Gated DeltaNet. The gate of attention is a sigmoid,
whatever `output_gate_type` says. Source: transformers' model type qwen3_5; of the draft layer, exllamav3 and SGLang.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from kakera.arch.blocks import AttentionSpec, Block, GdnSpec, SwiGlu
from kakera.arch.computed import Computed
from kakera.arch.config import Config
from kakera.arch.spec import OF_DRAFT, AddNorm, Draft, Layer, ModelSpec, Site
from kakera.arch.tensors import WHOLE, linear
from kakera.arch.vision import vision_of
from kakera.errors import CheckpointError

MIXERS = {"linear_attention": "gdn", "full_attention": "full"}  # names of config.json

# of attention, always a sigmoid; of the norm inside Gated DeltaNet
GATES: Computed = {"attn_output_gate": (True,), "output_gate_type": ("swish", "silu")}


def declare(config: Config) -> ModelSpec:
    hidden, residual = config.size("hidden_size"), AddNorm("delta")
    full, gdn, mlp = attention_of(config), gdn_of(config), SwiGlu(config.size("intermediate_size"))
    mixers: dict[str, Block] = {"gdn": gdn, "full": full}
    layers = tuple(_layer(f"model.layers.{i}", mixers[kind], mlp) for i, kind in enumerate(mixer_kinds(config)))
    drafts = tuple(_layer(f"mtp.layers.{i}", full, mlp) for i in range(config.layers("mtp_num_hidden_layers", 0)))
    config.refuse_others(GATES if config.get("use_sliding_window") is False else {**GATES, "sliding_window": ()})
    config.refuse_unknown(("linear_",))
    spec = ModelSpec.of(config, layers, residual, _draft(hidden, residual, drafts) if drafts else None)
    try:
        return replace(spec, vision=vision_of(config, full.rotary_dim))
    except (CheckpointError, TypeError) as error:  # the text model is what it is
        return replace(spec, blind=str(error))


def mixer_kinds(config: Config, names: Mapping[str, str] = MIXERS) -> tuple[str, ...]:
    """`gdn` or `full` of every layer, by its name in a config."""
    count = config.layers("num_hidden_layers")
    interval = config.size("full_attention_interval", 4)
    if types := config.get("layer_types"):
        unknown = sorted(set(types) - set(names))
        if unknown or len(types) != count:
            raise CheckpointError(f"layer_types: {len(types)} entries for {count} layers, unknown kinds {unknown}")
        return tuple(names[name] for name in types)
    return tuple("full" if (i + 1) % interval == 0 else "gdn" for i in range(count))


def _layer(name: str, mixer: Block, mlp: Block) -> Layer:
    return Layer(name, (Site(mixer, "input_layernorm"), Site(mlp, "post_attention_layernorm")))


def attention_of(config: Config) -> AttentionSpec:
    return AttentionSpec.of(config, 0.25, gated=True, norms="delta")


def gdn_of(config: Config) -> GdnSpec:
    return GdnSpec(
        k_heads=config.size("linear_num_key_heads"),
        v_heads=config.size("linear_num_value_heads"),
        k_dim=config.size("linear_key_head_dim"),
        v_dim=config.size("linear_value_head_dim"),
        conv_taps=config.size("linear_conv_kernel_dim", 4),
    )


def _draft(hidden: int, residual: AddNorm, layers: tuple[Layer, ...]) -> Draft:
    """Takes the hidden state behind the final norm; `fc` reads the embedding, then that."""
    norms = (residual.read(f"mtp.pre_fc_norm_{part}", hidden) for part in ("embedding", "hidden"))
    fc = linear("mtp.fc", hidden, 2 * hidden, OF_DRAFT, WHOLE)
    return Draft("post-norm", hidden, (*(norm for read in norms for norm in read), fc), layers, "mtp.norm")
