"""Target: what a kind of device means for kakera. Resolved once, by `Machine.target`, and passed on. No torch.

Other rooms ask it and compare no names of devices. What a card has kernels for is told by `kernels.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kakera.arch.layout import DTYPE_BYTES, Dtype

Kind = Literal["cpu", "cuda"]
StateDtype = Literal["fp32", "fp16"]

MIB = 2**20


@dataclass(frozen=True)
class Overhead:
    """A stated estimate of what the runtime takes beyond our tensors. `kakera.plan` marks it as an estimate."""

    name: str
    bytes: int
    note: str


@dataclass(frozen=True)
class Defaults:
    """What a plan takes where nobody wishes otherwise. host_cache: bytes, and at most so much of the host's memory."""

    chunk: int  # prefill tokens of a step
    state_dtype: StateDtype  # of stored states
    host_cache: int
    host_cache_share: float


@dataclass(frozen=True)
class Patience:
    """How long a step may take before it counts as a hang, and what the first ones wait for."""

    stall_steps: float  # of the predicted length
    compile_seconds: float  # in the middle of a step, when a shape first comes
    first_token_seconds: float  # what the first token needs is compiled


@dataclass(frozen=True)
class Target:
    """One kind of device. `capability`: of the card (compute capability), None where no card was asked."""

    kind: Kind  # torch's name of it
    dtype: Dtype  # of activations
    defaults: Defaults
    patience: Patience
    overheads: tuple[Overhead, ...]  # on each device
    group_overheads: tuple[Overhead, ...]  # on each of several that share a model; on a CPU for each but the first
    server_host_bytes: int  # of the server's process, where the device has a memory of its own
    card_host_bytes: int  # of the engine's process, for each device, likewise
    staged: int | None  # checkpoints on their way to the host at a time; None: they are stored where they are computed
    warm_up_tokens: int  # of prefill before a benchmark's clock starts; a multiple of every usual chunk
    bandwidth: float | None  # bytes per second of a device that tells none
    flops: float | None  # operations per second of one that tells none
    capability: tuple[int, int] | None = None

    @property
    def activation_bytes(self) -> int:
        """Of one value."""
        return DTYPE_BYTES[self.dtype]

    @property
    def one_memory(self) -> bool:
        """Whether it computes in the host's own memory: all rows of a plan are one sum then."""
        return self.kind == "cpu"

    @property
    def has_cards(self) -> bool:
        """Whether it is NVIDIA cards: steps are queued kernels, compiled when a shape first comes, captured in graphs,
        and copies to the host go by pinned memory."""
        return self.kind == "cuda"


CPU = Target(
    kind="cpu",
    dtype="fp32",  # 16-bit matmul is far slower on AVX2 machines
    defaults=Defaults(chunk=512, state_dtype="fp32", host_cache=2 * 2**30, host_cache_share=0.15),
    # Neighbours count: at a load of 5 on two cores `mini` took more than 31 seconds for a step of 512 tokens predicted
    # at 2, because its threads wait for each other to get a core, many times a step.
    patience=Patience(stall_steps=60.0, compile_seconds=0.0, first_token_seconds=0.0),
    # Resident sets measured on Linux, torch 2.13 CPU: engine process 235 MB before the weights, server 80 MB with a
    # 16K-token vocabulary, its helpers 13 MB; a 248K-token vocabulary and allocator slack take the rest.
    overheads=(Overhead("server and engine processes", 640 * MIB, "estimate: Python, torch, tokenizer"),),
    group_overheads=(Overhead("engine processes of other ranks", 256 * MIB, "estimate: Python and torch, each"),),
    server_host_bytes=0,
    card_host_bytes=0,
    staged=None,
    warm_up_tokens=256,  # nothing is compiled
    bandwidth=20e9,  # two-channel laptop memory; not measured on this machine
    flops=100e9,  # fp32, a few AVX2 cores; not measured on this machine
)
CUDA = Target(
    kind="cuda",
    dtype="bf16",
    defaults=Defaults(chunk=2048, state_dtype="fp16", host_cache=8 * 2**30, host_cache_share=0.20),
    patience=Patience(stall_steps=10.0, compile_seconds=90.0, first_token_seconds=300.0),
    # Measured on an H200 with torch 2.11: 680 MB with graphs of 8 rows, 806 MB with chunks of 8,192. A card with fewer
    # multiprocessors keeps less local memory for each, so this is on the safe side there.
    overheads=(
        Overhead("CUDA context and modules", 640 * MIB, "estimate"),
        Overhead("CUDA graphs", 128 * MIB, "estimate"),
    ),
    group_overheads=(),
    server_host_bytes=320 * MIB,  # guesses as well: a CUDA build of torch loads far larger libraries than the CPU build
    card_host_bytes=1280 * MIB,
    staged=2,  # a step rarely saves more: end of a message and the end of the prompt
    warm_up_tokens=16384,  # several whole chunks, and the last piece as long as that of what is measured
    bandwidth=None,
    flops=None,
)
