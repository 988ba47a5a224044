"""The linears of a model on a GPU: trellis codes decoded in the product, beside cuBLAS in 16 bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kakera.arch.shard import of_rank
from kakera.arch.spec import ModelSpec
from kakera.arch.tensors import Tensor as Declared
from kakera.bench.cuda_time import copies, copy_bytes_per_second, graph_seconds
from kakera.ops.codec.coded import CodedLinear
from kakera.ops.int8 import int8_linear
from kakera.ops.trellis import TrellisLinear, TrellisScratch
from kakera.plan.sizes import DECODED_BYTES

FUSED: dict[str, dict[str, tuple[str, ...]]] = {  # linears that are launched together, by kind of block
    "gdn": {"qkv|z": ("in_proj_qkv", "in_proj_z"), "gdn out": ("out_proj",)},
    "full": {"q|k|v": ("q_proj", "k_proj", "v_proj"), "o": ("o_proj",)},
    "swiglu": {"gate|up": ("gate_proj", "up_proj"), "down": ("down_proj",)},
}
LONG_ROWS = 1024  # from here on a card is bound by its power: measured rested too
REST_SECONDS = 0.1
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Group:
    """Linears that read the same input; `count` of them in the model. Channels of each part, and bits."""

    name: str
    count: int
    inputs: int
    outputs: tuple[int, ...]
    bits: tuple[int, ...]

    @property
    def weights(self) -> int:
        return self.inputs * sum(self.outputs)

    @property
    def code_bytes(self) -> float:
        return self.inputs * sum(o * b for o, b in zip(self.outputs, self.bits, strict=True)) / 8


@dataclass(frozen=True)
class Measured:
    """Seconds of one group for a number of rows; `rested`: with idleness before each repetition (long rows only)."""

    group: Group
    rows: int
    seconds: float
    cublas_seconds: float
    rested: float | None = None
    cublas_rested: float | None = None


@dataclass(frozen=True)
class LinearBench:
    """What `measure` found. `head`: rows and seconds of the int8 head, and its bytes."""

    device: str
    copy_bytes_per_second: float
    rows: tuple[Measured, ...]
    head: tuple[tuple[int, float], ...]
    head_bytes: int

    def total(self, rows: int, field: str = "seconds") -> float:
        """Seconds of all linears of the model."""
        return float(sum(getattr(m, field) * m.group.count for m in self.rows if m.rows == rows))

    def weights(self, rows: int) -> int:
        return sum(m.group.weights * m.group.count for m in self.rows if m.rows == rows)


def groups(spec: ModelSpec, ranks: int = 1) -> list[Group]:
    """The coded linears of a model as they are launched, split over `ranks` cards."""
    found = []
    for kind, fused in FUSED.items():
        own = [layer.block(kind) for layer in of_rank(spec, 0, ranks).layers]
        if blocks := [block for block in own if block is not None]:
            tensors = {tensor.name: tensor for tensor in blocks[0].tensors(spec.hidden)}
            found += [_group(name, len(blocks), [tensors[part] for part in parts]) for name, parts in fused.items()]
    return found


def _group(name: str, count: int, parts: Sequence[Declared]) -> Group:
    bits = tuple(part.kind.escha for part in parts if part.kind is not None)
    return Group(name, count, parts[0].shape[1], tuple(part.shape[0] for part in parts), bits)


def measure(spec: ModelSpec, rows: Sequence[int], ranks: int, tell: Tell, head: bool = True) -> LinearBench:
    """Random codes (a trellis makes weights of any bits), random activations; ours and cuBLAS beside each other."""
    found = []
    for group in groups(spec, ranks):
        for count in rows:
            tell(f"{group.name}, {count} rows")
            found.append(_one(group, count))
    heads = tuple(_head(spec, ranks, [r for r in rows if r < LONG_ROWS])) if head else ()
    name = torch.cuda.get_device_name()
    vocabulary = spec.vocab // ranks
    return LinearBench(name, copy_bytes_per_second(), tuple(found), heads, vocabulary * (spec.hidden + 2))


def _one(group: Group, rows: int) -> Measured:
    ours, cublas = list(_calls(group, rows)), list(_cublas_calls(group, rows))
    times = graph_seconds(ours), graph_seconds(cublas)
    if rows < LONG_ROWS:
        return Measured(group, rows, *times)
    return Measured(
        group, rows, *times, graph_seconds(ours, pause=REST_SECONDS), graph_seconds(cublas, pause=REST_SECONDS)
    )


def _calls(group: Group, rows: int) -> Iterator[Callable[[], object]]:
    sets = [TrellisLinear(tuple(_random_parts(group))) for _ in range(copies(group.code_bytes))]
    widest = min(DECODED_BYTES, 2 * group.inputs * max(group.outputs))
    shapes = [(outputs, group.inputs) for outputs in group.outputs]
    scratch = TrellisScratch.allocate(shapes, widest, torch.device("cuda", torch.cuda.current_device()))
    x_TI = torch.randn(rows, group.inputs, device="cuda").half()
    y_PTO = tuple(x_TI.new_empty(rows, outputs) for outputs in group.outputs)
    for linear in sets:
        yield partial(linear.into, x_TI, y_PTO, scratch)


def _random_parts(group: Group) -> Iterator[CodedLinear]:
    for outputs, bits in zip(group.outputs, group.bits, strict=True):
        shape = (group.inputs // 16, outputs // 16, 16 * bits)
        code = torch.randint(-(1 << 15), 1 << 15, shape, dtype=torch.int16, device="cuda")
        scale = torch.randn(group.inputs, device="cuda") * 0.02
        yield CodedLinear(code, scale, torch.randn(outputs, device="cuda"), "mcg")


def _cublas_calls(group: Group, rows: int) -> Iterator[Callable[[], object]]:
    x_TI = torch.randn(rows, group.inputs, device="cuda").half()
    y_PTO = [x_TI.new_empty(rows, outputs) for outputs in group.outputs]
    for _ in range(copies(2 * group.weights)):
        weights = [torch.randn(group.inputs, o, device="cuda", dtype=torch.float16) * 0.02 for o in group.outputs]

        yield partial(_multiply, x_TI, weights, y_PTO)


def _multiply(x_TI: Tensor, weights: Sequence[Tensor], y_PTO: Sequence[Tensor]) -> None:
    for weight_IO, y_TO in zip(weights, y_PTO, strict=True):
        torch.mm(x_TI, weight_IO, out=y_TO)


def _head(spec: ModelSpec, ranks: int, rows: Sequence[int]) -> Iterator[tuple[int, float]]:
    vocabulary = spec.vocab // ranks
    q_OI = torch.randint(-127, 128, (vocabulary, spec.hidden), device="cuda", dtype=torch.int8)
    scale_O = torch.rand(vocabulary, device="cuda").half()
    for count in rows:
        x_TI = torch.randn(count, spec.hidden, device="cuda").half()
        yield count, graph_seconds([partial(int8_linear, x_TI, q_OI, scale_O)])
