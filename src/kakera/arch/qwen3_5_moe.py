"""Qwen3.5 and 3.6 with experts (`qwen3_5_moe`, `qwen3_5_moe_text`): the dense family's mixers and norms, and in every
layer routed experts beside a shared one in place of the MLP. No torch.

* Files store experts stacked (`experts.gate_up_proj`, gate's rows first) or one by one (`experts.7.gate_proj`).
* A draft layer is declared by configs and not here: what Escha's file has of it is not whole, and others found that
  drafts make these models slower. Its tensors may be there and are not loaded.

Source: transformers' model type qwen3_5_moe; of what is stored, Escha's own reader and exllamav3.
"""

from __future__ import annotations

from dataclasses import replace

from kakera.arch.blocks import Block
from kakera.arch.computed import Computed
from kakera.arch.config import Config
from kakera.arch.moe import moe_of
from kakera.arch.qwen3_5 import GATES, attention_of, gdn_of, mixer_kinds
from kakera.arch.spec import AddNorm, Layer, ModelSpec, Site

# a dense layer among the others, or shares that do not add up to 1, are another model
ROUTING: Computed = {"norm_topk_prob": (True,), "decoder_sparse_step": (1,), "mlp_only_layers": ([],)}
GROUPS = ("linear_", "moe_", "num_experts", "shared_expert_")
CPU_ONLY = (
    "kakera computes mixtures of experts (qwen3_5_moe) on a CPU so far (--gpus cpu): it can plan them for cards, and "
    "not serve them there yet"
)


def declare(config: Config) -> ModelSpec:
    hidden = config.size("hidden_size")
    config.refuse_others({**GATES, **ROUTING})
    mixers: dict[str, Block] = {"gdn": gdn_of(config), "full": attention_of(config)}
    moe = moe_of(config, hidden)
    config.layers("mtp_num_hidden_layers", 0)
    layers = tuple(_layer(f"model.layers.{i}", mixers[kind], moe) for i, kind in enumerate(mixer_kinds(config)))
    config.refuse_unknown(GROUPS)
    return replace(ModelSpec.of(config, layers, AddNorm("delta")), cpu_only=CPU_ONLY)


def _layer(name: str, mixer: Block, moe: Block) -> Layer:
    return Layer(name, (Site(mixer, "input_layernorm"), Site(moe, "post_attention_layernorm")))
