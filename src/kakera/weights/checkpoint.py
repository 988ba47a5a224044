"""Checkpoint: a model directory as named tensors and linears, whatever format each is stored in."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from kakera.arch.formats import refuse_tensors
from kakera.arch.parts import of_first
from kakera.arch.registry import load_spec
from kakera.arch.shard import can_share, of_rank
from kakera.arch.spec import ModelSpec
from kakera.arch.tensors import Cut
from kakera.arch.tower_files import tower_headers
from kakera.arch.weigh import Entry
from kakera.errors import CheckpointError
from kakera.ops.codec.coded import CodedLinear
from kakera.weights import escha, exl3, int8, plain, stack, synthetic
from kakera.weights.files import StoredTensor, stored_tensors
from kakera.weights.leaves import Leaves


class Format(Protocol):
    """What a module of this package offers: how a linear is recognised, measured and decoded."""

    MARK: str

    def shape(self, leaves: Leaves) -> tuple[int, ...]: ...

    def read(
        self,
        leaves: Leaves,
        out_channels: int,
        in_channels: int,
        dtype: torch.dtype,
        device: str | torch.device,
        cut: Cut | None = None,
    ) -> Tensor: ...


FORMATS: dict[str, Format] = {"plain": plain, "int8": int8, "escha": escha, "exl3": exl3}


class Checkpoint:
    """Tensors by canonical name: `model.layers.N...`, `model.embed_tokens`, `model.norm`, `lm_head`, `mtp...`.

    Nothing but file headers is read before a tensor is asked for; every tensor is read once per call.
    Of a rank's checkpoint (`rank` of `ranks`) every tensor is the part that its declaration gives the rank; shapes that
    are asked for, as those that are stored, are of the whole. `own`: the declaration of the parts.
    Every method raises CheckpointError naming the tensor and the file if what is stored is not what is asked for.
    """

    def __init__(
        self,
        directory: Path,
        spec: ModelSpec,
        modules: dict[str, Leaves],
        *,
        escha_bias: bool = False,
        rank: int = 0,
        ranks: int = 1,
    ):
        self.directory = directory
        self.spec, self.own = spec, of_rank(spec, rank, ranks)
        self._modules = modules
        self._escha_bias = escha_bias
        self._rank, self._ranks = rank, ranks
        self._declared = spec.tensors(draft=True)

    @staticmethod
    def open(directory: Path, *, escha_bias: bool = False, rank: int = 0, ranks: int = 1) -> Checkpoint:
        """Read config.json and the headers of all files; weights that the config says are random are made up when they
        are read (`kakera.weights.synthetic`). `escha_bias`: add the biases that Escha files carry.

        Published Escha scores are without those biases, hence the default. Raises CheckpointError if a file is
        missing or damaged, if there are no such biases to add, or if so many ranks can not share the model.
        """
        spec = load_spec(directory)
        if not can_share(spec, ranks):
            raise CheckpointError(f"{directory}: {ranks} cards can not share this model evenly; run it on fewer")
        tensors = synthetic.tensors_of(directory, spec) or stored_tensors(directory, spec.names.beside)
        refuse_tensors(spec, tensors)
        modules: dict[str, Leaves] = {}
        for stored in tensors:
            module, _, leaf = spec.names.canonical(stored.name).rpartition(".")
            modules.setdefault(module, Leaves(module)).add(leaf, stored)
        if escha_bias and not any(escha.MARK in leaves and "bias" in leaves for leaves in modules.values()):
            raise CheckpointError(f"{directory} has no biases on Escha linears: there is nothing to switch on")
        return Checkpoint(directory, spec, modules, escha_bias=escha_bias, rank=rank, ranks=ranks)

    def part(self, name: str) -> Cut | None:
        """What is read of a declared tensor; None: all of it."""
        declared = self._declared.get(name)
        return None if declared is None else declared.shard.cut(self._rank, self._ranks)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of what is read of a declared tensor."""
        cut, declared = self.part(name), self._declared[name]
        return declared.shape if cut is None else cut.shape(declared.shape)

    @staticmethod
    def of_tower(directory: Path, spec: ModelSpec) -> Checkpoint:
        """The vision tower alone that lies in a directory, `spec` being that of the model which is to see with it."""
        modules: dict[str, Leaves] = {}
        for header in tower_headers(directory):
            module, _, leaf = spec.names.canonical(header.name).rpartition(".")
            modules.setdefault(module, Leaves(module)).add(leaf, StoredTensor(**vars(header)))
        return Checkpoint(directory, spec, modules)

    def modules(self, *, vision: bool = False) -> list[str]:
        """Canonical names of all modules that own tensors, in natural order; those of the vision tower on request."""
        return sorted((m for m in self._modules if vision or not self._ignored(m)), key=_natural)

    def has(self, name: str) -> bool:
        """Whether a module or a tensor of that name is stored."""
        module, _, leaf = name.rpartition(".")
        return name in self._modules or (module in self._modules and leaf in self._modules[module])

    def kind(self, name: str) -> str:
        """Format of a linear or an embedding: plain, int8, escha or exl3."""
        leaves = self.leaves(name)
        for kind, reader in FORMATS.items():
            if reader.MARK in leaves:
                return kind
        raise CheckpointError(f"{name} has no weight; stored are {', '.join(leaves.names())} in {leaves.where()}")

    def linear(
        self,
        name: str,
        out_channels: int,
        in_channels: int,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ) -> Tensor:
        """Weight [O, I] of a linear, or rows [V, H] of an embedding, decoded from whatever format it is stored in."""
        leaves = self.leaves(self._stored(name))
        read = FORMATS[self.kind(leaves.module)].read
        return read(leaves, out_channels, in_channels, dtype, device, self.part(name))

    def expert(
        self, name: str, number: int, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
    ) -> Tensor:
        """Weight [O, I] of one expert of a stack, decoded, whether the stack is stored in one piece or one by one."""
        declared, cut = self._declared[name], stack.of_expert(self.part(name))
        if not self.has(name):
            linears = stack.linears(declared, number)
            if biased := [linear for linear in linears if "bias" in self.leaves(linear)]:
                raise CheckpointError(f"{biased[0]} has a bias, which no expert that is known here has")
            outputs, inputs = declared.shape[1] // len(linears), declared.shape[2]
            parts = []
            for place, linear in enumerate(linears):
                read, own = FORMATS[self.kind(linear)].read, stack.of_linear(cut, place, outputs)
                parts.append(read(self.leaves(linear), outputs, inputs, dtype, device, own))
            return torch.cat(parts)
        leaves = self._modules.get(name)
        if leaves is None:  # without `.weight`: a leaf of the module around it
            module, _, leaf = name.rpartition(".")
            leaves = Leaves(name)
            leaves.add(plain.MARK, self.leaves(module)[leaf])
        return stack.read(leaves, declared, number, dtype, device, cut)

    def bias(
        self,
        name: str,
        out_channels: int,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ) -> Tensor | None:
        """Bias [O] of a linear, or None. Escha's biases count only with the switch `escha_bias`. Of a linear whose
        inputs are shared rank 0 alone has one: outputs are summed."""
        leaves = self.leaves(self._stored(name))
        if "bias" not in leaves or (escha.MARK in leaves and not self._escha_bias):
            return None
        cut = self.part(name)
        if self._rank and cut is not None and of_first(cut.axis, "bias"):
            return None
        return leaves.read("bias", (out_channels,), dtype, device, cut=cut)

    def tensor(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ) -> Tensor:
        """A plain tensor by its full name, `model.norm.weight` or `model.layers.0.linear_attn.A_log`."""
        module, _, leaf = name.rpartition(".")
        return self.leaves(module, name).read(leaf, shape, dtype, device, cut=self.part(name))

    def coded(
        self, name: str, out_channels: int, in_channels: int, device: str | torch.device = "cpu"
    ) -> CodedLinear | None:
        """The linear as it is coded (for kernels that decode on the fly), or None if it is not trellis-coded."""
        kind = self.kind(name)
        if kind == "escha":
            return escha.read_coded(self.leaves(name), out_channels, in_channels, device, self.part(name))
        if kind == "exl3":
            return exl3.read_coded(self.leaves(name), out_channels, in_channels, device, self.part(name))
        return None

    def int8_rows(
        self, name: str, rows: int, columns: int, device: str | torch.device = "cpu"
    ) -> tuple[Tensor, Tensor] | None:
        """Codes int8 [rows, columns] and scales fp16 [rows] as stored, or None if the module is not int8."""
        if self.kind(name) != "int8":
            return None
        return int8.read_rows(self.leaves(name), rows, columns, device, self.part(name))

    def entries(self) -> list[Entry]:
        """One entry per linear or embedding, and one per tensor that is neither; for `kakera info`."""
        return [entry for name in self.modules() for entry in self._entries(name)]

    def _entries(self, name: str) -> list[Entry]:
        leaves, declared = self._modules[name], self._declared.get(name)
        if declared is None or declared.role != "stack":
            return _entries(leaves)
        return [Entry.of(name, self.kind(name), declared.shape, leaves.bytes())]

    def tower_bytes(self) -> int:
        """Of a vision tower, 0 if none is stored, or not all of one."""
        names = [tensor.name for tensor in self.spec.vision.tensors()] if self.spec.vision else []
        if not all(self.has(name) for name in names):
            return 0
        return sum(self._modules[name.rpartition(".")[0]][name.rpartition(".")[2]].bytes for name in names)

    def check_complete(self, expected: Iterable[str]) -> None:
        """Raise if a module or tensor of `expected` is missing, or if one is stored that nobody expects.

        Names are module names for linears and embeddings, full tensor names otherwise. Tensors of the vision tower
        and of a draft layer may be there unasked.
        """
        wanted = {name for each in expected for name in self._stored_names(each)}
        missing = sorted((n for n in wanted if not self.has(self._stored(n))), key=_natural)
        extra = sorted((n for m in self.modules() for n in self._unexpected(m, wanted)), key=_natural)
        complaints = [
            f"{len(n)} tensors {what}: {_some(n)}" for what, n in (("missing", missing), ("extra", extra)) if n
        ]
        if complaints:
            raise CheckpointError(f"{self.directory} does not fit the model: {'; '.join(complaints)}")

    def _unexpected(self, module: str, wanted: set[str]) -> list[str]:
        if module in wanted or module.startswith(self.spec.optional):
            return []
        leaves = self._modules[module]
        names = {f"{module}.{leaf}" if module else leaf: leaf for leaf in leaves.names()}
        return [f"{name} in {leaves[leaf].path}" for name, leaf in names.items() if name not in wanted]

    def _stored_names(self, name: str) -> list[str]:
        """Of a stack that is stored one by one all of its linears; else the name itself."""
        declared = self._declared.get(name)
        linears = [] if declared is None or self.has(name) else stack.all_linears(declared)
        return linears if any(linear in self._modules for linear in linears) else [name]

    def _stored(self, name: str) -> str:
        """The module that stands for `name`: another one for a tensor that is absent and declared as an alias."""
        declared = self._declared.get(name)
        return name if name in self._modules or declared is None else declared.alias or name

    def _ignored(self, module: str) -> bool:
        return f"{module}.".startswith(self.spec.names.ignored)

    def leaves(self, module: str, name: str | None = None) -> Leaves:
        """The stored tensors of a module. `name`: the tensor that was asked for, for the error message."""
        if module not in self._modules:
            raise CheckpointError(f"tensor {name or module} is missing in {self.directory}")
        return self._modules[module]


def _entries(leaves: Leaves) -> list[Entry]:
    for kind, reader in FORMATS.items():
        if reader.MARK in leaves:
            shape = reader.shape(leaves)
            count = max(1, int(torch.Size(shape).numel()))
            return [Entry(leaves.module, kind, shape, leaves.bytes(), 8 * leaves.bytes() / count)]
    lone = [(f"{leaves.module}.{leaf}", leaves[leaf]) for leaf in leaves.names()]
    return [Entry(name, "plain", s.shape, s.bytes, 8.0 * s.torch_dtype.itemsize) for name, s in lone]


def _natural(name: str) -> list[tuple[int, int, str]]:
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split(".")]


def _some(names: list[str], limit: int = 5) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
