"""kakera info: what a checkpoint is. Tensors by kind, bits per weight, KV and state bytes."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kakera.cli.options import JsonOption, ModelArgument

if TYPE_CHECKING:
    from kakera.arch.spec import ModelSpec
    from kakera.arch.vision import VisionSpec
    from kakera.arch.weigh import Entry
    from kakera.cli.model import Shape
    from kakera.hub.names import Source


GAP = 2  # characters between two columns of the table, one of them the box's


@dataclass(frozen=True)
class Group:
    """All modules of one role ("mlp.up_proj") in one storage format."""

    role: str
    kind: str
    count: int
    shapes: tuple[tuple[int, ...], ...]
    bytes: int
    bits_per_weight: float


def info(
    model: ModelArgument = "mini",
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor instead of groups.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show what a checkpoint is: tensors, bits per weight, KV and state bytes."""
    import json

    name, path, spec, entries, tower, origin = _contents(model)
    groups = group_entries(entries)
    summary = summarise(spec, entries, tower)
    if as_json:
        listed = {"tensors": [vars(e) for e in entries]} if tensors else {"groups": [vars(g) for g in groups]}
        source = vars(origin) if origin else None
        typer.echo(json.dumps({"model": name, "path": path, "source": source, **summary, **listed}, indent=2))
        return
    _print(name, summary, [_single(e) for e in entries] if tensors else groups)
    if origin:
        typer.echo(f"from the hub: {origin}")
    if spec.blind:
        typer.echo(f"no images: {spec.blind}")
    if spec.unserved:
        typer.echo(f"{spec.unserved}.")


def _contents(model: str) -> tuple[str, str | None, ModelSpec, list[Entry], int, Source | None]:
    """Name, directory, declaration, what is stored or, of a config alone, what must be, bytes of its vision tower, and
    where it comes from. Of a repository only headers are read."""
    from kakera.cli.model import read_shape, resolve_model
    from kakera.errors import Unserved, UsageError
    from kakera.hub.disk import on_disk, source_of
    from kakera.hub.names import Repository
    from kakera.plan.known import KNOWN

    path = Path(model).expanduser()
    if not path.is_dir() and model in KNOWN:
        return model, None, *_of_shape(read_shape(model))
    if not path.is_dir() and (repository := Repository.called(model)):
        shape, kept = read_shape(model), on_disk(repository)
        return repository.name, str(kept) if kept else None, *_of_shape(shape)
    try:
        found = resolve_model(model)
    except Unserved:
        shape = read_shape(model)
        return path.name, str(path) if path.is_dir() else None, *_of_shape(shape)
    if found.scripted:
        raise UsageError("a scripted model has no checkpoint")
    from kakera.weights.checkpoint import Checkpoint

    stored = Checkpoint.open(found.path)
    return found.name, str(found.path), stored.spec, stored.entries(), stored.tower_bytes(), source_of(found.path)


def _of_shape(shape: Shape) -> tuple[ModelSpec, list[Entry], int, Source | None]:
    return shape.spec, shape.entries(), shape.tower_bytes(), shape.origin


def group_entries(entries: list[Entry]) -> list[Group]:
    """Entries whose names differ in the layer number only become one group, in the order of first appearance."""
    found: dict[tuple[str, str], list[Entry]] = {}
    for entry in entries:
        found.setdefault((_role(entry.name), entry.kind), []).append(entry)
    return [_group(role, kind, members) for (role, kind), members in found.items()]


def _group(role: str, kind: str, members: list[Entry]) -> Group:
    total, values = sum(e.bytes for e in members), sum(math.prod(e.shape) for e in members)
    return Group(role, kind, len(members), tuple(sorted({e.shape for e in members})), total, 8 * total / max(1, values))


def _single(entry: Entry) -> Group:
    return Group(entry.name, entry.kind, 1, (entry.shape,), entry.bytes, entry.bits_per_weight)


def _role(name: str) -> str:
    """ "model.layers.12.mlp.up_proj" -> "layers.*.mlp.up_proj"."""
    parts = ["*" if part.isdigit() else part for part in name.removeprefix("model.").split(".")]
    return ".".join(parts)


