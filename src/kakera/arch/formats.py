"""What kakera reads and, by name, what it does not: methods of a config, stored tensors, files. No torch.

A format that is not read is refused before any weight is loaded or downloaded. docs/formats.md says what each holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path, PurePath
from typing import Any

from kakera.arch.config import short
from kakera.arch.spec import ModelSpec
from kakera.arch.stored import TensorHeader
from kakera.errors import CheckpointError

ADVICE = (
    "kakera reads plain weights (bf16, fp16, fp32), EXL3, Escha and int8 rows, in safetensors files: take such a "
    "checkpoint of the model, or make one of its 16-bit original with `kakera quantize`"
)
FLOATS, SCALES, INTEGERS = ("BF16", "F16", "F32"), ("F16", "F32"), ("I32", "I64")

# dtypes by leaf of a tensor's name, FLOATS of those that are not here
DTYPES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("trellis", "escha_code", "su", "sv"), ("I16",)),
    **dict.fromkeys(("suh", "svh", "escha_rin", "escha_rout", "escha_s_in", "escha_s_out", "weight_scale"), SCALES),
    **dict.fromkeys(("mcg", "mul1", "escha_config"), INTEGERS),
    "weight_int8": ("I8",),
}
OURS = {"weight", "bias", "A_log", "dt_bias", *DTYPES}
READ = ("exl3", "escha", "eschamoe")
METHODS = {
    "awq": "AWQ",
    "gptq": "GPTQ",
    "gptq_marlin": "GPTQ",
    "fp8": "FP8",
    "fbgemm_fp8": "FP8 of FBGEMM",
    "compressed-tensors": "compressed-tensors",
    "modelopt": "NVIDIA ModelOpt",
    "modelopt_fp4": "NVFP4 of NVIDIA ModelOpt",
    "nvfp4": "NVFP4",
    "mxfp4": "MXFP4",
    "bitsandbytes": "bitsandbytes",
    "hqq": "HQQ",
    "aqlm": "AQLM",
    "auto-round": "AutoRound",
    "exl2": "EXL2",
    "gguf": "GGUF",
    "mlx": "MLX",
    "quip": "QuIP",
    "quip_sharp": "QuIP#",
    "eetq": "EETQ",
    "vptq": "VPTQ",
    "spqr": "SpQR",
    "bitnet": "BitNet",
}
# formats whose config names no method, by a key of theirs
SIGNS = (
    ("config_groups", "compressed-tensors"),
    ("quant_algo", "modelopt"),
    ("load_in_4bit", "bitsandbytes"),
    ("load_in_8bit", "bitsandbytes"),
    ("w_bit", "awq"),
    ("desc_act", "gptq"),
    ("weight_block_size", "fp8"),
    ("group_size", "mlx"),
)
# and by the end of a tensor's name
TENSORS = (
    ("*.qzeros", "AWQ or GPTQ"),
    ("*.g_idx", "GPTQ"),
    ("*.qweight", "AWQ or GPTQ"),
    ("*.q_weight", "EXL2"),
    ("*.weight_packed", "compressed-tensors"),
    ("*.weight_global_scale", "NVFP4 of compressed-tensors"),
    ("*.weight_scale_inv", "FP8 in blocks"),
    ("*.weight_scale_2", "NVFP4 of NVIDIA ModelOpt"),
    ("*.input_scale", "FP8 or NVFP4"),
    ("*.quant_state.*", "bitsandbytes"),
    ("*.absmax", "bitsandbytes"),
    ("*.SCB", "bitsandbytes"),
    ("*.W_q", "HQQ"),
    ("*.codebooks", "AQLM"),
    ("*.Qidxs*", "QuIP#"),
    ("*_blocks", "MXFP4"),
    ("*.weight._data", "quanto"),
    ("*.centroids.*", "VPTQ"),
    ("*.biases", "MLX"),
    ("*.scales", "AWQ, GPTQ, AQLM or MLX"),
)
KINDS = (("F8_", "FP8"), ("F6_", "FP6"), ("F4", "FP4"))  # by the beginning of a dtype
GGUF = "GGUF"
ENDINGS = {
    **dict.fromkeys((".gguf", ".ggml"), GGUF),
    **dict.fromkeys((".bin", ".pt", ".pth", ".ckpt"), "a PyTorch pickle"),
    **dict.fromkeys((".npz", ".h5", ".msgpack", ".onnx"), "another library's format"),
}
NO_WEIGHTS = ("training_args.bin", "optimizer.*", "scheduler.*", "rng_state*", "scaler.*", "tokenizer*")
ADAPTER = "adapter_model.safetensors"


def refuse_method(config: Mapping[str, Any]) -> None:
    """Raise CheckpointError for a config whose weights are of a format that is not read."""
    text = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        for key in ("quantization_config", "compression_config", "quantization"):
            stated = part.get(key)
            if stated and not isinstance(stated, dict):
                raise CheckpointError(f"config.json: {key} is no JSON object")
            if stated and (method := _method(stated)) not in READ:
                said = f"config.json: the weights are {_named(method, stated)} ({key})"
                raise CheckpointError(f"{said}, which kakera does not read; {ADVICE}")


def _method(stated: Mapping[str, Any]) -> str:
    if said := stated.get("quant_method"):
        return str(said).lower().replace("_tensors", "-tensors").replace("auto_round", "auto-round")
    return next((method for key, method in SIGNS if key in stated), "")


def _named(method: str, stated: Mapping[str, Any]) -> str:
    name = METHODS.get(method) or (f"of the method {short(method)}" if method else "quantised by no method it names")
    kind = stated.get("quant_algo") or stated.get("format")
    return f"{name} {short(kind)}" if isinstance(kind, str) and kind else name


def refuse_tensors(spec: ModelSpec, headers: Iterable[TensorHeader]) -> None:
    """Raise CheckpointError for a stored tensor of a format, or of a dtype, that is not read. The vision tower's are
    not looked at, nor those of a model that can only be planned."""
    if spec.unserved:
        return
    for header in headers:
        if spec.names.canonical(header.name).startswith(spec.names.ignored):
            continue
        leaf = header.name.rpartition(".")[2]
        read = DTYPES.get(leaf, FLOATS)
        if leaf in OURS and header.dtype in read:
            continue
        by_name = [name for end, name in TENSORS if fnmatch(header.name, end)]
        by_dtype = [name for begin, name in KINDS if header.dtype.startswith(begin)]
        if foreign := next(iter(by_name + by_dtype), ""):
            raise CheckpointError(f"{header} ({header.dtype}) is {foreign}, which kakera does not read; {ADVICE}")
        if leaf in OURS:
            raise CheckpointError(
                f"{header} is stored as {header.dtype}; of {leaf!r} kakera reads {' or '.join(read)}; {ADVICE}"
            )


def refuse_file(path: Path) -> None:
    """Raise CheckpointError for a file in place of a model directory, or a name that can only mean one."""
    kind = ENDINGS.get(path.suffix.lower())
    if path.is_dir() or (not path.is_file() and kind != GGUF):
        return
    if kind:
        raise CheckpointError(f"{path} is {kind}, which kakera does not read; {ADVICE}")
    if path.suffix == ".safetensors":
        raise CheckpointError(f"{path} is a file: give its directory, {path.parent}, with config.json and tokenizer")
    raise CheckpointError(f"{path} is a file: give the directory of a model")


def refuse_directory(directory: Path) -> None:
    """As `refuse_files`, of a directory on this disk."""
    try:
        names = [file.name for file in directory.iterdir()]
    except OSError as error:
        raise CheckpointError(f"{directory} can not be read ({error.strerror or error})") from None
    refuse_files(names, str(directory))


def refuse_files(names: Iterable[str], where: str) -> None:
    """Raise CheckpointError if files of these names hold a model's weights, and none in safetensors files. `where`:
    the directory or repository of which they are all."""
    listed = sorted(names)
    weights = [name for name in listed if name.endswith(".safetensors") and PurePath(name).name != ADAPTER]
    if weights:
        return
    if any(PurePath(name).name == ADAPTER for name in listed):
        raise CheckpointError(
            f"{where} holds a LoRA adapter ({ADAPTER}) and no model: merge it into its base model and give that"
        )
    for name, kind in _others(listed):
        raise CheckpointError(f"{where} holds {name}, which is {kind}, and no safetensors files; {ADVICE}")


def _others(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    for name in names:
        kind = ENDINGS.get(PurePath(name).suffix.lower())
        if kind and not any(fnmatch(PurePath(name).name, pattern) for pattern in NO_WEIGHTS):
            yield name, kind
