"""Rotations and centres of keys and values, per layer and KV head: the default Hadamard, and rotation files.

Key' = (key - centre) R after RoPE and query' = query R leave softmax unchanged: R cancels, and a fixed centre shifts
all logits of a query alike. Value' = (value - centre) R, output = output' R^T + centre. Everything in the cache, the
16-bit window included, lives in this rotated frame (the INT2 KV notes, "Application at run time").

A graded rotation (`kakera calibrate`) leaves dims in falling order of variance, and the codec spends its bits there.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kakera.arch.spec import ModelSpec
from kakera.errors import CheckpointError

ORTHOGONAL_TOLERANCE = 1e-3  # of R^T R - I; published fp32 files are at 3e-8, a bf16 copy at about 4e-3
FILE_NAMES = {"k": "k_rotation.pt", "v": "v_rotation.pt"}


@dataclass(frozen=True)
class Frame:
    """The frame of keys, or of values.

    rotation_LKDD: float32 [full layers, kv_heads, D, D], applied to row vectors from the right; None is the normalised
    Hadamard matrix, by its fast transform. centre_LKD: float32 [full layers, kv_heads, D], in the model's own frame.
    """

    rotation_LKDD: Tensor | None
    centre_LKD: Tensor

    def turn(self, layer: int, x_KMD: Tensor) -> Tensor:
        """Centred keys or values, or the queries that read those keys, into the frame."""
        if self.rotation_LKDD is None:
            return fast_hadamard(x_KMD)
        return torch.bmm(x_KMD, self.rotation_LKDD[layer])

    def turn_back(self, layer: int, x_KMD: Tensor) -> Tensor:
        """The inverse of `turn`."""
        if self.rotation_LKDD is None:
            return fast_hadamard(x_KMD)  # its own inverse
        return torch.bmm(x_KMD, self.rotation_LKDD[layer].mT)

    def turn_rows(self, layer: int, x_TKMD: Tensor) -> Tensor:
        """`turn` of several tokens, each with the bits that it has alone."""
        if self.rotation_LKDD is None:
            return fast_hadamard(x_TKMD)
        return torch.stack([self.turn(layer, x_KMD) for x_KMD in x_TKMD])

    def turn_rows_back(self, layer: int, x_TKMD: Tensor) -> Tensor:
        """The inverse of `turn_rows`."""
        if self.rotation_LKDD is None:
            return fast_hadamard(x_TKMD)
        return torch.stack([self.turn_back(layer, x_KMD) for x_KMD in x_TKMD])

    def dense(self) -> Tensor:
        """The rotation as [full layers, kv_heads, D, D], whatever its form."""
        if self.rotation_LKDD is not None:
            return self.rotation_LKDD
        return hadamard_matrix(self.centre_LKD.shape[-1]).expand(*self.centre_LKD.shape, -1)

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.centre_LKD,) if self.rotation_LKDD is None else (self.rotation_LKDD, self.centre_LKD)

    def of_heads(self, heads: slice) -> Frame:
        """What a rank that has these KV heads needs."""
        rotation_LKDD = None if self.rotation_LKDD is None else self.rotation_LKDD[:, heads].contiguous()
        return Frame(rotation_LKDD, self.centre_LKD[:, heads].contiguous())

    def to(self, device: torch.device | str) -> Frame:
        rotation_LKDD = None if self.rotation_LKDD is None else self.rotation_LKDD.to(device)
        return Frame(rotation_LKDD, self.centre_LKD.to(device))


@dataclass(frozen=True)
class Rotation:
    """The frames of keys and values of one model. `graded`: coded by `codec.encode_graded`."""

    k: Frame
    v: Frame
    graded: bool = False

    @property
    def hash(self) -> bytes:
        """32 bytes that tell two rotations apart: part of the prefix cache's salt, since pages depend on it."""
        digest = hashlib.sha256(b"graded" if self.graded else b"")
        for tensor in (*self.k.tensors(), *self.v.tensors()):
            digest.update(repr(tuple(tensor.shape)).encode() + tensor.float().cpu().contiguous().numpy().tobytes())
        return digest.digest()

    @property
    def hadamard_only(self) -> bool:
        """Whether both matrices are Hadamard's and codes are even; centres may be any."""
        return not self.graded and self.k.rotation_LKDD is None and self.v.rotation_LKDD is None

    def check(self, spec: ModelSpec) -> None:
        """Raises CheckpointError if the shapes are those of another model."""
        shape = (spec.kv_layers, spec.kv_heads, spec.head_dim)
        for frame in (self.k, self.v):
            rotation_LKDD, found = frame.rotation_LKDD, tuple(frame.centre_LKD.shape)
            if found != shape or (rotation_LKDD is not None and rotation_LKDD.shape != (*shape, spec.head_dim)):
                raise CheckpointError(f"the rotation is for {found} layers, KV heads and dims; this model has {shape}")

    def of_rank(self, spec: ModelSpec, rank: int, ranks: int) -> Rotation:
        """Of the KV heads that a rank of `spec`, the whole model, holds. Files are of the whole model."""
        (heads,) = next(state for state in spec.states if state.dtype == "codec").shard.parts(rank, ranks)
        return Rotation(self.k.of_heads(slice(*heads)), self.v.of_heads(slice(*heads)), self.graded)

    def to(self, device: torch.device | str) -> Rotation:
        return Rotation(self.k.to(device), self.v.to(device), self.graded)

    @staticmethod
    def hadamard(spec: ModelSpec) -> Rotation:
        """The normalised Sylvester Hadamard matrix for every head, no centres. head_dim must be a power of two."""
        frame = Frame(None, torch.zeros(spec.kv_layers, spec.kv_heads, spec.head_dim))
        return Rotation(frame, frame)

    @staticmethod
    def load(path: Path, spec: ModelSpec) -> Rotation:
        """Read a directory with one `k_rotation*.pt` and one `v_rotation*.pt`. Raises CheckpointError."""
        records = [_read(_find(path, name)) for name in FILE_NAMES]
        graded = {bool(record.get("graded")) for _, record in records}
        if len(graded) > 1:
            raise CheckpointError(f"{path}: one of the two rotations is graded and the other is not; use a pair")
        k, v = (_frame(file, record, spec) for file, record in records)
        return Rotation(k, v, graded.pop())

    def save(self, directory: Path, spec: ModelSpec, objective: str) -> None:
        """Write both files in format 2 (one matrix per KV head), with a `centre` beside each rotation."""
        directory.mkdir(parents=True, exist_ok=True)
        for name, frame in (("k", self.k), ("v", self.v)):
            rotation_LKDD = frame.dense().cpu()
            layers = {
                layer: {
                    "layer_id": layer,
                    "rotation": rotation_LKDD[i].clone(),
                    "centre": frame.centre_LKD[i].cpu().clone(),
                }
                for i, layer in enumerate(spec.full_layers)
            }
            record = {
                "format_version": 2,
                "objective": objective,
                "source_grouping": "head",
                "graded": self.graded,
                "layers": layers,
            }
            torch.save(record, directory / FILE_NAMES[name])


