"""Decode attention on a GPU against float64, over pages whose unused memory is NaN. Skipped where there is no GPU."""

from __future__ import annotations

import pytest
import torch

from kakera.kv.codec import encode
from kakera.kv.gpu.decode import (
    DecodeRows,
    DecodeScratch,
    LayerPages,
    attend_decode,
    attend_decode_reference,
    query_tiles,
)
from kakera.kv.gpu.finish import Finish
from kakera.kv.rotation import fast_hadamard

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
PAGE = 64
BOUND = 2e-3  # relative, of the whole output: q and p scale are fp16, y is fp16
NAN = float("nan")


class World:
    """Rows of given lengths (before their query tokens) and query tokens, in shuffled pages."""

    def __init__(
        self, lengths, tokens=1, group=6, kv_heads=4, dim=256, groups=1, window=4, coded=True, outlier=0.0, spare=3
    ):
        self.made = torch.Generator("cuda").manual_seed(sum(lengths) + group)
        counts = tokens if isinstance(tokens, list) else [tokens] * len(lengths)
        pages_of = [-(-(length + count) // PAGE) for length, count in zip(lengths, counts, strict=True)]
        count = sum(pages_of) + spare
        order = torch.randperm(count, generator=self.made, device="cuda").int()
        tables = torch.full((len(lengths), max(pages_of) + 2), 1 << 28, dtype=torch.int32, device="cuda")
        first = 0
        for r, n in enumerate(pages_of):
            tables[r, :n] = order[first : first + n]
            first += n
        slots = torch.randperm(len(lengths) + 1, generator=self.made, device="cuda")[: len(lengths)].int()
        offsets = torch.tensor([0, *counts], device="cuda").cumsum(0).int()
        self.rows = DecodeRows(
            torch.tensor(lengths, dtype=torch.int32, device="cuda"), offsets, slots, tables, max(counts), sum(counts)
        )
        ends = [length + n for length, n in zip(lengths, counts, strict=True)]
        self.pages = (
            self._coded(ends, count, kv_heads, dim, groups, window, outlier)
            if coded
            else self._dense(ends, count, kv_heads, dim)
        )
        self.q = (self._normal(sum(counts), kv_heads * group, dim) * dim**-0.5 * 2).half()
        self.group, self.kv_heads, self.dim = group, kv_heads, dim

    def _normal(self, *shape):
        return torch.randn(shape, device="cuda", generator=self.made)

    def _coded(self, ends, count, kv_heads, dim, groups, window, outlier):
        shape = (2, kv_heads, PAGE, dim)
        codes = torch.full((count, *shape[:3], dim // 4), 0xFF, dtype=torch.uint8, device="cuda")
        parameters = torch.full((count, 2, kv_heads, 2, groups, PAGE), NAN, dtype=torch.float16, device="cuda")
        ring = torch.full((len(ends) + 1, window + 2, *shape), NAN, dtype=torch.bfloat16, device="cuda")
        sink = torch.full((len(ends) + 1, *shape), NAN, dtype=torch.bfloat16, device="cuda")
        for r, end in enumerate(ends):
            slot, last = int(self.rows.slots_R[r]), (end - 1) // PAGE
            first_query = int(self.rows.starts_R[r]) // PAGE
            if end == int(self.rows.starts_R[r]):
                continue  # a row without tokens reads nothing
            history = self.rows.tables_RP[r, 1 : max(1, last - window)].long()
            for ids in history.split(256):
                x = self._normal(len(ids), *shape) + 0.3
                if outlier:
                    x[..., 7] *= outlier
                rows = encode(x, dim // groups)
                codes[ids] = rows.codes
                parameters[ids] = torch.stack((rows.scale, rows.minimum), 3).movedim(-2, -1)
            recent = range(max(0, first_query - window), last + 1)
            for page in recent:
                ring[slot, page % (window + 2)] = self._normal(*shape).bfloat16()
            ring[slot, last % (window + 2), :, :, (end - 1) % PAGE + 1 :] = NAN
            # page 0 is the sink for the row's later tokens, and may be in the window of its first ones
            sink[slot] = self._normal(*shape).bfloat16() if recent[0] else ring[slot, 0]
        return LayerPages(codes, parameters, ring, sink)

    def _dense(self, ends, count, kv_heads, dim):
        pages = torch.full((count, 2, kv_heads, PAGE, dim), NAN, dtype=torch.bfloat16, device="cuda")
        for r, end in enumerate(ends):
            if end == int(self.rows.starts_R[r]):
                continue  # a row without tokens reads nothing
            table = self.rows.tables_RP[r, : (end - 1) // PAGE + 1].long()
            pages[table] = self._normal(len(table), 2, kv_heads, PAGE, dim).bfloat16()
            pages[table[-1], :, :, (end - 1) % PAGE + 1 :] = NAN
        return LayerPages(None, None, pages, None)

    def scratch(self):
        tiles = query_tiles(self.rows.most_tokens, self.group)
        scratch = DecodeScratch.allocate(len(self.rows.starts_R), tiles, self.kv_heads, self.dim, self.q.device)
        scratch.partial.fill_(NAN)
        scratch.stats.fill_(NAN)
        return scratch

    def run(self, scratch=None, dtype=torch.float16, **options):
        y = torch.full_like(self.q, NAN, dtype=dtype)
        attend_decode(self.pages, self.rows, self.q, Finish(y, **options), scratch or self.scratch())
        return y

    def error(self):
        expected = attend_decode_reference(self.pages, self.rows, self.q)
        return relative(self.run(turn_back=False), expected)


def relative(y, expected):
    error = ((y.double() - expected).norm() / expected.norm()).item()
    print(f"error {error:.2e}", end=" ")
    return error


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 8, 12, 16])
@pytest.mark.parametrize("rows", [1, 4, 16, 32])
def test_every_grouping_and_batch(group, rows):
    lengths = [(37 * i * i + 900 * i + 500) % 5000 for i in range(rows)]
    assert World(lengths, group=group, kv_heads=2).error() <= BOUND


@pytest.mark.parametrize("dim", [128, 256])
@pytest.mark.parametrize("coded", [True, False])
def test_ragged_lengths_around_page_borders(dim, coded):
    lengths = [0, 1, 62, 63, 64, 65, 127, 128, 255, 256, 319, 320, 321, 383, 384, 385, 447, 448, 2047, 2048, 9001]
    assert World(lengths, dim=dim, coded=coded).error() <= BOUND


@pytest.mark.parametrize("tokens", range(2, 9))
def test_rows_of_several_tokens_cross_page_borders(tokens):
    lengths = [0, 60, 63, 64, 316, 317, 318, 319, 320, 380, 383, 1021, 4093]
    assert World(lengths, tokens=tokens).error() <= BOUND
    assert World(lengths, tokens=tokens, coded=False, group=2).error() <= BOUND


def test_rows_of_different_and_of_no_tokens():
    tokens = [0, 5, 1, 0, 8, 3, 0]
    assert World([100, 1022, 5, 0, 4093, 318, 64], tokens=tokens).error() <= BOUND


@pytest.mark.parametrize("window", [1, 2, 7])
def test_windows_of_other_sizes(window):
    assert World([0, 64, 100, 130, 640, 3000], tokens=3, window=window).error() <= BOUND


@pytest.mark.parametrize(("dim", "groups"), [(256, 2), (256, 4), (128, 2), (128, 4)])
def test_groups_of_dims(dim, groups):
    assert World([70, 700, 5000], dim=dim, groups=groups).error() <= BOUND


@pytest.mark.parametrize(
    ("lengths", "coded"), [([262_143], True), ([131_072, 7, 200_000, 64], True), ([65_536], False)]
)
def test_long_contexts(lengths, coded):
    assert World(lengths, kv_heads=2, coded=coded).error() <= BOUND


def test_huge_outliers_stay_finite():
    world = World([5000], outlier=2e4)
    assert world.pages.parameters[..., 0, :, :].nan_to_num().max() > 1000
    assert world.error() <= BOUND


def test_output_is_turned_back_centred_and_gated():
    for dtype in (torch.float16, torch.bfloat16):
        world = World([3, 500, 1000], tokens=2)
        o_TQD = attend_decode_reference(world.pages, world.rows, world.q)
        centre_KD = torch.randn(4, 256, device="cuda")
        expected = fast_hadamard(o_TQD.float()) + centre_KD.repeat_interleave(6, 0)
        gates = torch.randn(6, 24 * 256 + 64, device="cuda").to(dtype)[:, : 24 * 256]
        gated = expected * torch.sigmoid(gates.float()).view_as(expected)
        bound = BOUND if dtype == torch.float16 else 5e-3
        assert relative(world.run(dtype=dtype, centre_KD=centre_KD), expected.double()) <= bound
        assert relative(world.run(dtype=dtype, centre_KD=centre_KD, gate_TI=gates), gated.double()) <= bound
        y = torch.full_like(world.q, NAN, dtype=dtype)
        Finish(y, centre_KD=centre_KD, gate_TI=gates)(o_TQD.half())
        assert relative(y, gated.double()) <= bound


def test_a_row_gives_the_same_alone_and_in_a_batch_and_again():
    world = World([700, 5000, 64, 12_000])
    scratch = world.scratch()
    together = world.run(scratch)
    assert torch.equal(together, world.run(scratch))
    for r in range(4):
        alone = DecodeRows(*(x[r : r + 1] for x in (world.rows.starts_R,)), *_alone(world.rows, r))
        y = torch.empty_like(world.q[r : r + 1])
        attend_decode(world.pages, alone, world.q[r : r + 1].contiguous(), Finish(y), scratch)
        assert relative(y, together[r : r + 1].double()) <= 1e-3


def _alone(rows, r):
    return (
        torch.tensor([0, 1], dtype=torch.int32, device="cuda"),
        rows.slots_R[r : r + 1],
        rows.tables_RP[r : r + 1],
        1,
        1,
    )


def test_a_graph_serves_all_lengths():
    world = World([3000, 9000])
    scratch, y = world.scratch(), torch.empty_like(world.q)
    starts = world.rows.starts_R.clone()
    world.run(scratch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend_decode(world.pages, world.rows, world.q, Finish(y, turn_back=False), scratch)
    for shorter in (0, 1, 17):  # tokens of the last page
        world.rows.starts_R.copy_(starts - shorter)
        graph.replay()
        assert relative(y, attend_decode_reference(world.pages, world.rows, world.q)) <= BOUND


def test_corrupted_codes_change_the_answer_and_those_behind_16_bit_do_not():
    world = World([64 * 20])
    before = world.run()
    table = world.rows.tables_RP[0].long()
    world.pages.codes[table[16:21]] ^= 0x55
    world.pages.codes[table[0]] ^= 0x55
    assert torch.equal(world.run(), before)
    world.pages.codes[table[15]] ^= 0x55
    assert not torch.equal(world.run(), before)
