"""Quantise a checkpoint: plain weights in, an EXL3 or Escha model directory out. Resumable and deterministic."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from kakera.arch.spec import EMBEDDING
from kakera.arch.stored import read_config
from kakera.errors import CheckpointError, UsageError
from kakera.ops.codec import codebook
from kakera.ops.codec.hadamard import BLOCK
from kakera.ops.int8 import int8_weight
from kakera.quantize import dialect, tail_biting
from kakera.quantize.linear import CODEBOOK, encode_linear, relative_error
from kakera.quantize.recipe import Recipe, kinds_of
from kakera.quantize.report import LinearReport, Progress, Reporter, Summary
from kakera.quantize.stack import encode_stack, sources, stored_owner
from kakera.quantize.transform import Encoder
from kakera.quantize.writer import Workspace, copy_companions, write_json, write_shards
from kakera.weights import int8, plain
from kakera.weights.checkpoint import Checkpoint
from kakera.weights.files import StoredTensor
from kakera.weights.leaves import Leaves

INT8_KINDS = ("embedding", "head")
SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True)
class Job:
    """One module, or one stack of experts, whose weight changes its format. `sources`: (module, leaf) of the tensors
    that hold it now; `prefix`: of the names that take their place, in the file."""

    module: str
    sources: tuple[tuple[str, str], ...]
    prefix: str
    kind: str
    coded: bool  # else int8 rows
    bits: int
    shape: tuple[int, ...]  # [O, I], or [E, O, I]

    @property
    def weights(self) -> int:
        return math.prod(self.shape)


def quantize_checkpoint(
    source: Path,
    out: Path,
    recipe: Recipe,
    device: str | torch.device = "cpu",
    progress: Reporter | None = None,
    *,
    shard_bytes: int = SHARD_BYTES,
    encode: Encoder | None = None,
) -> Summary:
    """Write the model directory `out`; after a kill, the same call resumes and ends with the same bytes.

    Coded: the linears of the recipe whose channels are multiples of 128. Int8 rows: the embedding, and the head if
    the recipe gives it no rate. Everything else is copied as stored. `encode` replaces the trellis search (tests).
    Raises UsageError if `out` holds something else, CheckpointError if `source` is not a plain checkpoint.
    """
    checkpoint = Checkpoint.open(source)
    jobs, notes = plan_jobs(checkpoint, recipe)
    workspace = Workspace.open(out, _digest(checkpoint, recipe))
    encode = encode or partial(_search, codebook.table(CODEBOOK, torch.float32, torch.device(device)))
    total, done = sum(job.weights for job in jobs), 0
    stored: dict[str, list[StoredTensor]] = {}
    reports = []
    for index, job in enumerate(jobs):
        resumed = workspace.has(index)
        if not resumed:
            workspace.save(index, *_quantize(checkpoint, job, recipe, torch.device(device), encode))
        tensors, error = workspace.load(index)
        stored[job.module] = tensors
        report = LinearReport(job.module, job.kind, job.bits, job.weights, sum(t.bytes for t in tensors), error)
        reports.append(report)
        done += job.weights
        if progress:
            progress(Progress(done, total, report, resumed))
    shards, size = write_shards(out, _assembled(checkpoint, jobs, stored), shard_bytes)
    copy_companions(source, out)
    summary = Summary(tuple(reports), tuple(notes), size, shards)
    _write_configs(source, out, recipe, jobs, stored, summary)
    workspace.close()
    return summary


def plan_jobs(checkpoint: Checkpoint, recipe: Recipe) -> tuple[list[Job], list[str]]:
    """What will be coded, and notes on linears that stay in 16 bit."""
    jobs, notes = [], []
    kinds = {**kinds_of(checkpoint.spec), EMBEDDING: "embedding"}
    stacks = {tensor.name: tensor for tensor in checkpoint.spec.tensors().values() if tensor.role == "stack"}
    linears = ((module, [(module, "weight")]) for module in checkpoint.modules() if module not in stacks)
    found = [*linears, *((name, held) for name, stack in stacks.items() if (held := sources(checkpoint, stack)))]
    for name, held in found:
        kind = kinds.get(name)
        if kind is None:
            continue
        leaves = _plain(checkpoint, held)
        first = leaves[held[0][1]]
        shape = stacks[name].shape if name in stacks else first.shape
        coded, rows = kind in recipe.bits, kind in INT8_KINDS or (recipe.format == "escha" and bool(stacks))
        if not coded and not rows:
            notes.append(f"{name} stays in 16 bit: the recipe has no rate for {kind}")
        elif coded and any(channels % BLOCK for channels in shape[-2:]):
            notes.append(f"{name} stays in 16 bit: {shape[-2]} x {shape[-1]} is no multiple of {BLOCK}")
        elif coded and recipe.format == "escha" and "bias" in leaves:
            raise UsageError(f"{name} has a bias, which readers of Escha files do not add: choose exl3")
        else:
            prefix = stored_owner(first.name, name) if name in stacks else first.name.removesuffix(".weight")
            jobs.append(Job(name, tuple(held), prefix, kind, coded, recipe.bits.get(kind, 8), shape))
    return jobs, notes


def _plain(checkpoint: Checkpoint, held: list[tuple[str, str]]) -> Leaves:
    """Of the first of the modules. Raises CheckpointError for one that is coded already."""
    for module, leaf in held:
        if leaf == plain.MARK and (kind := checkpoint.kind(module)) != "plain":
            raise CheckpointError(f"{module} is stored as {kind}: quantise the 16-bit original")
    return checkpoint.leaves(held[0][0])


def _quantize(
    checkpoint: Checkpoint, job: Job, recipe: Recipe, device: torch.device, encode: Encoder
) -> tuple[dict[str, Tensor], float]:
    """Tensors by their names behind the job's prefix, and the relative error."""

    def seed_of(name: str) -> int:
        return int.from_bytes(hashlib.sha256(f"{recipe.seed} {name}".encode()).digest()[:7], "little")

    if len(job.shape) > 2:
        declared = checkpoint.spec.tensors()[job.module]
        return encode_stack(checkpoint, declared, recipe.format, job.bits, seed_of, device, encode)
    outputs, inputs = job.shape
    weight_OI = checkpoint.linear(job.module, outputs, inputs, torch.float32, device)
    if not job.coded:
        q_OI, scale_O = int8.encode(weight_OI)
        decoded_OI = int8_weight(q_OI, scale_O, torch.float32)
        return {int8.MARK: q_OI, int8.SCALE: scale_O}, relative_error(decoded_OI, weight_OI)
    coded, error = encode_linear(weight_OI, job.bits, seed_of(job.module), encode)
    return dialect.leaves(recipe.format, coded), error


