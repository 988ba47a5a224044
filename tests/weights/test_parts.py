"""Parts of tensors, as a rank reads them: nothing else is read, and the parts of all ranks make the linear.

In float64, because there what a cut changes and what rounding does are far apart.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from kakera.arch.parts import leaf_cut
from kakera.arch.tensors import Cut, Shard
from kakera.errors import CheckpointError
from kakera.ops.codec import codebook, trellis
from kakera.ops.codec.coded import CodedLinear
from kakera.ops.codec.hadamard import BLOCK, hadamard
from kakera.weights import escha, exl3, files, int8, plain
from kakera.weights.leaves import Leaves
from random_leaves import made

NAMES = ["plain", "int8", "escha 2", "escha 3", "exl3 2 mcg", "exl3 2.5 mul1", "exl3 4 3inst", "exl3 3 signs"]


@st.composite
def cut_tensors(draw) -> tuple[tuple[int, ...], Cut]:
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    axis = draw(st.integers(0, len(shape) - 1))
    edges = sorted(draw(st.lists(st.integers(0, shape[axis]), min_size=2, max_size=6)))
    return shape, Cut(axis, tuple(zip(edges[::2], edges[1::2], strict=False)))


def stored(directory: Path, tensors: dict[str, Tensor]) -> dict[str, files.StoredTensor]:
    save_file(tensors, directory / "x.safetensors")
    return {tensor.name: tensor for tensor in files.read_header(directory / "x.safetensors")}


@settings(max_examples=40)
@given(cut_tensors(), st.sampled_from([torch.float32, torch.bfloat16, torch.int16]), st.sampled_from([1, 3, 1 << 20]))
def test_a_part_is_read_as_it_would_be_cut_and_the_rest_is_not_read(tmp_path_factory, case, dtype, buffer):
    shape, cut = case
    whole = torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)
    wanted = files.part_of(whole, cut)
    if dtype.is_floating_point:  # whoever reads a value of another rank trips over it
        spoiled = torch.full(shape, torch.nan, dtype=dtype)
        for begin, end in cut.ranges:
            spoiled.narrow(cut.axis, begin, end - begin).copy_(whole.narrow(cut.axis, begin, end - begin))
        whole = spoiled
    held = stored(tmp_path_factory.mktemp("part"), {"x": whole})["x"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "BUFFER_BYTES", buffer * dtype.itemsize)
        assert torch.equal(held.read(cut=cut), wanted) and held.read(cut=cut).shape == cut.shape(shape)
        assert torch.equal(held.read(torch.float64, cut=cut), wanted.double())


def leaves_of(directory: Path, tensors: dict[str, Tensor]) -> Leaves:
    found = Leaves("linear")
    for leaf, held in stored(directory, tensors).items():
        found.add(leaf, held)
    return found


def weight(name: str, leaves: Leaves, outputs: int, inputs: int, cut: Cut | None = None) -> Tensor:
    """[O, I] in float64, decoded without a rounding on the way."""
    if name == "plain":
        return plain.read(leaves, outputs, inputs, torch.float64, "cpu", cut)
    if name == "int8":
        return int8.read(leaves, outputs, inputs, torch.float64, "cpu", cut)
    reader = escha if name.startswith("escha") else exl3
    return exact(reader.read_coded(leaves, outputs, inputs, "cpu", cut))


def exact(coded: CodedLinear) -> Tensor:
    wq_OI = trellis.decode(coded.code, codebook.table(coded.codebook, torch.float64))
    rotated_OI = hadamard(hadamard(wq_OI, -1, 1 / BLOCK), 0)
    return coded.out_scale.double()[:, None] * rotated_OI * coded.in_scale.double()


def shares(axis: int, blocks: list[int], order: list[int]) -> list[Cut]:
    """Runs of so many blocks of 128 channels, given to ranks as `order` says: ranges of a rank need not touch."""
    edges = [sum(blocks[:i]) * BLOCK for i in range(len(blocks) + 1)]
    ranges = list(pairwise(edges))
    return [Cut(axis, tuple(r for r, of in zip(ranges, order, strict=True) if of == rank)) for rank in sorted({*order})]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("axis", [0, 1])
@settings(max_examples=5)
@given(st.lists(st.tuples(st.integers(1, 2), st.integers(0, 2)), min_size=2, max_size=4), st.integers(1, 2))
def test_the_parts_of_a_linear_make_the_linear(tmp_path_factory, name, axis, runs, others):
    """Outputs lie behind each other, inputs add up, for any ranges on the grid."""
    blocks, order = [size for size, _ in runs], [rank for _, rank in runs]
    sizes = [0, 0]
    sizes[axis], sizes[1 - axis] = sum(blocks) * BLOCK, others * BLOCK
    leaves = leaves_of(tmp_path_factory.mktemp("linear"), made(name, *sizes, seed=len(blocks)))
    cuts = shares(axis, blocks, order)
    whole_OI = weight(name, leaves, *sizes)
    x_TI = torch.randn(3, sizes[1], generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected_TO = x_TI @ whole_OI.T
    parts = [weight(name, leaves, *sizes, cut) for cut in cuts]
    if axis == 0:
        found_TO = torch.empty_like(expected_TO)
        for cut, part_OI in zip(cuts, parts, strict=True):
            chosen = torch.cat([torch.arange(*r) for r in cut.ranges])
            found_TO[:, chosen] = x_TI @ part_OI.T
    else:
        found_TO = sum(files.part_of(x_TI, cut) @ part_OI.T for cut, part_OI in zip(cuts, parts, strict=True))
    assert (found_TO - expected_TO).abs().max() <= 1e-12 * expected_TO.abs().max()


@pytest.mark.parametrize("name", NAMES[2:])
@pytest.mark.parametrize("cut", [Cut(0, ((0, 64),)), Cut(1, ((64, 256),)), Cut(0, ((0, 128), (192, 256)))])
def test_a_coded_linear_is_not_cut_inside_a_run_of_128_channels(tmp_path, name, cut):
    """A cut at 64 would give numbers, and wrong ones."""
    leaves = leaves_of(tmp_path, made(name, 256, 256, seed=0))
    with pytest.raises(CheckpointError, match=r"channel (64|192) is inside of a run of 128; run this model on fewer"):
        weight(name, leaves, 256, 256, cut)


@pytest.mark.parametrize("name", NAMES[:2])
def test_rows_and_plain_weights_are_cut_anywhere(tmp_path, name):
    leaves = leaves_of(tmp_path, made(name, 256, 256, seed=0))
    whole = weight(name, leaves, 256, 256)
    assert torch.equal(weight(name, leaves, 256, 256, Cut(0, ((3, 70),))), whole[3:70])
    assert torch.equal(weight(name, leaves, 256, 256, Cut(1, ((0, 1), (9, 256)))), whole[:, [0, *range(9, 256)]])


def test_the_shape_that_is_checked_is_that_of_the_whole(tmp_path):
    """A rank of a model of other sizes would read a part that fits by chance."""
    leaves = leaves_of(tmp_path, made("escha 2", 256, 256, seed=0))
    for outputs, inputs in ((512, 256), (256, 512), (128, 256)):
        with pytest.raises(CheckpointError, match="the model needs"):
            weight("escha 2", leaves, outputs, inputs, Cut(0, ((0, 128),)))


def test_three_ranges_of_a_fused_linear_are_those_of_its_heads():
    """in_proj_qkv of the 27B, in blocks of 128 channels: q 8 r, k 16 + 8 r, v 32 + 24 r."""
    shard = Shard(0, ((16, 128), (16, 128), (48, 128)))
    cut = shard.cut(1, 2)
    assert cut is not None and leaf_cut(cut, "escha_code") == Cut(1, ((64, 128), (192, 256), (448, 640)))
    assert [begin // 128 for begin, _ in cut.ranges] == [8, 24, 56]
    assert leaf_cut(cut, "suh") is None and leaf_cut(cut, "svh") == cut
    assert leaf_cut(cut, "mcg") is None and leaf_cut(cut, "A_log") == cut
