"""Qwen3 (`qwen3`): full attention in every layer, norms of queries and keys, SwiGLU. No torch.

Source: transformers' model type qwen3.
"""

from __future__ import annotations

from kakera.arch.blocks import AttentionSpec, SwiGlu
from kakera.arch.config import Config
from kakera.arch.spec import AddNorm, Layer, ModelSpec, Site

READS = ("input_layernorm", "post_attention_layernorm")


def declare(config: Config) -> ModelSpec:
    heads = config.size("num_attention_heads")
    head_dim = config.size("head_dim", config.size("hidden_size") // heads)
    attention = AttentionSpec(
        heads=heads,
        kv_heads=config.size("num_key_value_heads"),
        head_dim=head_dim,
        rotary_dim=int(head_dim * config.rope("partial_rotary_factor", 1.0)),
        rope_theta=config.rope("rope_theta", 1e6),
        gated=False,
        norms="scale",
    )
    sites = (Site(attention, READS[0]), Site(SwiGlu(config.size("intermediate_size")), READS[1]))
    config.refuse_unknown(())
    layers = tuple(Layer(f"model.layers.{i}", sites) for i in range(config.layers("num_hidden_layers")))
    return ModelSpec.of(config, layers, AddNorm("scale"))
