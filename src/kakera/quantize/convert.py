"""Quantise a checkpoint: plain weights in, an EXL3 or Escha model directory out. Resumable and deterministic."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
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
from kakera.quantize.transform import Encoder
from kakera.quantize.writer import Workspace, copy_companions, write_json, write_shards
from kakera.weights import int8
from kakera.weights.checkpoint import Checkpoint
from kakera.weights.files import StoredTensor
from kakera.weights.leaves import Leaves

INT8_KINDS = ("embedding", "head")
SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True)
class Job:
    """One module whose weight changes its format. `prefix` is the module's name in the source file."""

    module: str
    prefix: str
    kind: str
    coded: bool  # else int8 rows
    bits: int
    out_channels: int
    in_channels: int

    @property
    def weights(self) -> int:
        return self.out_channels * self.in_channels


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
    shards, size = write_shards(out, _assembled(checkpoint, stored), shard_bytes)
    copy_companions(source, out)
    summary = Summary(tuple(reports), tuple(notes), size, shards)
    _write_configs(source, out, recipe, jobs, stored, summary)
    workspace.close()
    return summary


def plan_jobs(checkpoint: Checkpoint, recipe: Recipe) -> tuple[list[Job], list[str]]:
    """What will be coded, and notes on linears that stay in 16 bit."""
    jobs, notes = [], []
    kinds = {**kinds_of(checkpoint.spec), EMBEDDING: "embedding"}
    for module in checkpoint.modules():
        kind = kinds.get(module)
        if kind is None:
            continue
        if checkpoint.kind(module) != "plain":
            raise CheckpointError(f"{module} is stored as {checkpoint.kind(module)}: quantise the 16-bit original")
        leaves = checkpoint.leaves(module)
        out_channels, in_channels = leaves["weight"].shape
        coded = kind in recipe.bits
        if not coded and kind not in INT8_KINDS:
            notes.append(f"{module} stays in 16 bit: the recipe has no rate for {kind}")
        elif coded and (out_channels % BLOCK or in_channels % BLOCK):
            notes.append(f"{module} stays in 16 bit: {out_channels} x {in_channels} is no multiple of {BLOCK}")
        elif coded and recipe.format == "escha" and "bias" in leaves:
            raise UsageError(f"{module} has a bias, which readers of Escha files do not add: choose exl3")
        else:
            prefix = leaves["weight"].name.removesuffix(".weight")
            jobs.append(Job(module, prefix, kind, coded, recipe.bits.get(kind, 8), out_channels, in_channels))
    return jobs, notes


def _quantize(
    checkpoint: Checkpoint, job: Job, recipe: Recipe, device: torch.device, encode: Encoder
) -> tuple[dict[str, Tensor], float]:
    """Tensors by leaf name, and the relative error."""
    weight_OI = checkpoint.linear(job.module, job.out_channels, job.in_channels, torch.float32, device)
    if not job.coded:
        q_OI, scale_O = int8.encode(weight_OI)
        decoded_OI = int8_weight(q_OI, scale_O, torch.float32)
        return {int8.MARK: q_OI, int8.SCALE: scale_O}, relative_error(decoded_OI, weight_OI)
    seed = hashlib.sha256(f"{recipe.seed} {job.module}".encode()).digest()
    coded, error = encode_linear(weight_OI, job.bits, int.from_bytes(seed[:7], "little"), encode)
    return dialect.leaves(recipe.format, coded), error


def _assembled(checkpoint: Checkpoint, stored: dict[str, list[StoredTensor]]) -> Iterator[tuple[str, StoredTensor]]:
    """Every tensor of the output with its name, module by module."""
    for module in checkpoint.modules(vision=True):
        leaves = checkpoint.leaves(module)
        replaced = stored.get(module, [])
        prefix = leaves["weight"].name.removesuffix("weight") if replaced else ""
        yield from ((prefix + tensor.name, tensor) for tensor in replaced)
        kept = [leaf for leaf in leaves.names() if not (replaced and leaf == "weight")]
        yield from ((leaves[leaf].name, leaves[leaf]) for leaf in kept)


def _write_configs(
    source: Path,
    out: Path,
    recipe: Recipe,
    jobs: list[Job],
    stored: dict[str, list[StoredTensor]],
    summary: Summary,
) -> None:
    modules = [dialect.Module(j.prefix, j.bits, j.out_channels, j.in_channels, tuple(stored[j.module])) for j in jobs]
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
