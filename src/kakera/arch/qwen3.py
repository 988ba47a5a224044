"""Qwen3 (`qwen3`): full attention in every layer, norms of queries and keys, SwiGLU. No torch.

Source: transformers' model type qwen3.
"""

from __future__ import annotations

from kakera.arch.blocks import AttentionSpec, SwiGlu
from kakera.arch.config import Config, short
from kakera.arch.spec import AddNorm, Layer, ModelSpec, Site
from kakera.errors import CheckpointError

READS = ("input_layernorm", "post_attention_layernorm")


def declare(config: Config) -> ModelSpec:
    count = config.layers("num_hidden_layers")
    attention = AttentionSpec.of(config, 1.0, gated=False, norms="scale")
    sites = (Site(attention, READS[0]), Site(SwiGlu(config.size("intermediate_size")), READS[1]))
    kinds = config.get("layer_types") or ["full_attention"] * count
    if list(kinds) != ["full_attention"] * count:
        raise CheckpointError(f"layer_types: {short(kinds)}; kakera computes full_attention in all {count} layers")
    config.refuse_others({"attn_output_gate": (False,)})
    config.refuse_unknown(())
    layers = tuple(Layer(f"model.layers.{i}", sites) for i in range(count))
    return ModelSpec.of(config, layers, AddNorm("scale"))
