"""The trellis search as one Triton kernel: a program walks one tile after the other, its path costs staying in L1/L2.

Eager torch writes [tiles, 65536] fp32 several times a step; here a step reads and writes only the 2^(16-K) path costs
(64 KiB at K = 2) and writes their back-pointers. The codebook (mcg only) is computed in registers: a table of 128 KiB
would be the largest stream of all.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kakera.ops.codec import codebook
from kakera.ops.codec.trellis import STATE_BITS, WEIGHTS
from kakera.quantize.viterbi import UNREACHABLE
from kakera.target.as_torch import target_of

PROGRAMS_PER_PROCESSOR = 4  # resident at K = 2: 8 warps of 59 registers (sm_90); more would only cost scratch
BLOCK_ENDS = 1024  # path costs extended at a time, 4 a thread; 2048 needs 122 to 254 registers and halves occupancy
WARPS = 8
MULTIPLIER = tl.constexpr(codebook.MCG_MULTIPLIER)
FAR = tl.constexpr(UNREACHABLE)


@triton.jit
def _mcg(state):
    """Codebook value (fp32) of a 16-bit state."""
    mixed = ((state.to(tl.uint32) * MULTIPLIER) & 0x8FFF8FFF) ^ 0x3B603B60
    low = (mixed & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
    high = (mixed >> 16).to(tl.uint16).to(tl.float16, bitcast=True)
    return (low + high).to(tl.float32)


@triton.jit
def _start(cost, seam, ENDS: tl.constexpr, BLOCK: tl.constexpr):
    for first in range(0, ENDS, BLOCK):
        end = first + tl.arange(0, BLOCK)
        reachable = (end == seam) | (seam < 0)
        tl.store(cost + end, tl.where(reachable, 0.0, FAR))


@triton.jit
def _cheapest(cost, ENDS: tl.constexpr, BLOCK: tl.constexpr):
    """Index of the lowest of the path costs; the first of equals."""
    lowest = FAR
    index = 0
    for first in range(0, ENDS, BLOCK):
        value, at = tl.min(tl.load(cost + first + tl.arange(0, BLOCK)), axis=0, return_indices=True)
        index = tl.where(value < lowest, first + at, index)
        lowest = tl.minimum(value, lowest)
    return index


@triton.jit
def _search_kernel(
    targets, seams, states, costs, backs, tiles, K: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr
):
    """targets fp32 [tiles, STEPS], seams int32 [tiles] (-1: free), states int32 [tiles, STEPS] (out);
    scratch per program: costs fp32 [2, ENDS] and backs uint8 [STEPS, ENDS], both indexed by end."""
    BRANCHES: tl.constexpr = 1 << K
    ENDS: tl.constexpr = 1 << (16 - K)
    program = tl.program_id(0)
    cost = costs + program * 2 * ENDS
    back = backs + program.to(tl.int64) * STEPS * ENDS
    prior = tl.arange(0, BLOCK // BRANCHES)  # the part of an end that the last state shared
    symbol = tl.arange(0, BRANCHES)  # the part that this step added
    for tile in range(program, tiles, tl.num_programs(0)):
        seam = tl.load(seams + tile)
        _start(cost, seam, ENDS, BLOCK)
        tl.debug_barrier()
        for step in range(STEPS):
            x = tl.load(targets + tile * STEPS + step)
            old = cost + (step % 2) * ENDS
            new = cost + ((step + 1) % 2) * ENDS
            for first in range(0, ENDS, BLOCK):
                shared = first // BRANCHES + prior
                end = shared[:, None] * BRANCHES + symbol[None, :]
                best = tl.full([BLOCK // BRANCHES, BRANCHES], FAR * 2, tl.float32)
                choice = tl.zeros([BLOCK // BRANCHES, BRANCHES], tl.int32)
                for branch in range(BRANCHES):
                    before = tl.load(old + branch * (ENDS // BRANCHES) + shared)
                    off = _mcg(branch * ENDS + end) - x
                    candidate = off * off + before[:, None]  # without x^2 costs reach -400, and K = 8 differs by 0.007
                    choice = tl.where(candidate < best, branch, choice)
                    best = tl.minimum(candidate, best)
                tl.store(new + end, best)
                tl.store(back + step * ENDS + end, choice.to(tl.uint8))
            tl.debug_barrier()
        end = tl.where(seam < 0, _cheapest(cost + (STEPS % 2) * ENDS, ENDS, BLOCK), seam)
        for backwards in range(STEPS):
            step = STEPS - 1 - backwards
            state = (tl.load(back + step * ENDS + end).to(tl.int32) << (16 - K)) | end
            tl.store(states + tile * STEPS + step, state)
            end = state >> K
        tl.debug_barrier()


def search_triton(targets: Tensor, seam: Tensor | None, table: Tensor, bits: int) -> Tensor:
    """One pass, as `viterbi.search_torch`. Raises ValueError for another codebook than mcg.

    Scratch: 4.3 MB a program at K = 2 (back-pointers 256 x 16 KiB), so 2.3 GB on the 132 processors of an H200.
    """
    if not torch.equal(table, codebook.table("mcg", table.dtype, table.device)):
        raise ValueError("the Triton search knows the mcg codebook only")
    tiles, ends, device = targets.shape[0], 1 << (STATE_BITS - bits), targets.device
    programs = min(tiles, PROGRAMS_PER_PROCESSOR * _processors(device))
    states = torch.empty(tiles, WEIGHTS, dtype=torch.int32, device=device)
    seams = torch.full((tiles,), -1, dtype=torch.int32, device=device) if seam is None else seam.to(torch.int32)
    costs = torch.empty(programs, 2, ends, device=device)
    backs = torch.empty(programs, WEIGHTS, ends, dtype=torch.uint8, device=device)
    block = min(BLOCK_ENDS, ends)
    _search_kernel[(programs,)](
        targets, seams, states, costs, backs, tiles, K=bits, STEPS=WEIGHTS, BLOCK=block, num_warps=WARPS
    )
    return states


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if target_of(device).has_cards else 1
