"""WeightBytes: how much memory a checkpoint's weights take, coded and decoded, read without loading them. No torch."""

from __future__ import annotations

import math
import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from kakera.arch.formats import refuse_tensors
from kakera.arch.parts import is_coded, leaf_shard, of_first
from kakera.arch.shard import can_share
from kakera.arch.spec import EMBEDDING, ModelSpec
from kakera.arch.stored import TensorHeader, read_config, stored_headers
from kakera.arch.tensors import BLOCK, WHOLE, Place, Shard, Tensor, by_rows
from kakera.arch.tower_files import tower_headers, with_tower
from kakera.arch.weigh import Quantization, by_tensor, tower_bytes
from kakera.errors import CheckpointError
from kakera.target.target import Target

# A CPU holds its linears in fp16 where torch has FBGEMM, which is x86-64 with AVX2, and in fp32 elsewhere.
CPU_LINEAR_BYTES = 2 if platform.machine().lower() in ("x86_64", "amd64") else 4
RANDOM_WEIGHTS = "random_weights"  # key of a config.json whose model has made-up weights: their seed


@dataclass(frozen=True)
class Part:
    """Weights that may lie apart from the others: `places`, best first. `shares`: bytes as stored, by how ranks share
    them; `decoded`: bytes on a CPU. A token takes `taken` of its `units` (experts of every layer), or so many rows of a
    table, which is one unit, and reads `read` bytes."""

    name: str
    places: tuple[Place, ...]
    shares: tuple[tuple[Shard, int], ...]
    decoded: int
    units: int
    taken: int
    read: int

    @property
    def bytes(self) -> int:
        return sum(count for _, count in self.shares)

    def on_device(self, target: Target, ranks: int) -> int:
        """Bytes on the device that holds most of it."""
        if target.one_memory:
            return self.decoded
        return sum(math.ceil(count * shard.largest(ranks)) for shard, count in self.shares)


@dataclass(frozen=True)
class Placed:
    """A part with `units` of it on the card: `device` bytes on each, `host` bytes beside. Nothing of either: it stays
    in its file."""

    part: Part
    units: int
    device: int
    host: int

    @property
    def read_on_device(self) -> int:
        """Bytes that a token reads of it on each, if all units are chosen alike."""
        return self.part.read * self.device // self.part.bytes

    def read_by(self, tokens: int) -> int:
        """Bytes that tokens of one step read of it on each device, if each chooses for itself and all units are chosen
        alike."""
        if self.part.units == 1:
            return tokens * self.read_on_device
        return int(self.device * (1 - (1 - self.part.taken / self.part.units) ** tokens))

    @property
    def read_on_host(self) -> int:
        return self.part.read * (self.part.units - self.units) // self.part.units


@dataclass(frozen=True)
class WeightBytes:
    """`shares` are what GPUs hold, the bytes of the files by how ranks share them; of them `first` are rank 0's alone.
    `coded_shards` of what a trellis codes, which is cut on its grid only. `decoded` is what a CPU holds after loading.
    All without `parts`.

    `embedding` is the row look-up, which a decode step does not read, and `rows` how ranks share it. `source` says
    where the figures come from.
    """

    shares: tuple[tuple[Shard, Fraction], ...]
    first: int
    coded_shards: frozenset[Shard]
    decoded: int
    embedding: int
    rows: Shard
    decoded_embedding: int
    source: str
    parts: tuple[Part, ...] = ()
    vision: int = 0  # of a vision tower as it is stored, beside all else; 0: there is none

    @property
    def coded(self) -> int:
        """Of all ranks together, what each of them holds counted once."""
        return math.ceil(sum(count for _, count in self.shares))

    @property
    def replicated(self) -> int:
        """Bytes of `coded` that every rank holds."""
        return math.ceil(sum(count for shard, count in self.shares if shard.axis is None)) - self.first

    def without_embedding(self) -> WeightBytes:
        """What stays on cards whose embedding lies on the host. A head tied to it is none."""
        return replace(self, shares=(*self.shares, (self.rows, Fraction(-self.embedding))), embedding=0)

    def sharable(self, spec: ModelSpec, ranks: int) -> bool:
        """Whether so many ranks can share the model as it is stored."""
        if not can_share(spec, ranks):
            return False
        cuts = (shard.cut(rank, ranks) for shard in self.coded_shards for rank in range(ranks))
        return all(edge % BLOCK == 0 for cut in cuts if cut for part in cut.ranges for edge in part)

    def of_rank(self, rank: int, ranks: int) -> int:
        """Bytes on the card of one of `ranks`."""
        held = math.ceil(sum(count * shard.share(rank, ranks) for shard, count in self.shares))
        return held - (self.first if rank else 0)

    def on_device(self, target: Target, ranks: int) -> int:
        """Bytes on the card that holds most. On a CPU all ranks are one device's, and each has the vectors, twice as
        wide as stored at most."""
        if target.one_memory:
            return self.decoded + 2 * (ranks - 1) * self.replicated
        return max(self.of_rank(rank, ranks) for rank in range(ranks))

    def read_per_token(self, target: Target, ranks: int) -> int:
        """Bytes of weights that the device that holds most reads for one decode step."""
        if target.one_memory:
            return self.decoded - self.decoded_embedding
        return self.without_embedding().on_device(target, ranks)


