"""What a rank holds of the tensors that a linear is stored as, by the cut of its weight [O, I]. No torch.

Readers read so, and plans count so. A leaf is the last part of a stored name.
"""

from __future__ import annotations

from dataclasses import dataclass

from kakera.arch.tensors import BLOCK, WHOLE, Cut, Shard, Tensor


@dataclass(frozen=True)
class Leaf:
    """Dimension i of the stored tensor runs along axis `axes[i]` of the weight, `step` channels in each place. Nothing
    is cut inside of a run of `grid` channels."""

    axes: tuple[int, ...]
    step: int = 1
    grid: int = 1


OUTPUTS, INPUTS = Leaf((0,)), Leaf((1,))
LEAVES = {
    **dict.fromkeys(("weight", "weight_int8"), Leaf((0, 1))),
    **dict.fromkeys(("escha_code", "trellis"), Leaf((1, 0), step=16, grid=BLOCK)),  # of tiles; the codec mixes runs
    **dict.fromkeys(("escha_rin", "escha_s_in", "suh"), INPUTS),
    **dict.fromkeys(("escha_rout", "escha_s_out", "svh", "weight_scale", "bias"), OUTPUTS),
    "su": Leaf((1,), step=16),  # signs of 16 channels in a word
    "sv": Leaf((0,), step=16),
    **dict.fromkeys(("escha_config", "mcg", "mul1"), Leaf(())),  # every rank reads them
}
ITSELF = Leaf(tuple(range(8)))  # what is declared as it is stored: a filter, the gates of heads


def leaf_cut(cut: Cut | None, leaf: str) -> Cut | None:
    """Of the leaf of a weight that is cut so; None: all of it. Raises ValueError where a coded one can not be cut."""
    known = LEAVES.get(leaf, ITSELF)
    if cut is None or cut.axis not in known.axes:
        return None
    cut.runs(known.grid, 0)
    return cut.runs(known.step, known.axes.index(cut.axis))


def is_coded(leaf: str) -> bool:
    """Whether runs of channels are mixed in it."""
    return LEAVES.get(leaf, ITSELF).grid > 1


def of_first(axis: int | None, leaf: str) -> bool:
    """Whether rank 0 alone holds the leaf of a weight that is cut along `axis`: outputs are summed, a bias once."""
    return leaf == "bias" and axis == 1


def leaf_shard(tensor: Tensor, leaf: str) -> Shard:
    """How ranks share the bytes of a declared tensor's leaf; of a stack as those of one of its linears."""
    shard, leading = tensor.shard, len(tensor.shape) - 2 if tensor.role == "stack" else 0
    shared = shard.axis is not None and shard.axis - leading in LEAVES.get(leaf, ITSELF).axes
    return shard if shared else WHOLE
