"""Qwen3.8-27B-Escha-W2 as metadata: files with real headers and no data, which take no disk."""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from kakera.arch.registry import load_spec
from kakera.weights.checkpoint import Checkpoint

PAYLOAD_BYTES = 10_152_675_712  # of the published shards, without their two headers
DRAFT_BYTES = 849_400_408 - 1_624  # of the published draft file, without its header
HIDDEN, INNER, VOCAB, LAYERS = 5120, 17408, 248320, 64
TEXT_CONFIG = {
    "model_type": "qwen3_5_text",
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "attn_output_gate": True,
    "intermediate_size": INNER,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_num_value_heads": 48,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262144,
    "rope_parameters": {
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
        "rope_type": "default",
    },
    "tie_word_embeddings": False,
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "mamba_ssm_dtype": "float32",
    "output_gate_type": "swish",
    "bos_token_id": 248044,
    "eos_token_id": 248044,
}
CONFIG = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "text_config": TEXT_CONFIG,
    "vision_config": {"depth": 27},
    "tie_word_embeddings": False,
    "quantization_config": {"quant_method": "escha", "format_version": "2.0", "bits": 2.0, "int8_embedding": True},
}
MLP = {"mlp.gate_proj": (HIDDEN, INNER, 2), "mlp.up_proj": (HIDDEN, INNER, 3), "mlp.down_proj": (INNER, HIDDEN, 3)}
ATTENTION = {
    "self_attn.q_proj": (HIDDEN, 12288, 2),
    "self_attn.k_proj": (HIDDEN, 1024, 2),
    "self_attn.v_proj": (HIDDEN, 1024, 2),
    "self_attn.o_proj": (6144, HIDDEN, 2),
}
GDN = {
    "linear_attn.in_proj_qkv": (HIDDEN, 10240, 2),
    "linear_attn.in_proj_z": (HIDDEN, 6144, 2),
    "linear_attn.out_proj": (6144, HIDDEN, 2),
}
GDN_PLAIN = {
    "in_proj_a.weight": (48, HIDDEN),
    "in_proj_b.weight": (48, HIDDEN),
    "conv1d.weight": (10240, 1, 4),
    "A_log": (48,),
    "dt_bias": (48,),
    "norm.weight": (128,),
}
Header = dict[str, tuple[str, tuple[int, ...]]]  # name -> dtype and shape


def escha(name: str, i: int, o: int, bits: int) -> Header:
    return {
        f"{name}.escha_code": ("I16", (i // 16, o // 16, 16 * bits)),
        f"{name}.escha_rin": ("F16", (i,)),
        f"{name}.escha_rout": ("F16", (o,)),
        f"{name}.escha_s_in": ("F32", (i,)),
        f"{name}.escha_s_out": ("F32", (o,)),
        f"{name}.escha_config": ("I32", (6,)),
        f"{name}.bias": ("F16", (o,)),
    }


def published() -> Header:
    """All tensors of the two shards."""
    prefix = "model.language_model."
    header: Header = {f"{prefix}norm.weight": ("F16", (HIDDEN,))}
    for table in (f"{prefix}embed_tokens", "lm_head"):
        header |= {f"{table}.weight_int8": ("I8", (VOCAB, HIDDEN)), f"{table}.weight_scale": ("F16", (VOCAB,))}
    for number, kind in enumerate(TEXT_CONFIG["layer_types"]):
        layer = f"{prefix}layers.{number}."
        full = kind == "full_attention"
        for name, (i, o, bits) in (MLP | (ATTENTION if full else GDN)).items():
            header |= escha(layer + name, i, o, bits)
        header |= {f"{layer}{norm}_layernorm.weight": ("F16", (HIDDEN,)) for norm in ("input", "post_attention")}
        if full:
            header |= {f"{layer}self_attn.{norm}_norm.weight": ("F16", (256,)) for norm in "qk"}
        else:
            header |= {f"{layer}linear_attn.{name}": ("F16", shape) for name, shape in GDN_PLAIN.items()}
    return header


def draft() -> Header:
    """All tensors of mtp/model.safetensors."""
    layer = "mtp.layers.0."
    header: Header = {f"{layer}{name}.weight": ("F16", (o, i)) for name, (i, o, _) in (MLP | ATTENTION).items()}
    header |= {f"{layer}{norm}_layernorm.weight": ("F16", (HIDDEN,)) for norm in ("input", "post_attention")}
    header |= {f"{layer}self_attn.{norm}_norm.weight": ("F16", (256,)) for norm in "qk"}
    norms = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    return header | {f"mtp.{n}.weight": ("F16", (HIDDEN,)) for n in norms} | {"mtp.fc.weight": ("F16", (HIDDEN, 10240))}


def write_sparse(path: Path, header: Header) -> None:
    """A safetensors file of the right length whose data is a hole."""
    sizes = {"I8": 1, "F16": 2, "I16": 2, "F32": 4, "I32": 4}
    entries, end = {}, 0
    for name, (dtype, shape) in header.items():
        begin, end = end, end + sizes[dtype] * math.prod(shape)
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(entries).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    os.truncate(path, 8 + len(text) + end)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("published")
    (path / "config.json").write_text(json.dumps(CONFIG))
    header = published()
    names = sorted(header, key=lambda name: name.split(".")[-1])  # as published: shards by leaf, not by layer
    weight_map = {}
    for number, held in enumerate((names[:1600], names[1600:]), 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        write_sparse(path / file, {name: header[name] for name in held})
        weight_map |= dict.fromkeys(held, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (path / "mtp").mkdir()
    write_sparse(path / "mtp" / "model.safetensors", draft())
    return path


def test_every_name_and_shape_is_what_the_model_asks_for(directory):
    assert len(published()) == 3253
    assert sum(file.stat().st_blocks * 512 for file in directory.glob("**/*.safetensors")) < 2_000_000
    checkpoint = Checkpoint.open(directory, escha_bias=True)
    expected = {name: tensor.shape for name, tensor in checkpoint.spec.tensors(draft=True).items()}
    checkpoint.check_complete(expected)
    entries = checkpoint.entries()
    assert {e.name.removesuffix(".weight"): e.shape for e in entries} == {
        name.removesuffix(".weight"): shape for name, shape in expected.items()
    }
    kinds = Counter(e.kind for e in entries if not e.name.startswith("mtp."))
    assert kinds == {"escha": 400, "int8": 2, "plain": 129 + 32 + 48 * 6}


def test_bytes_add_up_to_the_published_files(directory):
    entries = Checkpoint.open(directory).entries()
    drafts = [e.bytes for e in entries if e.name.startswith("mtp.")]
    assert (len(drafts), sum(drafts)) == (15, DRAFT_BYTES)
    assert sum(e.bytes for e in entries) - sum(drafts) == PAYLOAD_BYTES
    coded = [e for e in entries if e.kind == "escha"]
    assert sum(math.prod(e.shape) for e in coded) == 24_326_963_200


def test_plan_of_the_directory_fits_two_12_gb_cards(directory):
    command = [sys.executable, "-m", "kakera.cli", "plan", str(directory), "--json", "--gpus", "12GB,12GB"]
    done = subprocess.run([*command, "--context", "262144"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["context"] == 262144
    spec = load_spec(directory)
    from kakera.plan import weights

    assert weights.from_checkpoint(directory, spec).coded == PAYLOAD_BYTES
    assert weights.from_config(spec, CONFIG).coded == PAYLOAD_BYTES