def from_checkpoint(directory: Path, spec: ModelSpec) -> WeightBytes:
    """Read the headers of all shards; random weights have none. Raises CheckpointError for missing or damaged files."""
    if RANDOM_WEIGHTS in (config := read_config(directory)):
        return from_config(spec, config)
    tensors = stored_headers(directory, spec.names.beside)
    refuse_tensors(spec, tensors)
    return from_tensors(tensors, spec, source=f"{len(tensors)} tensors of {directory.name or directory}")


def from_tensors(tensors: Iterable[TensorHeader], spec: ModelSpec, source: str) -> WeightBytes:
    """Draft layers are not loaded, so they do not count; nor does a vision tower among the other weights."""
    tensors, declared = list(tensors), spec.tensors()
    found = by_tensor(spec, (tensor for tensor in tensors if spec.counts(tensor.name)))
    apart = {name: held for name, held in found.items() if name in declared and declared[name].part}
    used = [(declared.get(name), held) for name, group in found.items() if name not in apart for held in group]
    weighed = [(tensor, held.name.rpartition(".")[2], Fraction(held.bytes)) for tensor, held in used]
    missing = dict.fromkeys(tensor.part for name, tensor in declared.items() if tensor.part and name not in apart)
    decoded, decoded_embedding = decoded_bytes(spec)
    return WeightBytes(
        **_shared(weighed),
        decoded=decoded,
        embedding=0 if spec.tied else sum(held.bytes for held in found.get(EMBEDDING, ()) if EMBEDDING not in apart),
        rows=by_rows(0, spec.vocab),
        decoded_embedding=decoded_embedding,
        source=source + "".join(f"; no file holds the {part}, which is not counted" for part in missing),
        parts=_parts(
            (declared[name], held.name.rpartition(".")[2], held.bytes)
            for name, group in apart.items()
            for held in group
        ),
        vision=tower_bytes(spec, tensors),
    )


def _shared(weighed: Iterable[tuple[Tensor | None, str, Fraction]]) -> dict[str, Any]:
    """Fields of WeightBytes from leaves and their bytes; every rank holds what nobody has declared."""
    shares: dict[Shard, Fraction] = {}
    first, coded = Fraction(0), set()
    for tensor, leaf, count in weighed:
        shard = WHOLE if tensor is None else leaf_shard(tensor, leaf)
        shares[shard] = shares.get(shard, Fraction(0)) + count
        first += count if tensor is not None and of_first(tensor.shard.axis, leaf) else 0
        coded |= {shard} if is_coded(leaf) else set()
    return {"shares": tuple(shares.items()), "first": math.ceil(first), "coded_shards": frozenset(coded)}


