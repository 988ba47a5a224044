"""Names and shapes of everything that a checkpoint of a model must hold."""

from __future__ import annotations

from kakera.plan.spec import GdnSpec, ModelSpec

Shapes = dict[str, tuple[int, ...]]


def parameters(spec: ModelSpec, draft: bool = False) -> Shapes:
    """By canonical name: modules for linears and embeddings (rows first, so [O, I]), tensors for everything else.

    Biases and quantisation scales belong to their linear and are not listed. `draft`: with the draft layer.
    """
    found: Shapes = {
        "model.embed_tokens": (spec.vocab, spec.hidden),
        "model.norm.weight": (spec.hidden,),
        "lm_head": (spec.vocab, spec.hidden),
    }
    for i, kind in enumerate(spec.layers):
        found |= _layer(f"model.layers.{i}", spec, spec.gdn if kind == "gdn" else None)
    if draft:
        norms = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
        found |= {f"mtp.{norm}.weight": (spec.hidden,) for norm in norms}
        found |= {"mtp.fc": (spec.hidden, 2 * spec.hidden), **_layer("mtp.layers.0", spec, None)}
    return found


def _layer(name: str, spec: ModelSpec, gdn: GdnSpec | None) -> Shapes:
    mixer, own = ("self_attn", _attention(spec)) if gdn is None else ("linear_attn", _gdn(gdn, spec.hidden))
    return {
        f"{name}.input_layernorm.weight": (spec.hidden,),
        **{f"{name}.{mixer}.{leaf}": shape for leaf, shape in own.items()},
        f"{name}.post_attention_layernorm.weight": (spec.hidden,),
        f"{name}.mlp.gate_proj": (spec.intermediate, spec.hidden),
        f"{name}.mlp.up_proj": (spec.intermediate, spec.hidden),
        f"{name}.mlp.down_proj": (spec.hidden, spec.intermediate),
    }


def _attention(spec: ModelSpec) -> Shapes:
    width, kv_width = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    return {
        "q_proj": (width * (2 if spec.gated else 1), spec.hidden),
        "k_proj": (kv_width, spec.hidden),
        "v_proj": (kv_width, spec.hidden),
        "o_proj": (spec.hidden, width),
        "q_norm.weight": (spec.head_dim,),
        "k_norm.weight": (spec.head_dim,),
    }


def _gdn(gdn: GdnSpec, hidden: int) -> Shapes:
    values = gdn.v_heads * gdn.v_dim
    return {
        "in_proj_qkv": (gdn.conv_channels, hidden),
        "in_proj_z": (values, hidden),
        "in_proj_b": (gdn.v_heads, hidden),
        "in_proj_a": (gdn.v_heads, hidden),
        "out_proj": (hidden, values),
        "conv1d.weight": (gdn.conv_channels, 1, gdn.conv_taps),
        "A_log": (gdn.v_heads,),
        "dt_bias": (gdn.v_heads,),
        "norm.weight": (gdn.v_dim,),
    }