def _assembled(
    checkpoint: Checkpoint, jobs: list[Job], stored: dict[str, list[StoredTensor]]
) -> Iterator[tuple[str, StoredTensor]]:
    """Every tensor of the output with its name, module by module."""
    replaced = {source for job in jobs for source in job.sources}
    begun: dict[str, list[Job]] = {}
    for job in jobs:
        begun.setdefault(job.sources[0][0], []).append(job)
    for module in checkpoint.modules(vision=True):
        leaves = checkpoint.leaves(module)
        for job in begun.get(module, []):
            yield from ((f"{job.prefix}.{tensor.name}", tensor) for tensor in stored[job.module])
        yield from ((leaves[leaf].name, leaves[leaf]) for leaf in leaves.names() if (module, leaf) not in replaced)


def _modules(job: Job, tensors: list[StoredTensor]) -> Iterator[dialect.Module]:
    """As the configs list them: of a stack in EXL3 every expert's linears."""
    *experts, outputs, inputs = job.shape
    if not experts:
        yield dialect.Module(job.prefix, job.bits, outputs, inputs, tuple(tensors))
        return
    groups: dict[str, list[StoredTensor]] = {}
    for tensor in tensors:
        module, _, leaf = tensor.name.rpartition(".")
        groups.setdefault(module, []).append(replace(tensor, name=leaf))
    for module, group in groups.items():
        name, parts = f"{job.prefix}.{module}", len(groups) // experts[0] or 1
        count = experts[0] if len(groups) == 1 else 0
        yield dialect.Module(name, job.bits, outputs // parts, inputs, tuple(group), count)


def _write_configs(
    source: Path,
    out: Path,
    recipe: Recipe,
    jobs: list[Job],
    stored: dict[str, list[StoredTensor]],
    summary: Summary,
) -> None:
    modules = [module for job in jobs for module in _modules(job, stored[job.module])]
    if recipe.format == "exl3":
        write_json(out / "quantization_config.json", dialect.exl3_storage(recipe, modules))
    write_json(out / "quantization_report.json", summary.as_json())
    write_json(out / "config.json", {**read_config(source), "quantization_config": dialect.config(recipe, modules)})


def _search(table: Tensor, targets: Tensor, bits: int) -> Tensor:
    return tail_biting.encode(targets, table, bits)


def _digest(checkpoint: Checkpoint, recipe: Recipe) -> str:
    """Identifies source (names, shapes, places of all tensors) and recipe."""
    leaves: list[Leaves] = [checkpoint.leaves(m) for m in checkpoint.modules(vision=True)]
    tensors = [leaf[n] for leaf in leaves for n in leaf.names()]
    listing = [f"{t.name} {t.dtype} {t.shape} {t.path.name} {t.offset} {t.path.stat().st_size}" for t in tensors]
    return hashlib.sha256("\n".join([recipe.digest(), *listing]).encode()).hexdigest()
