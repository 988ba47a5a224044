"""The search for the best path through the trellis of a tile, one pass in plain torch: reference and fallback.

The state after weight i is s_i = ((s_{i-1} << K) | symbol) & 0xFFFF and costs (value[s_i] - x_i)^2. What the past can
still influence is only the low 16 - K bits of the last state, so 2^(16-K) path costs are alive ("ends" below), each
extended by 2^K branches: 65,536 branches a step whatever K is. `viterbi_triton` is the same search as one kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kakera.ops.codec.trellis import STATE_BITS, WEIGHTS
from kakera.target.as_torch import target_of

UNREACHABLE = 1e30


def search_torch(targets: Tensor, seam: Tensor | None, table: Tensor, bits: int) -> Tensor:
    """One pass in plain torch, in batches of tiles that fit the memory (back-pointers: 256 bytes x 2^(16-K) a tile).

    `seam` [tiles]: the low 16 - K bits of the state before the first weight and of the last one; None: both free.
    """
    states = torch.empty(targets.shape, dtype=torch.int32, device=targets.device)
    batch = _batch_tiles(targets.device, bits)
    for start in range(0, targets.shape[0], batch):
        part = slice(start, start + batch)
        states[part] = _search_batch(targets[part], None if seam is None else seam[part], table, bits)
    return states


def _search_batch(targets: Tensor, seam: Tensor | None, table: Tensor, bits: int) -> Tensor:
    tiles, steps = targets.shape
    branches, ends = 1 << bits, table.numel() >> bits  # a state is (branch, end): its high K bits and the rest
    # An end is (prior, symbol). Kept symbol-major inside a step, so that `prior` is contiguous and broadcasts cheaply.
    value = table.view(branches, ends // branches, branches).transpose(1, 2).contiguous()
    cost = _start_costs(tiles, ends, seam, targets.device)
    back = torch.zeros(steps, tiles, *value.shape[1:], dtype=torch.uint8, device=targets.device)
    best, candidate, off = cost.new_empty(3, tiles, *value.shape[1:])
    for step in range(steps):
        x, choice = targets[:, step, None, None], back[step]
        before = cost.view(tiles, branches, 1, -1)
        for branch in range(branches):
            # not without the x^2 that all paths share: sums of -400 would round away what paths of 8 bits differ by
            torch.sub(value[branch], x, out=off)
            torch.addcmul(before[:, branch], off, off, out=candidate if branch else best)
            if branch:
                better = (candidate < best).view(torch.uint8)  # branches ascend, so a later one is a maximum
                torch.maximum(choice, better.mul_(branch), out=choice)
                torch.minimum(best, candidate, out=best)
        cost.view(tiles, -1, branches).copy_(best.transpose(1, 2))
    end = cost.argmin(-1) if seam is None else seam.long()
    return _trace_back(back, end, bits)


def _start_costs(tiles: int, ends: int, seam: Tensor | None, device: torch.device) -> Tensor:
    if seam is None:
        return torch.zeros(tiles, ends, device=device)
    cost = torch.full((tiles, ends), UNREACHABLE, device=device)
    return cost.scatter_(1, seam.long()[:, None], 0.0)


def _trace_back(back: Tensor, end: Tensor, bits: int) -> Tensor:
    """back uint8 [steps, tiles, symbols, priors]: the branch taken into each end. States int32 [tiles, steps]."""
    steps, tiles, symbols, priors = back.shape
    states = torch.empty(tiles, steps, dtype=torch.int32, device=back.device)
    for step in range(steps - 1, -1, -1):
        place = (end % symbols) * priors + end // symbols
        branch = back[step].view(tiles, -1).gather(1, place[:, None])[:, 0].long()
        state = branch * symbols * priors + end
        states[:, step] = state
        end = state >> bits
    return states


def _batch_tiles(device: torch.device, bits: int) -> int:
    """Tiles at a time: on a CPU what stays in a core's cache, on a GPU a quarter of the free memory."""
    if target_of(device).one_memory:
        return 8
    bytes_per_tile = WEIGHTS * (1 << (STATE_BITS - bits)) + 8 * 4 * (1 << STATE_BITS)
    return max(1, min(4096, torch.cuda.mem_get_info(device)[0] // 4 // bytes_per_tile))
