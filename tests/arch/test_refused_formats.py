"""What is not read or not computed is refused by name: methods, tensors, files, and keys of a config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kakera.arch.formats import refuse_file, refuse_files, refuse_tensors
from kakera.arch.registry import spec_of
from kakera.arch.stored import TensorHeader
from kakera.errors import CheckpointError
from kakera.plan.known import KNOWN

CONFIG = KNOWN["qwen3.5-9b-bf16"]
QWEN3 = {
    **{key: CONFIG[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "head_dim", "rope_parameters")},
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
}
FOREIGN: list[tuple[dict[str, Any], str]] = [
    ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}, "AWQ"),
    ({"quant_method": "gptq", "bits": 4, "desc_act": False}, "GPTQ"),
    ({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}, "FP8"),
    ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "compressed-tensors 'pack-quantized'"),
    ({"quant_method": "compressed_tensors", "format": "nvfp4-pack-quantized"}, "compressed-tensors 'nvfp4-pack"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "NVIDIA ModelOpt 'NVFP4'"),
    ({"quant_algo": "FP8", "producer": {"name": "modelopt"}}, "NVIDIA ModelOpt 'FP8'"),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
    ({"load_in_8bit": True}, "bitsandbytes"),
    ({"quant_method": "hqq"}, "HQQ"),
    ({"quant_method": "aqlm"}, "AQLM"),
    ({"quant_method": "mxfp4"}, "MXFP4"),
    ({"quant_method": "auto_round", "bits": 4}, "AutoRound"),
    ({"quant_method": "EXL2"}, "EXL2"),
    ({"quant_method": "gguf"}, "GGUF"),
    ({"group_size": 64, "bits": 4, "mode": "affine"}, "MLX"),
    ({"quant_method": "tomorrows"}, "of the method 'tomorrows'"),
    ({"quant_method": 5}, "of the method '5'"),
    ({"bits": 4}, "quantised by no method it names"),
    ({"config_groups": {}, "ignore": []}, "compressed-tensors"),
]


@pytest.mark.parametrize(("stated", "name"), FOREIGN, ids=str)
def test_a_method_that_is_not_read_is_refused_by_name_wherever_the_config_says_it(stated, name):
    words = f"the weights are {name}.*which kakera does not read; kakera reads plain weights"
    for place in (
        {"quantization_config": stated},
        {"compression_config": stated},
        {"quantization": stated},
        {"text_config": {"quantization_config": stated}},
    ):
        for planned in (False, True):
            with pytest.raises(CheckpointError, match=words):
                spec_of({**CONFIG, **place}, planned=planned)


@pytest.mark.parametrize("stated", [None, {}, {"quant_method": "exl3", "bits": 3}, {"quant_method": "escha"}], ids=str)
def test_what_is_read_is_not_refused(stated):
    assert spec_of({**CONFIG, "quantization_config": stated}).hidden == 4096


UP = "model.language_model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    ("name", "dtype", "words"),
    [
        (f"{UP}.qweight", "I32", "is AWQ or GPTQ"),
        (f"{UP}.qzeros", "I32", "is AWQ or GPTQ"),
        (f"{UP}.g_idx", "I32", "is GPTQ"),
        (f"{UP}.scales", "F16", "is AWQ, GPTQ, AQLM or MLX"),
        (f"{UP}.biases", "BF16", "is MLX"),
        (f"{UP}.weight_packed", "U8", "is compressed-tensors"),
        (f"{UP}.weight_scale_inv", "F32", "is FP8 in blocks"),
        (f"{UP}.weight_scale_2", "F32", "is NVFP4 of NVIDIA ModelOpt"),
        (f"{UP}.weight.absmax", "U8", "is bitsandbytes"),
        (f"{UP}.weight.quant_state.bitsandbytes__nf4", "U8", "is bitsandbytes"),
        (f"{UP}.W_q", "U8", "is HQQ"),
        (f"{UP}.codebooks", "F16", "is AQLM"),
        (f"{UP}.q_weight", "I32", "is EXL2"),
        (f"{UP}.weight", "F8_E4M3", "is FP8"),
        (f"{UP}.weight", "F8_E5M2", "is FP8"),
        (f"{UP}.weight", "F4", "is FP4"),
        (f"{UP}.weight", "U32", "is stored as U32; of 'weight' kakera reads BF16 or F16 or F32"),
        (f"{UP}.weight", "I8", "is stored as I8"),
        (f"{UP}.weight", "F64", "is stored as F64"),
        (f"{UP}.bias", "I32", "is stored as I32"),
        (f"{UP}.weight_int8", "U8", "is stored as U8; of 'weight_int8' kakera reads I8"),
        (f"{UP}.weight_scale", "BF16", "of 'weight_scale' kakera reads F16 or F32"),
        (f"{UP}.trellis", "U8", "of 'trellis' kakera reads I16"),
        (f"{UP}.escha_code", "I32", "of 'escha_code' kakera reads I16"),
        ("model.layers.0.linear_attn.A_log", "F64", "is stored as F64"),
        ("model.norm.weight", "I64", "is stored as I64"),
        ("mtp.fc.weight", "F8_E4M3", "is FP8"),
    ],
)
def test_a_tensor_of_another_format_or_dtype_is_refused_with_its_name_and_file(name, dtype, words):
    header = TensorHeader(name, Path("model.safetensors"), dtype, (128, 128), 0, 16384)
    with pytest.raises(CheckpointError, match=words) as refused:
        refuse_tensors(spec_of(CONFIG), [header])
    assert str(refused.value).startswith(f"tensor {name} in model.safetensors")


def test_dtypes_of_our_own_formats_pass_and_the_vision_tower_is_not_looked_at():
    fine = [("weight", t) for t in ("BF16", "F16", "F32")] + [("bias", "F16"), ("A_log", "F32"), ("escha_s_in", "F32")]
    fine += [("trellis", "I16"), ("suh", "F16"), ("mul1", "I32"), ("weight_int8", "I8"), ("weight_scale", "F16")]
    names = [(f"{UP}.{leaf}", dtype) for leaf, dtype in fine] + [("model.visual.blocks.0.attn.qkv.weight", "F8_E4M3")]
    refuse_tensors(spec_of(CONFIG), [TensorHeader(n, Path("x"), t, (1,), 0, 1) for n, t in names])


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (["model-Q4_K_M.gguf", "config.json"], "holds model-Q4_K_M.gguf, which is GGUF, and no safetensors"),
        (["GGUF/model-00001-of-00002.gguf"], "which is GGUF"),
        (["pytorch_model.bin", "training_args.bin"], "holds pytorch_model.bin, which is a PyTorch pickle"),
        (["consolidated.00.pth"], "a PyTorch pickle"),
        (["weights.npz"], "another library's format"),
        (["adapter_model.safetensors", "adapter_config.json"], "a LoRA adapter .* and no model"),
    ],
)
def test_a_directory_without_safetensors_says_what_it_holds(files, words):
    with pytest.raises(CheckpointError, match=f"^owner/name .*{words.removeprefix('holds ')}"):
        refuse_files(files, "owner/name")


@pytest.mark.parametrize(
    "files",
    [
        [],
        ["config.json", "tokenizer.json", "training_args.bin", "optimizer.pt", "rng_state_0.pth"],
        ["model.safetensors", "pytorch_model.bin", "onnx/model.onnx", "model.gguf"],
        ["model-00001-of-00002.safetensors", "adapter_model.safetensors"],
    ],
)
def test_other_files_beside_a_model_are_nobodys_business(files):
    refuse_files(files, "owner/name")


def test_a_file_in_place_of_a_directory_says_what_to_give(tmp_path):
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "notes.txt").touch()
    for path, words in (
        (tmp_path / "no-such.gguf", "is GGUF, which kakera does not read"),
        (tmp_path / "model.safetensors", f"is a file: give its directory, {tmp_path}"),
        (tmp_path / "notes.txt", "is a file: give the directory"),
    ):
        with pytest.raises(CheckpointError, match=words):
            refuse_file(path)
    (tmp_path / "Qwen.gguf").mkdir()
    for path in (
        tmp_path,
        tmp_path / "nothing",
        tmp_path / "Qwen.gguf",
        Path("owner/name-GGUF"),
        Path("owner/model.pt"),
    ):
        refuse_file(path)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("hidden_act", "gelu", "hidden_act is 'gelu' .kakera computes 'silu' or 'swish'"),
        ("activation_function", "relu2", "activation_function is 'relu2' .kakera computes 'silu' or 'swish'"),
        ("attn_scale", 0.5, "attn_scale is 0.5"),
        ("residual_scale", 0.5, "residual_scale is 0.5"),
        ("rope_theta", 5e6, "rope_theta is 10000000.0 in rope_parameters, 5000000.0 beside"),
        ("partial_rotary_factor", 0.5, "partial_rotary_factor is 0.25 in rope_parameters, 0.5 beside"),
        ("attention_bias", True, "attention_bias is True .kakera computes False"),
        ("mlp_bias", True, "mlp_bias is True"),
        ("attn_output_gate", False, "attn_output_gate is False .kakera computes True"),
        ("output_gate_type", "sigmoid", "output_gate_type is 'sigmoid'"),
        ("sliding_window", 4096, "sliding_window is 4096 .kakera computes models without it"),
        ("use_sliding_window", True, "use_sliding_window is True"),
        ("attention_chunk_size", 8192, "attention_chunk_size is 8192"),
        ("layer_types", ["sliding_attention"] * 32, r"unknown kinds \['sliding_attention'\]"),
        ("mamba_ssm_dtype", "bfloat16", "mamba_ssm_dtype is 'bfloat16' .kakera computes 'float32'"),
        ("use_qk_norm", False, "use_qk_norm is False"),
        ("final_logit_softcapping", 30.0, "final_logit_softcapping is 30.0"),
        ("query_pre_attn_scalar", 128, "query_pre_attn_scalar is 128"),
        ("embedding_multiplier", 12.0, "embedding_multiplier is 12.0"),
        ("is_causal", False, "is_causal is False"),
        ("rotary_pct", 0.5, "rotary_pct is 0.5"),
        ("no_rope_layers", [1, 0], "no_rope_layers is"),
        ("mtp_use_dedicated_embeddings", True, "mtp_use_dedicated_embeddings is True"),
        ("tie_word_embeddings", "false", "tie_word_embeddings is 'false'"),
        ("rms_norm_eps", "1e-6", "rms_norm_eps is '1e-6'"),
        ("num_experts_per_tok", 8, "num_experts_per_tok is not known"),
        ("norm_topk_prob", True, "norm_topk_prob is not known"),
        ("kv_lora_rank", 512, "kv_lora_rank is not known"),
        ("mamba_d_state", 16, "mamba_d_state is not known"),
        ("linear_use_gate", 1, "linear_use_gate is not known"),
    ],
)
def test_a_key_that_changes_what_is_computed_is_refused_with_what_kakera_computes(key, value, words):
    with pytest.raises(CheckpointError, match=words):
        spec_of({**CONFIG, key: value})
    with pytest.raises(CheckpointError, match=words):
        spec_of({"model_type": "qwen3_5", "text_config": {**CONFIG, key: value}})


@pytest.mark.parametrize(
    ("key", "value"),
    [("attn_output_gate", True), ("use_sliding_window", True), ("attention_bias", True), ("hidden_act", "relu")],
)
def test_a_model_without_gates_is_held_against_its_own_values(key, value):
    spec_of({**QWEN3, "sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28})
    with pytest.raises(CheckpointError, match=f"{key} is"):
        spec_of({**QWEN3, key: value})
    with pytest.raises(CheckpointError, match="computes full_attention in all 2 layers"):
        spec_of({**QWEN3, "layer_types": ["full_attention", "sliding_attention"]})


def test_keys_that_change_nothing_and_values_that_are_computed_are_no_matter():
    fine: dict[str, Any] = {
        "hidden_act": "silu",
        "attention_bias": False,
        "attn_output_gate": True,
        "output_gate_type": "swish",
        "mamba_ssm_dtype": "float32",
        "attention_dropout": 0.1,
        "initializer_range": 0.02,
        "use_cache": False,
        "sliding_window": 4096,
        "use_sliding_window": False,
        "router_aux_loss_coef": 0.001,
        "pad_token_id": None,
        "mtp_use_dedicated_embeddings": False,
        "chunk_size_feed_forward": 0,
        "architectures": None,
        "attention_chunk_size": None,
        "final_logit_softcapping": None,
        "num_experts": 0,
        "mlp_only_layers": [],
    }
    assert spec_of({**CONFIG, **fine}) == spec_of(CONFIG)
    whole = {"model_type": "qwen3_5", "tie_word_embeddings": True, "text_config": CONFIG}
    assert spec_of(whole).tied and not spec_of({**CONFIG, "tie_word_embeddings": None}).tied
