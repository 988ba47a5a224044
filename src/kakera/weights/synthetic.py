"""Random weights: the tensors that a checkpoint of a config would store, made when they are read.

Only the numbers are made up. Names, shapes, dtypes and bytes are those of the published files (docs/formats.md), and
whatever reads them (Checkpoint, the formats, the kernels) takes them for stored ones, so that speed and memory are
those of the real model. Values are such that activations stay finite and near 1 through any number of layers.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kakera.arch.spec import ModelSpec
from kakera.arch.stored import read_config
from kakera.arch.tensors import BLOCK, Cut, Values
from kakera.arch.tensors import Tensor as Declared
from kakera.errors import CheckpointError
from kakera.plan.weights import RANDOM_WEIGHTS
from kakera.weights.escha import descriptor
from kakera.weights.files import DTYPES, StoredTensor, part_of

CODE_DEVIATION = 1.24411  # of the mcg codebook under uniform states
INT8_DEVIATION = 73.6  # of whole numbers, uniform in -127 .. 127
SCALE_SPREAD = 0.02  # of Escha's extra scales and of norms around 1: the published ones lie within 3 %
BIAS_DEVIATION = 0.07  # of an output near 1, as published; read only with the switch for it
DECAYS, STEPS = (1.0, 16.0), (1e-3, 1e-1)  # of Gated DeltaNet: where A and dt lie when training begins
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Fill = Callable[[tuple[int, ...], torch.dtype, torch.Generator], Tensor]  # on the generator's device


@dataclass(frozen=True)
class RandomTensor(StoredTensor):
    """A tensor that no file holds. The same seed, name and kind of device give the same numbers."""

    seed: int
    fill: Fill
    stacked: bool = False  # every piece of the first axis is drawn by itself

    def piece(self, number: int) -> RandomTensor:
        return replace(super().piece(number), stacked=False)

    def read(
        self, dtype: torch.dtype | None = None, device: str | torch.device = "cpu", cut: Cut | None = None
    ) -> Tensor:
        """As StoredTensor.read; made on the device, whole, and cut then: all ranks see parts of one model. For a moment
        a card holds 1.3 GB of an embedding that it keeps half of; it is read before anything else."""
        if self.stacked:
            stored = torch.stack([self.piece(i).read(None, device) for i in range(self.shape[0])])
        else:
            digest = hashlib.sha256(f"{self.seed} {self.name}".encode()).digest()
            generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:7]))
            stored = self.fill(self.shape, self.torch_dtype, generator).to(self.torch_dtype)
        part = stored if cut is None else part_of(stored, cut)
        return part if dtype is None else part.to(dtype)


def tensors_of(directory: Path, spec: ModelSpec) -> list[RandomTensor]:
    """All tensors of a model whose config.json says that its weights are random; none for any other model."""
    config = read_config(directory)
    return random_tensors(spec, config, directory) if RANDOM_WEIGHTS in config else []


def random_tensors(spec: ModelSpec, config: dict[str, Any], directory: Path) -> list[RandomTensor]:
    """In the config's format: Escha-W2, also of experts, or bfloat16 without one. Raises CheckpointError for others."""
    method = (config.get("quantization_config") or {}).get("quant_method", "")
    if method not in ("", "escha", "eschamoe"):
        raise CheckpointError(
            f"{directory}: random weights can be made in Escha's form or in 16 bit, not as {method!r}"
        )
    dtype = torch.float16 if method else torch.bfloat16
    maker = _Maker(directory, int(config[RANDOM_WEIGHTS]), dtype)
    found: list[RandomTensor] = []
    for declared in spec.tensors().values():
        if not declared.alias:
            found += maker.tensors(declared, method)
    return found


