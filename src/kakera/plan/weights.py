"""WeightBytes: how much memory a checkpoint's weights take, coded and decoded, read without loading them. No torch."""

from __future__ import annotations

import json
import math
import platform
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kakera.errors import CheckpointError
from kakera.plan.spec import ModelSpec

HEADER_LIMIT = 100_000_000  # the safetensors format's own limit
DTYPE_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
# A CPU holds its linears in fp16 where torch has FBGEMM, which is x86-64 with AVX2, and in fp32 elsewhere.
CPU_LINEAR_BYTES = 2 if platform.machine().lower() in ("x86_64", "amd64") else 4
ESCHA_BITS = {"up_proj": 3, "down_proj": 3}  # a weight; 2 for the other linears
RANDOM_WEIGHTS = "random_weights"  # key of a config.json whose model has made-up weights: their seed
ROW_SCALE_BYTES = 2  # int8 rows of embedding and head carry one fp16 scale each


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a safetensors header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True)
class WeightBytes:
    """`coded` is what a GPU holds (the bytes of the files), `decoded` what a CPU holds after loading.

    `replicated` of `coded` is held by every rank of a tensor-parallel group (vectors: norms, scales);
    `embedding` is the row look-up, which a decode step does not read. `source` says where the figures come from.
    """

    coded: int
    decoded: int
    replicated: int
    embedding: int
    decoded_embedding: int
    source: str

    def on_device(self, device: str, ranks: int) -> int:
        """Bytes on one device. A CPU is one rank."""
        if device == "cpu":
            return self.decoded
        return self.replicated + -(-(self.coded - self.replicated) // ranks)

    def read_per_token(self, device: str, ranks: int) -> int:
        """Bytes of weights that one device reads for one decode step."""
        if device == "cpu":
            return self.decoded - self.decoded_embedding
        return self.on_device(device, ranks) - self.embedding // ranks


def read_header(path: Path) -> list[TensorInfo]:
    """Tensors of one safetensors file from its JSON header. Raises CheckpointError if the file is damaged."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else HEADER_LIMIT + 1
        if length > HEADER_LIMIT or 8 + length > size:
            raise CheckpointError(f"{path} is not a safetensors file or is cut off ({size} bytes); download it again")
        try:
            header = json.loads(file.read(length))
            tensors = [_tensor(name, entry) for name, entry in header.items() if name != "__metadata__"]
            end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path}: the safetensors header can not be read ({error})") from None
    if 8 + length + end > size:
        raise CheckpointError(
            f"{path} is cut off: {size} bytes, its header promises {8 + length + end}; download it again"
        )
    return tensors


def _tensor(name: str, entry: Mapping[str, Any]) -> TensorInfo:
    begin, end = entry["data_offsets"]
    return TensorInfo(name, entry["dtype"], tuple(entry["shape"]), end - begin)


def read_config(directory: Path) -> dict[str, Any]:
    """config.json of a model directory, {} if there is none. ModelSpec.load says what is wrong with one."""
    path = directory / "config.json"
    config: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return config


def checkpoint_files(directory: Path) -> list[Path]:
    """model.safetensors, or the shards that the index names. Raises CheckpointError naming what is missing."""
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise CheckpointError(f"{directory} has neither {single.name} nor {index.name}: it has no weights")
    try:
        files = sorted({directory / name for name in json.loads(index.read_text())["weight_map"].values()})
    except (ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{index} can not be read ({error!r})") from None
    if missing := [file.name for file in files if not file.is_file()]:
        raise CheckpointError(f"{directory} lacks {', '.join(missing)}, which its index names; download it again")
    return files


def from_checkpoint(directory: Path, spec: ModelSpec) -> WeightBytes:
    """Read the headers of all shards; random weights have none. Raises CheckpointError for missing or damaged files."""
    if RANDOM_WEIGHTS in (config := read_config(directory)):
        return from_config(spec, config)
    tensors = [tensor for file in checkpoint_files(directory) for tensor in read_header(file)]
    return from_tensors(tensors, spec, source=f"{len(tensors)} tensors of {directory.name or directory}")


def from_tensors(tensors: Iterable[TensorInfo], spec: ModelSpec, source: str) -> WeightBytes:
    """Draft layers and vision towers are not loaded, so they do not count."""
    used = [t for t in tensors if not t.name.startswith("mtp.") and "visual." not in t.name]
    decoded, decoded_embedding = decoded_bytes(spec)
    embedding = sum(t.bytes for t in used if "embed_tokens" in t.name)
    return WeightBytes(
        coded=sum(t.bytes for t in used),
        decoded=decoded,
        replicated=sum(t.bytes for t in used if len(t.shape) <= 1),
        embedding=0 if spec.tied else embedding,
        decoded_embedding=decoded_embedding,
        source=source,
    )


def linears(spec: ModelSpec) -> list[tuple[str, int, int, int]]:
    """(name, input channels, output channels, count) of every large linear of the decoder layers."""
    width, kv_width = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    full, layers = len(spec.full_layers), len(spec.layers)
    found = [
        ("gate_proj", spec.hidden, spec.intermediate, layers),
        ("up_proj", spec.hidden, spec.intermediate, layers),
        ("down_proj", spec.intermediate, spec.hidden, layers),
        ("q_proj", spec.hidden, width * (2 if spec.gated else 1), full),
        ("k_proj", spec.hidden, kv_width, full),
        ("v_proj", spec.hidden, kv_width, full),
        ("o_proj", width, spec.hidden, full),
    ]
    if spec.gdn is not None:
        values, count = spec.gdn.v_heads * spec.gdn.v_dim, len(spec.gdn_layers)
        found += [
            ("in_proj_qkv", spec.hidden, spec.gdn.conv_channels, count),
            ("in_proj_z", spec.hidden, values, count),
            ("out_proj", values, spec.hidden, count),
        ]
    return found


def small_values(spec: ModelSpec) -> int:
    """Values that no format codes: norms, convolutions, gates."""
    layers = len(spec.layers)
    count = spec.hidden * (2 * layers + 1) + 2 * spec.head_dim * len(spec.full_layers)
    if spec.gdn is not None:
        g = spec.gdn
        per_layer = g.conv_taps * g.conv_channels + 2 * g.v_heads + g.v_dim
        count += per_layer * len(spec.gdn_layers) + gate_values(spec)
    return count


def gate_values(spec: ModelSpec) -> int:
    """Values of the small linears of Gated DeltaNet, b and a, which are fused with the large ones."""
    return 2 * spec.gdn.v_heads * spec.hidden * len(spec.gdn_layers) if spec.gdn else 0


def decoded_bytes(spec: ModelSpec) -> tuple[int, int]:
    """(all weights, the embedding that decoding does not read) as a CPU holds them.

    Linears take CPU_LINEAR_BYTES a value; embeddings, a head that is tied to one, norms and convolutions are fp32.
    """
    table, gates = spec.vocab * spec.hidden, gate_values(spec)
    in_linears = sum(i * o * n for _, i, o, n in linears(spec)) + gates + (0 if spec.tied else table)
    decoded = CPU_LINEAR_BYTES * in_linears + 4 * (small_values(spec) - gates + table)
    return decoded, 0 if spec.tied else 4 * table


def from_config(spec: ModelSpec, config: Mapping[str, Any]) -> WeightBytes:
    """The bytes that a checkpoint of this config must have, for planning before a download.

    Escha-W2: exact (3 bits for up and down, else 2; int8 embedding and head). EXL3: from its `bits` and `head_bits`.
    Otherwise 16-bit weights.
    """
    quantization = config.get("quantization_config") or {}
    method = str(quantization.get("quant_method", ""))
    tables = 1 if spec.tied else 2
    table = spec.vocab * spec.hidden
    small = 2 * small_values(spec)
    if method == "escha":
        body = sum(i * o * ESCHA_BITS.get(name, 2) // 8 * n for name, i, o, n in linears(spec))
        vectors = sum((6 * i + 8 * o + 24) * n for _, i, o, n in linears(spec))  # rin, s_in; rout, s_out, bias; config
        rows = table + spec.vocab * ROW_SCALE_BYTES
        coded, embedding, source = body + vectors + small + rows * tables, rows, "computed for Escha-W2 of this config"
    elif method == "exl3":
        bits, head_bits = float(quantization["bits"]), float(quantization.get("head_bits", 6))
        body = math.ceil(sum(i * o * n for _, i, o, n in linears(spec)) * bits / 8 + table * head_bits / 8)
        vectors = sum(2 * (i + o) * n for _, i, o, n in linears(spec))
        coded, embedding = body + vectors + small + 2 * table, 2 * table
        source = f"estimated for EXL3 at {bits} bits"
    else:
        vectors = 0
        coded = 2 * (sum(i * o * n for _, i, o, n in linears(spec)) + table * tables) + small
        embedding, source = 2 * table, "computed for 16-bit weights of this config"
    decoded, decoded_embedding = decoded_bytes(spec)
    return WeightBytes(coded, decoded, vectors + small, 0 if spec.tied else embedding, decoded_embedding, source)
