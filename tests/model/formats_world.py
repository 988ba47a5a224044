"""A small random model in every stored format, and its twin that holds the decoded weights as plain float32."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from model_world import hybrid_config, save_model
from safetensors.torch import load_file, save_file
from tests.quantize.tiny import cheap_encode
from torch import Tensor

from kakera.ops.codec import codebook, trellis
from kakera.quantize.convert import quantize_checkpoint
from kakera.quantize.recipe import Format, Recipe
from kakera.weights.checkpoint import Checkpoint
from tiny_model import byte_tokenizer

PREFIX = "model.language_model."
MUL1 = torch.tensor(codebook.MUL1_MULTIPLIER).to(torch.int32)
NO_BIAS = f"{PREFIX}layers.1.self_attn.k_proj"  # the one Escha linear that gets none
CONFIG = hybrid_config(
    2,
    2,
    vocab_size=384,
    hidden_size=128,
    intermediate_size=256,
    head_dim=64,
    linear_num_key_heads=1,
    linear_num_value_heads=2,
    linear_key_head_dim=64,
    linear_value_head_dim=64,
)
MEAN_BITS = 2.5  # some linears at 2, some at 3
Tensors = dict[str, Tensor]


def write_source(directory: Path) -> Path:
    """The model as transformers saves it, under the names of a multimodal checkpoint, with a tokenizer."""
    save_model(directory, "qwen3_5_text", CONFIG, PREFIX)
    (directory / "tokenizer.json").write_text(json.dumps(byte_tokenizer()))
    return directory


def write_coded(source: Path, out: Path, format: Format) -> Tensors:
    """Quantise without a search; Escha also gets the leaves that only its own exporter writes. Returns all tensors."""
    recipe = Recipe.for_bits(format, MEAN_BITS, Checkpoint.open(source).spec)
    quantize_checkpoint(source, out, recipe, encode=cheap_encode)
    tensors = load_file(out / "model.safetensors")
    if format == "escha":
        tensors |= _escha_extras(tensors)
        write_by_leaf(out, tensors)
    return tensors


def mixed(tensors: Tensors) -> Tensors:
    """An EXL3 model in which rates and codebooks change within the linears of one input, as no one recipe writes it."""
    found, generator = dict(tensors), torch.Generator().manual_seed(6)
    for name, bits in {
        "0.linear_attn.in_proj_z": 1.5,
        "0.mlp.gate_proj": 2.5,
        "0.mlp.up_proj": 2,
        "1.self_attn.q_proj": 3.5,
        "1.self_attn.o_proj": 0,  # 3inst, at the rate it has
    }.items():
        module = f"{PREFIX}layers.{name}"
        del found[f"{module}.mcg"]
        if bits:
            rows, columns, _ = found[f"{module}.trellis"].shape
            code = torch.randint(-(1 << 15), 1 << 15, (rows, columns, int(16 * bits)), generator=generator)
            found |= {f"{module}.trellis": code.to(torch.int16), f"{module}.mul1": MUL1.clone()}
    return found


def write_by_leaf(directory: Path, tensors: Tensors, companions: Path | None = None) -> Path:
    """Two shards and an index, the tensors sorted by leaf name: so the leaves of every linear are spread over both."""
    if companions:
        shutil.copytree(companions, directory, ignore=shutil.ignore_patterns("*.safetensors*"))
    (directory / "model.safetensors").unlink(missing_ok=True)
    names = sorted(tensors, key=lambda name: name.split(".")[-1])
    middle = names.index(next(name for name in names if name.endswith("escha_rin")))
    shards = {"model-00001-of-00002.safetensors": names[:middle], "model-00002-of-00002.safetensors": names[middle:]}
    for file, held in shards.items():
        save_file({name: tensors[name].contiguous() for name in held}, directory / file)
    weight_map = {name: file for file, held in shards.items() for name in held}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


def write_twin(source: Path, out: Path, tensors: Tensors, bias: bool) -> Path:
    """A plain checkpoint whose weights are `tensors`, decoded in float64 straight from the formats' definition."""
    shutil.copytree(source, out, ignore=shutil.ignore_patterns("*.safetensors*"))
    found: Tensors = {}
    for name, tensor in tensors.items():
        module, _, leaf = name.rpartition(".")
        if leaf == "weight_int8":
            scale_O = tensors[f"{module}.weight_scale"].float()
            found[f"{module}.weight"] = (tensor.float() * scale_O[:, None]).half().float()
        elif leaf in ("escha_code", "trellis"):
            book: codebook.Name = "3inst" if leaf == "trellis" else "mcg"
            book = next((flag for flag in ("mcg", "mul1") if f"{module}.{flag}" in tensors), book)
            found[f"{module}.weight"] = _w_eff(tensor, book, *_scales(module, tensors)).float().contiguous()
        elif leaf == "bias" and bias:
            found[name] = tensor.float()
        elif leaf in ("weight", "A_log", "dt_bias"):
            found[name] = tensor
    save_file(found, out / "model.safetensors")
    return out


def _escha_extras(tensors: Tensors) -> Tensors:
    generator = torch.Generator().manual_seed(4)
    extras: Tensors = {}
    for name in tensors:
        module, _, leaf = name.rpartition(".")
        if leaf == "escha_code":
            channels_in, channels_out = (tensors[f"{module}.escha_{side}"].numel() for side in ("rin", "rout"))
            extras[f"{module}.escha_s_in"] = 1 + 0.02 * torch.randn(channels_in, generator=generator)
            extras[f"{module}.escha_s_out"] = 1 + 0.02 * torch.randn(channels_out, generator=generator)
            if module != NO_BIAS:
                extras[f"{module}.bias"] = (0.2 * torch.randn(channels_out, generator=generator)).half()
    return extras


def _scales(module: str, tensors: Tensors) -> tuple[Tensor, Tensor]:
    if f"{module}.trellis" in tensors:
        return tensors[f"{module}.suh"].double(), tensors[f"{module}.svh"].double()
    parts = {leaf: tensors[f"{module}.escha_{leaf}"].double() for leaf in ("rin", "rout", "s_in", "s_out")}
    return parts["rin"] * parts["s_in"], parts["rout"] * parts["s_out"]


def _w_eff(code: Tensor, book: codebook.Name, left_I: Tensor, right_O: Tensor) -> Tensor:
    """diag(right) Hb Wq Hb diag(left) / 128, [O, I], with the Hadamard matrices written out."""
    h = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(7):
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    hb_II, hb_OO = (torch.block_diag(*[h] * (len(scale) // 128)) for scale in (left_I, right_O))
    wq_OI = trellis.decode(code, codebook.table(book, torch.float64))
    return right_O[:, None] * (hb_OO @ wq_OI @ hb_II) * left_I / 128
