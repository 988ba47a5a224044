"""Gated DeltaNet kernels of a model on a GPU: a layer between its projections, for decode rows and for prefill."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from rich.table import Table

from kakera.arch.blocks import GdnSpec
from kakera.arch.spec import ModelSpec
from kakera.bench.cuda_time import copies, copy_bytes_per_second, graph_seconds
from kakera.bench.tables import right_aligned
from kakera.errors import UsageError
from kakera.ops.gdn_step import StepRows, gdn_step
from kakera.target import kernels

ROWS = (1, 4, 8, 32)
TOKENS = (512, 2048, 8192)
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Constants:
    """Of one layer, see `kakera.ops.gdn_step.GdnConstants`."""

    conv_KC: torch.Tensor
    rate_V: torch.Tensor
    dt_bias_V: torch.Tensor
    scale_D: torch.Tensor

    @staticmethod
    def random(spec: GdnSpec, device: str) -> Constants:
        make = partial(torch.randn, device=device)
        return Constants(
            make(spec.conv_taps, spec.conv_channels) * 0.5,
            -make(spec.v_heads).exp(),
            make(spec.v_heads),
            make(spec.v_dim),
        )


@dataclass(frozen=True)
class Step:
    """Seconds of one layer for one token of each row; floor: of reading and writing the states at a copy's speed."""

    rows: int
    seconds: float
    floor: float


@dataclass(frozen=True)
class Scan:
    """Seconds of one layer for a segment of so many tokens."""

    tokens: int
    seconds: float


@dataclass(frozen=True)
class GdnBench:
    device: str
    copy_bytes_per_second: float
    steps: tuple[Step, ...]
    scans: tuple[Scan, ...]


def measure(spec: ModelSpec, ranks: int, tell: Tell) -> GdnBench:
    """The heads of one of `ranks` cards. Raises UsageError for a model without such layers."""
    if spec.gdn is None or not kernels.serves_gdn_step(spec.gdn, "bf16"):
        raise UsageError(
            "there are no Gated DeltaNet kernels for this model: heads of 128 channels and 4 taps have some"
        )
    gdn = spec.gdn.of_rank(0, ranks)
    copy = copy_bytes_per_second()
    steps, scans = [], []
    for rows in ROWS:
        tell(f"{rows} decode rows")
        floor = 2 * 4 * rows * gdn.state_values / copy
        steps.append(Step(rows, graph_seconds(step_calls(gdn, rows, "cuda")), floor))
    for tokens in TOKENS:
        tell(f"prefill of {tokens:,} tokens")
        scans.append(Scan(tokens, graph_seconds(scan_calls(gdn, tokens, "cuda"))))
    return GdnBench(torch.cuda.get_device_name(), copy, tuple(steps), tuple(scans))


def step_calls(spec: GdnSpec, rows: int, device: str) -> list[Callable[[], object]]:
    """As many layers as it takes that no state is found in a cache."""
    layers = max(8, copies(4 * rows * spec.state_values))
    states = torch.randn(layers, rows, spec.v_heads, spec.k_dim, spec.v_dim, device=device) * 0.1
    columns = torch.randn(layers, rows, spec.conv_taps - 1, spec.conv_channels, device=device).bfloat16()
    mixed, constants = mixed_rows(spec, rows, device), Constants.random(spec, device)
    numbers = partial(torch.arange, dtype=torch.int32, device=device)
    ones = torch.ones(rows, dtype=torch.int32, device=device)
    arrived = torch.zeros(rows, spec.k_heads, dtype=torch.int32, device=device)
    which = StepRows(numbers(rows + 1), numbers(rows), ones, arrived)
    return [
        partial(gdn_step, mixed, constants, spec, 1e-6, which, state, conv)
        for state, conv in zip(states, columns, strict=True)
    ]


def scan_calls(spec: GdnSpec, tokens: int, device: str) -> list[Callable[[], object]]:
    from kakera.ops.gdn_prefill import gdn_prefill  # Triton comes with CUDA builds of torch only

    state = torch.zeros(spec.v_heads, spec.k_dim, spec.v_dim, device=device)
    columns = torch.zeros(spec.conv_taps - 1, spec.conv_channels, device=device).bfloat16()
    mixed, constants = mixed_rows(spec, tokens, device), Constants.random(spec, device)
    return [partial(gdn_prefill, mixed, constants, spec, 1e-6, state, columns)] * 4


def mixed_rows(spec: GdnSpec, rows: int, device: str) -> torch.Tensor:
    """A projection's output: q | k | v | z | b | a."""
    width = spec.conv_channels + spec.v_heads * (spec.v_dim + 2)
    return torch.randn(rows, width, device=device).bfloat16()


def tables(found: GdnBench, name: str) -> tuple[Table, Table]:
    title = f"{name}, {found.device}: Gated DeltaNet, a layer between its projections"
    steps = right_aligned(f"{title}: decode, microseconds", ("rows", "measured", "states at a copy's speed"))
    for step in found.steps:
        steps.add_row(str(step.rows), f"{step.seconds * 1e6:.1f}", f"{step.floor * 1e6:.1f}")
    scans = right_aligned("prefill, microseconds", ("tokens", "measured", "a token"))
    for scan in found.scans:
        scans.add_row(f"{scan.tokens:,}", f"{scan.seconds * 1e6:.0f}", f"{scan.seconds * 1e6 / scan.tokens:.3f}")
    return steps, scans
