"""How many bytes the tensors of a declaration take: by a config's quantisation, before any file is there, or by the
headers of its files. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from kakera.arch.spec import OF_DRAFT, OF_HEAD, ModelSpec
from kakera.arch.stored import TensorHeader
from kakera.arch.tensors import Format, Tensor
from kakera.errors import CheckpointError

ROW_SCALE_BYTES = 2  # int8 rows, and rows of a trellis, carry one fp16 scale each
ESCHA_INPUTS = {"escha_rin": 2, "escha_s_in": 4}  # bytes a channel
ESCHA_OUTPUTS = {"escha_rout": 2, "escha_s_out": 4, "bias": 2}
ESCHA_CONFIG_BYTES, STACK_CONFIG_BYTES = 24, 36  # one a stack, whose linears have no biases
HALF_RATES_BELOW, MOST_BITS = 4, Fraction(8)  # a value, of EXL3; the halves of its codebook mul1


@dataclass(frozen=True)
class Quantization:
    """What a config says of its weights. `method`: escha, eschamoe, exl3, or none of them: 16 bit. Rates of EXL3: the
    mean of the layers, and those of the head and of a draft layer's experts; `base`: that of the layers' experts where
    the mean is that of a mix, in which other linears stand above them."""

    method: str
    mean: Fraction = Fraction(16)
    head: Fraction = Fraction(16)
    draft: Fraction = Fraction(16)
    base: Fraction | None = None

    @staticmethod
    def of(spec: ModelSpec, config: Mapping[str, Any]) -> Quantization:
        """Raises CheckpointError for one that says nothing of the kind; an EXL3 config must have its `bits`."""
        stated = config.get("quantization_config") or {}
        if not isinstance(stated, dict):
            raise CheckpointError("config.json: quantization_config is no JSON object")
        method = str(stated.get("quant_method", ""))
        if method != "exl3":
            return Quantization(method)
        mean, head = _rate("bits", stated.get("bits")), _rate("head_bits", stated.get("head_bits", 6))
        base = _base(spec, mean, stated.get("codebook") == "mul1")
        draft = _rate("mtp_bits", stated.get("mtp_bits", base or mean))
        return Quantization(method, mean, head, draft, base)

    def bits(self, tensor: Tensor) -> Fraction:
        """A coded value of an EXL3 tensor."""
        if tensor.kind == OF_HEAD:
            return self.head
        drafted = tensor.kind is not None and tensor.kind.name == OF_DRAFT.name
        if self.base is None:
            return self.draft if drafted else self.mean
        above = tensor.kind.above if tensor.kind else OF_HEAD.above
        return min((self.draft if drafted else self.base) + above, MOST_BITS)

    def leaves(self, tensor: Tensor) -> Iterator[tuple[str, Fraction]]:
        """Last parts of the names that a tensor is stored under, and their bytes; a stack's matrices together. EXL3 is
        counted without the scales of its head."""
        stored = tensor.stored_as(self.method)
        matrices = math.prod(tensor.shape[:-2])
        outputs, inputs = tensor.shape[-2:] if len(tensor.shape) > 1 else (0, 0)
        if stored == "plain":
            yield tensor.name.rpartition(".")[2] if tensor.role == "small" else "weight", Fraction(2 * tensor.count)
        elif stored == "int8":
            yield "weight_int8", Fraction(tensor.count)
            yield "weight_scale", Fraction(tensor.shape[0] * ROW_SCALE_BYTES)
        elif stored == "escha":
            assert tensor.kind is not None
            yield "escha_code", Fraction(tensor.count * tensor.kind.escha // 8)
            yield from ((leaf, Fraction(matrices * width * inputs)) for leaf, width in ESCHA_INPUTS.items())
            stack = tensor.role == "stack"
            held = ((leaf, width) for leaf, width in ESCHA_OUTPUTS.items() if not (stack and leaf == "bias"))
            yield from ((leaf, Fraction(matrices * width * outputs)) for leaf, width in held)
            yield "escha_config", Fraction(STACK_CONFIG_BYTES if stack else ESCHA_CONFIG_BYTES)
        else:
            yield "trellis", tensor.count * self.bits(tensor) / 8
            if tensor.role == "table":
                yield "scale", Fraction(outputs * ROW_SCALE_BYTES)
            elif tensor.kind != OF_HEAD:
                yield "suh", Fraction(2 * matrices * max(1, len(tensor.pieces)) * inputs)
                yield "svh", Fraction(2 * matrices * outputs)

    def bytes(self, tensor: Tensor) -> Fraction:
        """All bytes of a tensor."""
        return sum((count for _, count in self.leaves(tensor)), Fraction(0))


def _base(spec: ModelSpec, mean: Fraction, halves: bool) -> Fraction | None:
    """The rate of experts in a mix whose mean (in two digits) is `mean`; None if the rates are not those of a mix."""
    step = 2 if halves and mean < HALF_RATES_BELOW else 1
    base = Fraction(math.floor(mean * step), step)
    total = sum(spec.kinds.values())
    bits = sum((count * min(base + kind.above, MOST_BITS) for kind, count in spec.kinds.items()), Fraction(0))
    mixed = any(kind.above == 0 for kind in spec.kinds) and abs(bits / total - mean) <= Fraction(1, 100)
    return base if mixed else None


def by_tensor(spec: ModelSpec, headers: Iterable[TensorHeader]) -> dict[str, list[TensorHeader]]:
    """Stored tensors by the name of the declared one that they are part of, draft layer included; what belongs to none
    stands under its own canonical name."""
    declared = spec.tensors(draft=True)
    pieces = {piece: name for name, tensor in declared.items() for piece in tensor.pieces}
    found: dict[str, list[TensorHeader]] = {}
    for header in headers:
        found.setdefault(_owner(spec.names.canonical(header.name), declared, pieces), []).append(header)
    return found


def _owner(name: str, declared: Mapping[str, Tensor], pieces: Mapping[str, str]) -> str:
    """The longest beginning of a name that is declared, or a piece of a stack: the number of its expert is a `*`."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        if (begin := ".".join(parts[:end])) in declared:
            return begin
        if end > 1 and parts[end - 2].isdigit():
            piece = ".".join((*parts[: end - 2], "*", parts[end - 1]))
            if piece in pieces:
                return pieces[piece]
    return name