@dataclass(frozen=True)
class _Maker:
    directory: Path
    seed: int
    dtype: torch.dtype  # of what no format codes

    def tensor(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, fill: Fill, stacked: bool = False
    ) -> RandomTensor:
        size = math.prod(shape) * dtype.itemsize
        return RandomTensor(name, self.directory, DTYPE_NAMES[dtype], shape, 0, size, self.seed, fill, stacked)

    def tensors(self, declared: Declared, method: str) -> Iterator[RandomTensor]:
        """As they are stored."""
        if declared.role == "small":
            return iter([self.tensor(declared.name, declared.shape, self.dtype, _small(declared))])
        form = {"escha": self.escha, "int8": self.int8}.get(declared.stored_as(method), self.plain)
        return form(declared)

    def plain(self, declared: Declared) -> Iterator[RandomTensor]:
        stacked = declared.role == "stack"
        name = declared.name if stacked else f"{declared.name}.weight"
        yield self.tensor(name, declared.shape, self.dtype, normal(0.0, _deviation(declared)), stacked)

    def int8(self, declared: Declared) -> Iterator[RandomTensor]:
        scale = _deviation(declared) / INT8_DEVIATION
        yield self.tensor(f"{declared.name}.weight_int8", declared.shape, torch.int8, _int8)
        yield self.tensor(f"{declared.name}.weight_scale", declared.shape[:1], torch.float16, normal(scale))

    def escha(self, declared: Declared) -> Iterator[RandomTensor]:
        """The leaves of a coded linear. Transforms keep lengths, so weights deviate by rin x codebook x rout."""
        name, kind, (*experts, outputs, inputs) = declared.name, declared.kind, declared.shape
        assert kind is not None
        if outputs % BLOCK or inputs % BLOCK:
            raise CheckpointError(
                f"{self.directory}: {name} is [{outputs}, {inputs}], and Escha codes multiples of {BLOCK} channels only"
            )
        bits = kind.escha
        half, single = torch.float16, torch.float32
        numbers = descriptor(bits, outputs, inputs, *experts)
        extra = 0.0 if experts else SCALE_SPREAD
        leaves: dict[str, tuple[tuple[int, ...], torch.dtype, Fill]] = {
            "escha_code": ((*experts, inputs // 16, outputs // 16, 16 * bits), torch.int16, _codes),
            "escha_rin": ((*experts, inputs), half, _signs(inputs**-0.5 / CODE_DEVIATION)),
            "escha_rout": ((*experts, outputs), half, _signs(1.0)),
            "escha_s_in": ((*experts, inputs), single, normal(1.0, extra)),
            "escha_s_out": ((*experts, outputs), single, normal(1.0, extra)),
            "escha_config": ((len(numbers),), torch.int32, _numbers(*numbers)),
        }
        if not experts:
            leaves["bias"] = ((outputs,), half, normal(0.0, BIAS_DEVIATION))
        for leaf, (shape, dtype, fill) in leaves.items():
            yield self.tensor(f"{name}.{leaf}", shape, dtype, fill, bool(experts) and leaf != "escha_config")


def normal(mean: float, deviation: float = 0.0) -> Fill:
    def fill(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
        return _noise(shape, dtype, generator).mul_(deviation).add_(mean)

    return fill


def _deviation(declared: Declared) -> float:
    """Rows that are looked up enter the residual stream as they are; products keep their input's length."""
    return 1.0 if declared.role == "table" else float(declared.shape[-1] ** -0.5)


def _small(declared: Declared) -> Fill:
    """Norms, filters and the gates of heads."""
    if declared.values == "filter":
        return normal(0.0, float(declared.shape[-1] ** -0.5))
    made: dict[Values, Fill] = {"decay": _decays, "step": _step_biases, "delta": normal(0.0, SCALE_SPREAD)}
    return made.get(declared.values, normal(1.0, SCALE_SPREAD))


def _noise(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=dtype, device=generator.device)


def _uniform(shape: tuple[int, ...], generator: torch.Generator, ends: tuple[float, float]) -> Tensor:
    return torch.empty(shape, device=generator.device).uniform_(*ends, generator=generator)


def _codes(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Any bits are a sound trellis stream."""
    return torch.randint(-(1 << 15), 1 << 15, shape, dtype=dtype, generator=generator, device=generator.device)


def _int8(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return torch.randint(-127, 128, shape, dtype=dtype, generator=generator, device=generator.device)


def _signs(size: float) -> Fill:
    def fill(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
        return _noise(shape, dtype, generator).sign_().mul_(size)

    return fill


def _numbers(*values: int) -> Fill:
    def fill(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=generator.device)

    return fill


def _decays(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """A_log, log of a rate A that is uniform in DECAYS."""
    return _uniform(shape, generator, DECAYS).log_()


def _step_biases(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """dt_bias, the inverse softplus of a step dt whose logarithm is uniform in STEPS."""
    steps = _uniform(shape, generator, (math.log(STEPS[0]), math.log(STEPS[1]))).exp_()
    return torch.log(torch.expm1(steps))