def hadamard_matrix(size: int) -> Tensor:
    """Sylvester's construction divided by sqrt(size): symmetric and its own inverse. float32 [size, size]."""
    if size < 1 or size & (size - 1):
        raise ValueError(f"a Hadamard matrix of size {size} has no Sylvester construction; a power of two is needed")
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)), 0)
    return matrix.div_(size**0.5)


def fast_hadamard(x: Tensor) -> Tensor:
    """x [..., D] times `hadamard_matrix(D)`, as two small factors: H_D = H_a (x) H_b with D = a b.

    For 256 dims 8 thousand products a vector instead of 65 thousand, and 1 KiB of matrix instead of 256. Every vector
    is a product of its own, so its bits do not depend on how many there are.
    """
    left, right = _hadamard_factors(x.shape[-1], x.device)
    grids = x.reshape(-1, len(left), len(right))
    grids = torch.bmm(grids, right.expand(len(grids), -1, -1))
    return torch.bmm(left.expand(len(grids), -1, -1), grids).view(x.shape)


@cache
def _hadamard_factors(size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """H_a with entries +-1 and H_b with +-1 / sqrt(size): no rounding where sqrt(size) is a power of two."""
    bits = size.bit_length() - 1
    left, right = (hadamard_matrix(1 << n).sign() for n in (bits // 2, bits - bits // 2))
    return left.to(device), (right / size**0.5).to(device)


def _find(directory: Path, name: str) -> Path:
    found = sorted(directory.glob(f"{name}_rotation*.pt"))
    if len(found) != 1:
        raise CheckpointError(
            f"{directory} holds {len(found)} files named {name}_rotation*.pt; a rotation directory needs exactly one"
        )
    return found[0]


def _read(path: Path) -> tuple[Path, dict[str, Any]]:
    try:
        record = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises a dozen unrelated types for a damaged or hostile file
        raise CheckpointError(f"{path}: not a readable rotation file ({error})") from None
    if not isinstance(record, dict) or not isinstance(record.get("layers"), dict):
        raise CheckpointError(f"{path}: a rotation file holds a dict with the key 'layers'")
    if record.get("format_version") not in (1, 2):
        raise CheckpointError(f"{path}: format_version {record.get('format_version')!r} is not known; 1 and 2 are")
    return path, record


def _frame(path: Path, record: dict[str, Any], spec: ModelSpec) -> Frame:
    """Formats 1 ([D, D] shared by the heads of a layer) and 2 ([kv_heads, D, D]); layer ids are ints or strings."""
    layers = {str(layer): entry for layer, entry in record["layers"].items()}
    missing = [layer for layer in spec.full_layers if str(layer) not in layers]
    if missing:
        raise CheckpointError(f"{path}: no rotation for the full-attention layers {missing} of this model")
    entries = [(layer, layers[str(layer)]) for layer in spec.full_layers]
    plain = [{"rotation": hadamard_matrix(spec.head_dim)}] * (spec.kv_layers - len(entries))  # nobody calibrates drafts
    entries += [(-1, entry) for entry in plain]
    rotation_LKDD = torch.stack([_matrix(path, layer, entry, spec) for layer, entry in entries])
    centre_LKD = torch.stack([_centre(path, layer, entry, spec) for layer, entry in entries])
    fast = torch.allclose(rotation_LKDD, hadamard_matrix(spec.head_dim).expand_as(rotation_LKDD), rtol=0, atol=1e-6)
    return Frame(None if fast else rotation_LKDD, centre_LKD)


def _matrix(path: Path, layer: int, entry: Any, spec: ModelSpec) -> Tensor:
    matrix = entry.get("rotation") if isinstance(entry, dict) else None
    shape = (spec.kv_heads, spec.head_dim, spec.head_dim)
    if not isinstance(matrix, Tensor) or tuple(matrix.shape) not in (shape, shape[1:]):
        found = tuple(matrix.shape) if isinstance(matrix, Tensor) else type(matrix).__name__
        raise CheckpointError(f"{path}: layer {layer} has a rotation of shape {found}; this model needs {shape}")
    matrix = matrix.float().expand(shape).contiguous()
    error = (matrix.transpose(1, 2) @ matrix - torch.eye(spec.head_dim)).abs().max().item()
    if not error <= ORTHOGONAL_TOLERANCE:
        raise CheckpointError(f"{path}: the rotation of layer {layer} is not orthogonal (off by {error:.2g})")
    return matrix


def _centre(path: Path, layer: int, entry: dict[str, Any], spec: ModelSpec) -> Tensor:
    shape = (spec.kv_heads, spec.head_dim)
    centre = entry.get("centre")
    if centre is None:
        return torch.zeros(shape)
    if not isinstance(centre, Tensor) or tuple(centre.shape) != shape or not centre.isfinite().all():
        raise CheckpointError(f"{path}: the centre of layer {layer} must be finite and of shape {shape}")
    return centre.float()
