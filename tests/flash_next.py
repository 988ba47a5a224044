"""Qwen3.8-Flash-Next for tests: its config, that of its 2.05-bit EXL3 build, and the headers of that build's files.

Values of the public config.json and of the build's headers as its users list them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen4ExpForConditionalGeneration"],
    "model_type": "qwen4_exp",
    "image_token_id": 248056,
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "qwen4_exp_text",
        "vocab_size": 248320,
        "hidden_size": 2560,
        "num_hidden_layers": 48,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "eos_token_id": 248044,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 12,
        "full_attention_interval": 4,
        "num_attention_heads": 24,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "rope_parameters": {
            "rope_theta": 10_000_000,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "mamba_ssm_dtype": "float32",
        "output_gate_type": "sigmoid",
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 640,
        "shared_expert_intermediate_size": 640,
        "router_aux_loss_coef": 0.001,
        "hc_count": 4,
        "hc_lowrank": 320,
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 128,
        "indexer_budget": 2048,
        "indexer_compress_ratio": 4,
        "ple_layer_ids": [2],
        "ple_embed_dim": 2560,
        "ple_conv_kernel_size": 4,
        "ngram_size": 3,
        "heads_per_ngram": 8,
        "ngram_vocab_size_base": 20_000_000,
        "make_ngram_vocab_size_divisible_by": 128,
        "split_ngram_parts": 128,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
    },
    "vision_config": {"depth": 27, "hidden_size": 1152, "out_hidden_size": 2560},
}
EXL3 = {
    "quant_method": "exl3",
    "version": "1.4.4",
    "bits": 2.05,
    "head_bits": 4,
    "mtp_bits": 2,
    "out_scales": "always",
    "codebook": "mul1",
}
BUILD: dict[str, Any] = {**CONFIG, "quantization_config": EXL3}
WIDTHS = {"F16": 2, "BF16": 2, "I16": 2, "I32": 4, "I64": 8}
Header = tuple[str, str, tuple[int, ...]]  # name, dtype, shape


def with_text(**changes: Any) -> dict[str, Any]:
    """The config with other keys of its text model."""
    return {**CONFIG, "text_config": {**CONFIG["text_config"], **changes}}


def without(*keys: str) -> dict[str, Any]:
    return {**CONFIG, "text_config": {k: v for k, v in CONFIG["text_config"].items() if k not in keys}}


def _coded(name: str, outputs: int, inputs: int, bits: int) -> Iterator[Header]:
    yield f"{name}.trellis", "I16", (inputs // 16, outputs // 16, 16 * bits)
    yield f"{name}.suh", "F16", (inputs,)
    yield f"{name}.svh", "F16", (outputs,)
    yield f"{name}.mul1", "I32", ()


def _plain(name: str, *shape: int) -> Iterator[Header]:
    yield f"{name}.weight", "F16", shape


def _read(name: str, inject: bool = True) -> Iterator[Header]:
    yield from _plain(f"{name}.hc_norm", 10240)
    yield from _plain(f"{name}.input_mix_weight_down", 320, 10240)
    yield from _plain(f"{name}.input_mix_weight_up", 10240, 320)
    if inject:
        yield from _plain(f"{name}.block_inject_weight", 4, 10240)


def _layer(name: str, full: bool) -> Iterator[Header]:
    yield from _read(f"{name}.attn_hyper_connection")
    yield from _read(f"{name}.mlp_hyper_connection")
    if full:
        for part, rows, columns in (("q", 12288, 2560), ("k", 512, 2560), ("v", 512, 2560), ("o", 2560, 6144)):
            yield from _coded(f"{name}.self_attn.{part}_proj", rows, columns, 4)
        yield from _coded(f"{name}.self_attn.indexer.index_qk_proj", 640, 2560, 2)
        for part, size in (
            ("q_norm", 256),
            ("k_norm", 256),
            ("indexer.q_layernorm", 128),
            ("indexer.k_layernorm", 128),
        ):
            yield from _plain(f"{name}.self_attn.{part}", size)
    else:
        for part, rows, columns in (("in_proj_qkv", 10240, 2560), ("in_proj_z", 6144, 2560), ("out_proj", 2560, 6144)):
            yield from _coded(f"{name}.linear_attn.{part}", rows, columns, 4)
        for part, shape in (("in_proj_a", (48, 2560)), ("in_proj_b", (48, 2560)), ("norm", (128,))):
            yield from _plain(f"{name}.linear_attn.{part}", *shape)
        yield from _plain(f"{name}.linear_attn.conv1d", 10240, 1, 4)
        yield f"{name}.linear_attn.A_log", "BF16", (48,)
        yield f"{name}.linear_attn.dt_bias", "BF16", (48,)
    yield from _plain(f"{name}.mlp.gate", 512, 2560)
    yield from _plain(f"{name}.mlp.shared_expert_gate", 1, 2560)
    for module, bits in (("shared_expert", 4), *((f"experts.{e}", 2) for e in range(512))):
        for part, rows, columns in (("gate", 640, 2560), ("up", 640, 2560), ("down", 2560, 640)):
            yield from _coded(f"{name}.mlp.{module}.{part}_proj", rows, columns, bits)


def _table(shards: int = 128) -> Iterator[Header]:
    name = "model.language_model.layers.1.ple.ple_embedding.ngram_embedding"
    for shard in range(shards):
        yield f"{name}.shard_{shard}.trellis", "I16", (2_500_012, 41)
    yield f"{name}.head_bias", "F16", (16, 160)
    yield f"{name}.head_offsets", "I64", (16,)
    yield f"{name}.head_vocab_sizes", "I64", (16,)
    yield f"{name}.layer_multipliers", "I64", (3,)


def _files(count: int) -> Iterator[tuple[str, list[Header]]]:
    root = "model.language_model"
    layers = [header for i in range(count) for header in _layer(f"{root}.layers.{i}", i % 4 == 3)]
    yield "model-00001-of-00002.safetensors", layers
    side = [
        *_plain(f"{root}.layers.1.ple.key_proj", 10240, 2560),
        *_plain(f"{root}.layers.1.ple.value_proj", 2560, 2560),
        *_plain(f"{root}.layers.1.ple.conv1d", 10240, 1, 4),
        *(h for part in ("key", "query", "conv") for h in _plain(f"{root}.layers.1.ple.norm_{part}", 10240)),
    ]
    draft = [
        *_layer("mtp.layers.0", True),
        *_coded("mtp.fc_embedding", 2560, 2560, 3),
        *_coded("mtp.fc_hidden", 2560, 2560, 3),
        *_plain("mtp.pre_fc_norm_embedding", 2560),
        *_plain("mtp.pre_fc_norm_hidden", 10240),
    ]
    ends = [
        *_plain(f"{root}.embed_tokens", 248320, 2560),
        *_read(f"{root}.hyper_connection_mixer", inject=False),
        *_coded("lm_head", 248320, 2560, 4),
        ("model.visual.patch_embed.proj.weight", "F16", (1152, 3, 2, 16, 16)),
    ]
    yield "model-00002-of-00002.safetensors", [*side, *ends, *draft]
    yield "mtp_hyper_connection_mixer_patch.safetensors", [*_read("mtp.hyper_connection_mixer", inject=False)]
    yield "ngram_embedding.safetensors", [*_table()]


def of_layers(count: int) -> dict[str, Any]:
    """The 2.05-bit build's config with the first `count` layers only."""
    types = CONFIG["text_config"]["layer_types"][:count]
    return {**with_text(num_hidden_layers=count, layer_types=types), "quantization_config": EXL3}


def write_headers(directory: Path, layers: int = 4) -> None:
    """The 2.05-bit build of the first layers, as files of nothing but headers: 30 GB that take no room on the disk. Its
    index does not name the table and the draft's last mixer."""
    index = {}
    for file, headers in _files(layers):
        entries, end = {}, 0
        for name, dtype, shape in headers:
            size = math.prod(shape) * WIDTHS[dtype]
            entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": (end, end + size)}
            end += size
        document = json.dumps(entries).encode()
        with (directory / file).open("wb") as out:
            out.write(len(document).to_bytes(8, "little") + document)
            out.truncate(8 + len(document) + end)
        if file.startswith("model-"):
            index |= {name: file for name, _, _ in headers}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (directory / "config.json").write_text(json.dumps(of_layers(layers)))
