"""WeightBytes: how much memory a checkpoint's weights take, coded and decoded, read without loading them. No torch."""

from __future__ import annotations

import math
import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kakera.arch.spec import EMBEDDING, OF_HEAD, ModelSpec
from kakera.arch.stored import TensorHeader, read_config, stored_headers
from kakera.arch.tensors import Tensor

# A CPU holds its linears in fp16 where torch has FBGEMM, which is x86-64 with AVX2, and in fp32 elsewhere.
CPU_LINEAR_BYTES = 2 if platform.machine().lower() in ("x86_64", "amd64") else 4
RANDOM_WEIGHTS = "random_weights"  # key of a config.json whose model has made-up weights: their seed
ROW_SCALE_BYTES = 2  # int8 rows of embedding and head carry one fp16 scale each


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


def from_checkpoint(directory: Path, spec: ModelSpec) -> WeightBytes:
    """Read the headers of all shards; random weights have none. Raises CheckpointError for missing or damaged files."""
    if RANDOM_WEIGHTS in (config := read_config(directory)):
        return from_config(spec, config)
    tensors = stored_headers(directory, spec.names.beside)
    return from_tensors(tensors, spec, source=f"{len(tensors)} tensors of {directory.name or directory}")


def from_tensors(tensors: Iterable[TensorHeader], spec: ModelSpec, source: str) -> WeightBytes:
    """Draft layers and vision towers are not loaded, so they do not count."""
    used = [tensor for tensor in tensors if spec.counts(tensor.name)]
    decoded, decoded_embedding = decoded_bytes(spec)
    table = sum(t.bytes for t in used if spec.names.canonical(t.name).startswith(f"{EMBEDDING}."))
    return WeightBytes(
        coded=sum(t.bytes for t in used),
        decoded=decoded,
        replicated=sum(t.bytes for t in used if len(t.shape) <= 1),
        embedding=0 if spec.tied else table,
        decoded_embedding=decoded_embedding,
        source=source,
    )


def decoded_bytes(spec: ModelSpec) -> tuple[int, int]:
    """(all weights, the embedding that decoding does not read) as a CPU holds them.

    Linears take CPU_LINEAR_BYTES a value; embeddings, a head that is tied to one, norms and convolutions are fp32.
    """
    held = [tensor for tensor in spec.tensors().values() if not tensor.alias]
    decoded = sum(t.count * (CPU_LINEAR_BYTES if t.role == "linear" else 4) for t in held)
    return decoded, 0 if spec.tied else 4 * spec.tensors()[EMBEDDING].count


def from_config(spec: ModelSpec, config: Mapping[str, Any]) -> WeightBytes:
    """The bytes that a checkpoint of this config must have, for planning before a download.

    Escha-W2: exact (the rates of its published mix; int8 embedding and head). EXL3: from its `bits` and `head_bits`,
    and with a head of its own. Otherwise 16-bit weights.
    """
    quantization = config.get("quantization_config") or {}
    method = str(quantization.get("quant_method", ""))
    found = [t for t in spec.tensors().values() if not t.alias or method == "exl3"]
    coded = [t for t in found if t.stored_as(method) in ("escha", "exl3")]
    rest = [t for t in found if t.stored_as(method) in ("int8", "plain")]
    small = [t for t in rest if t.kind is None and t.role != "table"]
    vectors = sum(_vector_bytes(t, method) for t in coded)
    if method == "escha":
        body, source = sum(t.count * t.kind.escha // 8 for t in coded if t.kind), "computed for Escha-W2 of this config"
    elif method == "exl3":
        bits, head_bits = float(quantization["bits"]), float(quantization.get("head_bits", 6))
        head = sum(t.count for t in coded if t.kind == OF_HEAD)
        body = math.ceil((sum(t.count for t in coded) - head) * bits / 8 + head * head_bits / 8)
        source = f"estimated for EXL3 at {bits} bits"
    else:
        body, source = 0, "computed for 16-bit weights of this config"
    decoded, decoded_embedding = decoded_bytes(spec)
    return WeightBytes(
        coded=body + vectors + sum(_row_bytes(t, method) for t in rest),
        decoded=decoded,
        replicated=vectors + 2 * sum(t.count for t in small),
        embedding=0 if spec.tied else _row_bytes(spec.tensors()[EMBEDDING], method),
        decoded_embedding=decoded_embedding,
        source=source,
    )


def _row_bytes(tensor: Tensor, method: str) -> int:
    """Of what no trellis codes: 16 bit, or int8 rows with a scale each."""
    rows = tensor.shape[0] * ROW_SCALE_BYTES
    return tensor.count + rows if tensor.stored_as(method) == "int8" else 2 * tensor.count


def _vector_bytes(tensor: Tensor, method: str) -> int:
    """Escha's rin, s_in; rout, s_out, bias; config. EXL3's suh and svh, a head's left out."""
    outputs, inputs = tensor.shape[-2:]
    matrices = tensor.count // (outputs * inputs)
    if method == "escha":
        return matrices * (6 * inputs + 8 * outputs + 24)
    return 0 if tensor.kind == OF_HEAD else matrices * 2 * (inputs + outputs)