def summarise(spec: ModelSpec, entries: list[Entry], tower: int = 0) -> dict[str, Any]:
    """Figures that decide what a card must hold. `tower`: bytes of a vision tower that is stored."""
    from kakera.plan.kv_format import KvFormat
    from kakera.plan.sizes import checkpoint_bytes, live_state_bytes
    from kakera.target.target import CPU, CUDA

    int2 = KvFormat("int2", group=min(256, spec.head_dim))
    values = sum(math.prod(e.shape) for e in entries)
    total = sum(e.bytes for e in entries)
    return {
        "model_type": spec.model_type,
        "parameters": values,
        "bytes": total,
        "bits_per_weight": round(8 * total / max(1, values), 3),
        "layers": {"gdn": len(spec.gdn_layers), "full": len(spec.full_layers), "mtp": spec.draft_layers},
        "heads": {"query": spec.heads, "kv": spec.kv_heads, "head_dim": spec.head_dim},
        "vocab": spec.vocab,
        "max_positions": spec.max_positions,
        "kv_bytes_per_token": {"bf16": KvFormat("bf16").token_bytes(spec), "int2": int2.token_bytes(spec)},
        "live_state_bytes": live_state_bytes(spec, CPU),
        "checkpoint_bytes": {
            "fp32": checkpoint_bytes(spec, int2, "fp32", CPU),
            "fp16": checkpoint_bytes(spec, int2, "fp16", CUDA),
        },
        **({} if spec.vision is None else {"vision": _tower(spec.vision, tower)}),
    }


def _tower(vision: VisionSpec, stored: int) -> dict[str, int]:
    sizes = {"blocks": vision.depth, "hidden": vision.hidden, "parameters": vision.parameters, "bytes": stored}
    return {**sizes, "patch": vision.patch, "pixels_per_token": vision.factor**2}


def _cells(g: Group) -> tuple[str, ...]:
    from kakera.plan.table import gigabytes

    shape = " / ".join("x".join(map(str, s)) or "scalar" for s in g.shapes)
    return (g.kind, str(g.count), shape, gigabytes(g.bytes), f"{g.bits_per_weight:.3f}")


def broken_name(name: str, width: int) -> str:
    """In lines of at most `width` characters that end behind a dot or an underscore; a longer word stays whole."""
    lines = [""]
    for word in re.findall(r"[^._]+[._]?|[._]", name):
        if lines[-1] and len(lines[-1]) + len(word) > width:
            lines.append("")
        lines[-1] += word
    return "\n".join(lines)


def _print(name: str, summary: dict[str, Any], groups: list[Group]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from kakera.cli.terminal import visible
    from kakera.plan.table import gigabytes

    kv, layers, heads = summary["kv_bytes_per_token"], summary["layers"], summary["heads"]
    stored = summary["checkpoint_bytes"]
    console = Console(highlight=False, markup=False)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, GAP - 1, 0, 0), show_edge=False, pad_edge=False)
    table.add_column("tensor", overflow="fold")  # in_proj_qkv, _z, _a and _b differ at the end only
    table.add_column("kind")
    for column in ("count", "shape", "bytes", "bits"):
        table.add_column(column, justify="right", overflow="fold")
    rows = [_cells(g) for g in groups]
    columns = zip(*[("kind", "count", "shape", "bytes", "bits"), *rows], strict=True)
    others = sum(max(map(len, cells)) + GAP for cells in columns)
    for g, cells in zip(groups, rows, strict=True):
        table.add_row(broken_name(visible(g.role, layout=""), console.width - others), *cells)
    console.print(table)
    lines = (
        f"{visible(name, layout='')}: {summary['model_type']}, {summary['parameters'] / 1e6:,.1f} M parameters in "
        f"{gigabytes(summary['bytes'])}, {summary['bits_per_weight']:.3f} bits per weight",
        f"layers: {layers['gdn']} GDN + {layers['full']} full attention, {layers['mtp']} draft; "
        f"{heads['query']}/{heads['kv']} heads x {heads['head_dim']}; context {summary['max_positions']} tokens",
        f"KV: {kv['bf16'] / 1024:.2f} KiB a token in bf16, {kv['int2'] / 1024:.2f} KiB in int2",
        f"recurrent state: {gigabytes(summary['live_state_bytes'])} a running request; "
        f"a prefix checkpoint {gigabytes(stored['fp32'])} in fp32, {gigabytes(stored['fp16'])} in fp16",
    )
    for line in (*lines, *_tower_line(summary.get("vision"))):
        console.print(line, soft_wrap=True)


def _tower_line(tower: dict[str, int] | None) -> list[str]:
    from kakera.plan.table import gigabytes

    if tower is None:
        return []
    what = f"{tower['blocks']} blocks x {tower['hidden']}, {tower['parameters'] / 1e6:,.1f} M parameters"
    stored = f"in {gigabytes(tower['bytes'])}" if tower["bytes"] else "which this checkpoint does not hold"
    side = int(tower["pixels_per_token"] ** 0.5)
    return [f"vision tower: {what} {stored}; a token is {side} x {side} pixels"]