def decoded_bytes(spec: ModelSpec) -> tuple[int, int]:
    """(all weights but parts, the embedding that decoding does not read) as a CPU holds them."""
    held = [tensor for tensor in spec.tensors().values() if not tensor.alias and not tensor.part]
    embedding = sum(_decoded(tensor) for tensor in held if tensor.name == EMBEDDING)
    return sum(_decoded(tensor) for tensor in held), 0 if spec.tied else embedding


def _decoded(tensor: Tensor) -> int:
    """Linears take CPU_LINEAR_BYTES a value; embeddings, a head tied to one, norms and convolutions are fp32."""
    return tensor.count * (CPU_LINEAR_BYTES if tensor.role in ("linear", "stack") else 4)


def from_config(spec: ModelSpec, config: Mapping[str, Any]) -> WeightBytes:
    """The bytes that a checkpoint of this config must have, for planning before a download.

    Escha-W2: exact (the rates of its published mix; int8 embedding and head). EXL3: from its `bits` and `head_bits`,
    and with a head of its own. Otherwise 16-bit weights.
    """
    quantization = Quantization.of(spec, config)
    method = quantization.method
    found = [t for t in spec.tensors().values() if not t.alias or method == "exl3"]
    fixed = [t for t in found if not t.part]
    weighed = [(t, leaf, count) for t in fixed for leaf, count in quantization.leaves(t)]
    decoded, decoded_embedding = decoded_bytes(spec)
    sources = {
        **dict.fromkeys(("escha", "eschamoe"), "computed for Escha-W2 of this config"),
        "exl3": f"estimated for EXL3 at {float(quantization.mean)} bits",
    }
    return WeightBytes(
        **_shared(weighed),
        decoded=decoded,
        embedding=0 if spec.tied else sum(int(quantization.bytes(t)) for t in fixed if t.name == EMBEDDING),
        rows=by_rows(0, spec.vocab),
        decoded_embedding=decoded_embedding,
        source=sources.get(method, "computed for 16-bit weights of this config"),
        parts=_parts((t, leaf, math.ceil(count)) for t in found if t.part for leaf, count in quantization.leaves(t)),
    )


def _parts(weighed: Iterable[tuple[Tensor, str, int]]) -> tuple[Part, ...]:
    """Of (tensor, leaf, bytes), of which one leaf of a stack may come 256 times."""
    tensors: dict[str, Tensor] = {}
    groups: dict[str, dict[str, dict[str, int]]] = {}  # bytes by part, tensor and leaf
    for tensor, leaf, count in weighed:
        tensors[tensor.name] = tensor
        leaves = groups.setdefault(tensor.part, {}).setdefault(tensor.name, {})
        leaves[leaf] = leaves.get(leaf, 0) + count
    return tuple(
        _part(name, [(tensors[each], leaves) for each, leaves in held.items()]) for name, held in groups.items()
    )


def _part(name: str, group: list[tuple[Tensor, dict[str, int]]]) -> Part:
    """A table on a CPU stays as it is stored where it may lie in a file; an embedding is decoded as ever."""
    tensor, _ = group[0]
    shares: dict[Shard, int] = {}
    for member, leaves in group:
        for leaf, count in leaves.items():
            shard = leaf_shard(member, leaf)
            shares[shard] = shares.get(shard, 0) + count
    stored = "file" in tensor.places
    whole = [(member, sum(leaves.values())) for member, leaves in group]
    return Part(
        name=name,
        places=tensor.places,
        shares=tuple(shares.items()),
        decoded=sum(count if stored else _decoded(member) for member, count in whole),
        units=tensor.shape[0] if tensor.role == "stack" else 1,
        taken=tensor.active or 1,
        read=math.ceil(sum(count * member.share for member, count in whole)),
    )


def borrowed(spec: ModelSpec, weights: WeightBytes, tower: Path) -> tuple[ModelSpec, WeightBytes]:
    """A model with the vision tower of another directory. Raises CheckpointError for one that is none, or not whole."""
    seeing = with_tower(spec, tower)
    count = tower_bytes(seeing, tower_headers(tower))
    if not count:
        raise CheckpointError(f"{tower} holds no whole vision tower")
    return seeing, replace(weights, vision=count)
