"""Keys of a config.json that change what is computed, each with the values that kakera computes. No torch.

Not here: keys that a declaration reads as sizes or numbers, and keys that change nothing (dropout, initialisers, ids
of special tokens). A key that is absent or null has the value that is computed.
"""

from __future__ import annotations

from typing import Any

Computed = dict[str, tuple[Any, ...]]  # () of keys that must not be there

COMMON: Computed = {
    **dict.fromkeys(("hidden_act", "hidden_activation"), ("silu", "swish")),
    # linears: a bias that is stored is added; that one should be is said nowhere else
    **dict.fromkeys(("attention_bias", "qkv_bias", "use_qkv_bias", "o_bias"), (False,)),
    **dict.fromkeys(("mlp_bias", "use_bias", "bias", "lm_head_bias", "add_bias_linear"), (False,)),
    # attention: causal, over all that came before, of normed queries and keys, scaled by head_dim^-0.5
    **dict.fromkeys(("use_qk_norm", "qk_norm", "use_qk_layernorm", "is_causal"), (True,)),
    **dict.fromkeys(("use_sliding_window", "use_bidirectional_attention", "use_logn_attn"), (False,)),
    **dict.fromkeys(("attn_temperature_tuning", "attention_sinks", "add_cross_attention"), (False,)),
    **dict.fromkeys(("is_encoder_decoder", "use_parallel_residual", "parallel_residual"), (False,)),
    **dict.fromkeys(("attention_chunk_size", "clip_qkv", "query_pre_attn_scalar"), ()),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "logits_soft_cap"), ()),
    **dict.fromkeys(("attention_multiplier", "attention_scale", "softmax_scale"), ()),
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale"), (1,)),
    **dict.fromkeys(("scale_emb", "scale_depth", "dim_model_base", "lm_head_multiplier"), (1,)),
    "num_kv_shared_layers": (0,),
    "mamba_ssm_dtype": ("float32",),  # of the recurrent state
    # positions: rope.py reads what is known
    **dict.fromkeys(("rotary_pct", "rotary_percent", "rotary_dim", "rotary_emb_base", "rotary_base"), ()),
    **dict.fromkeys(("rope_ratio", "rope_scaling_factor", "rope_local_base_freq", "rope_percent"), ()),
    **dict.fromkeys(("no_rope_layers", "no_rope_layer_interval", "nope_layer_interval"), ([], 0)),
    **dict.fromkeys(("rope_interleaved", "rotary_interleaved", "alibi", "use_dynamic_ntk"), (False,)),
    "use_rope": (True,),
    "position_embedding_type": ("rope", "rotary", "absolute"),  # the last is a default that no decoder reads
    # draft layers share the model's embedding
    "mtp_use_dedicated_embeddings": (False,),
}