def tower_bytes(spec: ModelSpec, headers: Iterable[TensorHeader]) -> int:
    """Of a vision tower as it is stored; 0 if none is, or not all of one."""
    if spec.vision is None:
        return 0
    stored = {spec.names.canonical(header.name): header.bytes for header in headers}
    found = [stored.get(tensor.name) for tensor in spec.vision.tensors()]
    return sum(size for size in found if size) if all(found) else 0


@dataclass(frozen=True)
class Entry:
    """A module (or a lone tensor) of a checkpoint: format, shape ([O, I] for a linear), bytes on disk."""

    name: str
    kind: str  # plain | int8 | escha | exl3
    shape: tuple[int, ...]
    bytes: int
    bits_per_weight: float

    @staticmethod
    def of(name: str, kind: str, shape: tuple[int, ...], count: int) -> Entry:
        return Entry(name, kind, shape, count, 8 * count / max(1, math.prod(shape)))


def stored_entries(spec: ModelSpec, headers: Iterable[TensorHeader]) -> list[Entry]:
    """One for every declared tensor that is stored, however many pieces it is stored in, and for every other one; none
    for what is known and not served."""
    declared = spec.tensors(draft=True)
    found = []
    for name, group in by_tensor(spec, headers).items():
        shape = declared[name].shape if name in declared else group[0].shape
        if not name.startswith(spec.names.ignored):
            found.append(Entry.of(name, format_of(group), shape, sum(header.bytes for header in group)))
    return found


def expected_entries(spec: ModelSpec, config: Mapping[str, Any]) -> list[Entry]:
    """Of a config alone, its draft layer included."""
    quantization = Quantization.of(spec, config)
    tensors = (t for t in spec.tensors(draft=True).values() if not t.alias or quantization.method == "exl3")
    return [
        Entry.of(t.name, t.stored_as(quantization.method), t.shape, math.ceil(quantization.bytes(t))) for t in tensors
    ]


MARKS: dict[str, Format] = {"trellis": "exl3", "escha_code": "escha", "weight_int8": "int8"}


def format_of(headers: Iterable[TensorHeader]) -> Format:
    """What a tensor is stored as, by the names of its leaves."""
    leaves = {header.name.rpartition(".")[2] for header in headers}
    return next((form for mark, form in MARKS.items() if mark in leaves), "plain")


def _rate(key: str, bits: Any) -> Fraction:
    """Of an EXL3 config."""
    try:
        rate = Fraction(str(bits))
    except (ValueError, ZeroDivisionError):
        rate = Fraction(0)
    if not 0 < rate <= 16:
        raise CheckpointError(f"config.json: quantization_config says {key} is {str(bits)[:60]!r}, which is no rate")
    return rate
