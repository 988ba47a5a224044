"""The attention kernels at their edges: page offsets beyond 32 bits, batches of extremes, borders of zones, outliers,
shared pages, graphs whose rows change. All that no query may see is NaN. Skipped where there is no GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton (Linux)")

import test_kv_gpu_cuda as caches
import test_kv_prefill_cuda as prefills
import test_kv_write_cuda as writes
from test_decode_cuda import BOUND, NAN, PAGE, World, relative
from test_kv_prefill_cuda import Case, check

from kakera.kv.codec import encode
from kakera.kv.gpu.decode import LayerPages, attend_decode, attend_decode_reference
from kakera.kv.gpu.finish import Finish
from kakera.kv.gpu.prefill import Bf16History, Int2History, PrefillAttention
from kakera.kv.gpu.write import write_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
# of pages with 4 KV heads of 256 dims: pools in which an offset of 31 bits, in elements, is not enough
CODED_PAGES = (1 << 31) // (2 * 4 * 2 * 4 * PAGE) + 6  # parameters of four groups; 17 GB of codes, 4 GB of parameters
DENSE_PAGES = 2 * (1 << 31) // (2 * 4 * PAGE * 256) + 6  # 9 GB
LOUD_BOUND = 5e-3  # where logits reach 1,250, whose sums in fp32 are off by 1e-3


class Far:
    """Pages of a small pool at the ends, in the middle and beside the 32-bit borders of a huge one."""

    def __init__(self, pages: LayerPages):
        coded = pages.codes is not None
        small = pages.codes if coded else pages.halves
        last = (CODED_PAGES if coded else DENSE_PAGES) - 1
        if torch.cuda.mem_get_info()[0] < (26 << 30 if coded else 10 << 30):
            pytest.skip("needs 26 GB of free memory for codes, 10 for bf16 pages")
        borders = [id for id in (0, 16383, 16384, 65535, 65536, 131071, 131072, last - 6, last) if id <= last]
        between = torch.linspace(200_000 if coded else 17_000, last - 7, len(small) - len(borders)).long()
        ids = torch.cat((torch.tensor(borders), between))
        assert len(ids.unique()) == len(small)
        self.ids = ids[torch.randperm(len(ids))].cuda()
        self.pages = LayerPages(
            *(self._spread(x, last + 1) for x in (pages.codes, pages.parameters)),
            pages.halves if coded else self._spread(pages.halves, last + 1),
            pages.sink,
        )

    def _spread(self, small, count):
        if small is None:
            return None
        nothing = NAN if small.is_floating_point() else 255
        far = torch.full((count, *small.shape[1:]), nothing, dtype=small.dtype, device="cuda")
        far[self.ids] = small
        return far

    def table(self, near):
        """Of ids of the small pool; others stay."""
        known = near < len(self.ids)
        return torch.where(known, self.ids[near.long().clamp(max=len(self.ids) - 1)], near.long()).to(near.dtype)


@pytest.mark.parametrize("coded", [True, False])
def test_decode_reads_pages_beyond_32_bits(coded):
    world = World([40_000, 700], tokens=[1, 8], groups=4 if coded else 1, coded=coded)
    near, far = world.run(), Far(world.pages)
    world.rows = replace(world.rows, tables_RP=far.table(world.rows.tables_RP))
    world.pages = far.pages
    assert near.isfinite().all() and torch.equal(world.run(), near)


@pytest.mark.parametrize("group", [64, 0])
def test_write_stores_to_pages_beyond_32_bits(group):
    near = writes.World(1000, group=group)
    far, places = Far(near.pages), near.places
    moved = replace(places, **{name: far.table(getattr(places, name)) for name in ("page_T" if group else "half_T",)})
    for pages, where in ((near.pages, places), (far.pages, moved)):
        q = torch.empty_like(near.heads.q_TQD).contiguous()
        write_rows(near.heads, pages, where, near.centres, q)
    for name in ("codes", "parameters") if group else ("halves",):
        assert torch.equal(getattr(far.pages, name)[far.ids], getattr(near.pages, name))


@pytest.mark.parametrize("codec", ["int2", "bf16"])
def test_prefill_reads_pages_beyond_32_bits(codec):
    world = prefills.World(Case(4096, 300, 6, 4, params_group=64, codec=codec, dtype=torch.float16))
    near = world.ours()
    tensors = [x[1] for x in world.pool.tensors()]
    int2 = codec == "int2"
    far = Far(LayerPages(*tensors, world.band, world.sink) if int2 else LayerPages(None, None, *tensors, None))
    history = Int2History(far.pages.codes, far.pages.parameters, world.sink) if int2 else Bf16History(far.pages.halves)
    world.table, world.history = far.table(world.table), lambda: history
    assert near.isfinite().all() and torch.equal(world.ours(), near)


@pytest.mark.parametrize(("longest", "coded"), [(262_143, True), (100_000, False)])
def test_the_shortest_rows_beside_the_longest_and_rows_of_nothing(longest, coded):
    lengths = [longest, *[0, 1, 63, 64, 65, 319, 320, 0] * 3, 4000, 0, 0, 5000, longest - 64, 0, 9]
    tokens = [1, *[1, 0, 2, 8, 0, 5, 1, 3] * 3, 0, 0, 1, 7, 0, 1, 1]
    assert len(lengths) == 32
    assert World(lengths, tokens=tokens, kv_heads=2, coded=coded).error() <= BOUND


def test_as_many_rows_as_a_launch_takes():
    world = World([i * i % 900 for i in range(256)], tokens=[i % 3 for i in range(256)], kv_heads=2, group=3)
    assert world.error() <= BOUND


@pytest.mark.parametrize("window", [1, 2, 7])
@pytest.mark.parametrize("tokens", [5, 64])
def test_rows_of_up_to_a_page_at_every_border_of_zones(window, tokens):
    borders = [PAGE * page for page in (0, 1, window, window + 1, window + 2, 40)]
    lengths = sorted({max(0, at + d) for at in borders for d in (-tokens, -tokens // 2, -1, 0, 1)})
    assert World(lengths, tokens=tokens, window=window, kv_heads=1, group=2).error() <= BOUND


def test_constant_rows_and_outliers_of_ten_thousand():
    world = World([6000, 1000], tokens=[3, 1], kv_heads=2)
    table = world.rows.tables_RP[0, 1:85].long()
    x = world._normal(len(table), 2, 2, PAGE, 256)
    x[0::6] = 3.75  # constant
    x[1::6] = 0
    x[2::6, 0, :, 9, 30] = 1e4  # of keys
    x[3::6, 1, :, 11] = -1e4  # constant values
    x[4::6, 1, :, ::16, 200] = 1e4
    rows = encode(x, 256)
    world.pages.codes[table] = rows.codes
    world.pages.parameters[table] = torch.stack((rows.scale, rows.minimum), 3).movedim(-2, -1)
    assert world.error() <= LOUD_BOUND
    ring = world.pages.halves[int(world.rows.slots_R[0])]
    ring[(6000 // PAGE - 1) % len(ring), 0, :, 7, 3] = 1e4
    ring[(6000 // PAGE - 2) % len(ring), 1, :, 20, 5] = -1e4
    assert world.error() <= LOUD_BOUND
    world.q[:, ::2, 40] *= 1000
    assert world.error() <= LOUD_BOUND


def test_rows_may_share_pages():
    lengths = [9000, 8000, 9000, 700]
    world = World(lengths, tokens=[1, 8, 3, 1])
    tables = world.rows.tables_RP
    for r, length in enumerate(lengths):
        tables[r, 1 : length // PAGE - 4] = tables[0, 1 : length // PAGE - 4].clone()
    assert world.error() <= BOUND


def test_equal_calls_give_equal_bits_whatever_came_between():
    world, other = World([700, 20_000, 3], tokens=[8, 1, 2]), World([5000] * 3, tokens=8)
    scratch = world.scratch()
    first = world.run(scratch, torch.bfloat16)
    for _ in range(20):
        other.run(scratch)
        assert torch.equal(world.run(scratch, torch.bfloat16), first)
    cases = [Case(4160, 900, 6, 4), Case(320, 130, 6, 4)]
    attention = PrefillAttention(replace(cases[0].plan, chunk=1024), prefills.DEVICE)
    worlds = [prefills.World(case) for case in cases]
    wanted = [each.ours(attention) for each in worlds]
    for _ in range(3):
        for each, y in zip(worlds, wanted, strict=True):
            assert torch.equal(each.ours(attention), y)


def test_a_graph_serves_other_pages_lengths_and_fewer_tokens():
    world = World([3000, 9000, 500], tokens=[4, 1, 8])
    rows, pages, scratch = world.rows, world.pages, world.scratch()
    y, eager = (torch.empty_like(world.q) for _ in range(2))
    world.run(scratch, turn_back=False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend_decode(pages, rows, world.q, Finish(y, turn_back=False), scratch)
    starts = rows.starts_R.clone()
    for shorter, offsets in ((0, [0, 4, 5, 13]), (17, [0, 2, 2, 5]), (30, [0, 0, 1, 1]), (3, [0, 4, 5, 13])):
        order = torch.randperm(len(pages.codes), device="cuda")
        for pool in (pages.codes, pages.parameters):
            pool[order] = pool.clone()
        known = rows.tables_RP < len(order)
        rows.tables_RP[known] = order[rows.tables_RP[known].long()].int()
        rows.starts_R.copy_(starts - shorter)
        rows.offsets.copy_(torch.tensor(offsets))
        y.fill_(NAN), eager.fill_(NAN)
        graph.replay()
        attend_decode(pages, rows, world.q, Finish(eager, turn_back=False), scratch)
        count = offsets[-1]
        assert torch.equal(y[:count], eager[:count]) and y[count:].isnan().all() and eager[count:].isnan().all()
        assert relative(y[:count], attend_decode_reference(pages, rows, world.q)[:count]) <= BOUND


def test_a_pass_over_a_layer_is_captured_once_its_batch_is_laid_out():
    world = caches.World()
    a, b = (caches.Sequence(world.spec, 800, slot, slot) for slot in (0, 2))
    world.run([(a, 0, 640, False), (b, 0, 100, False)])
    batch, heads = caches.pass_of([(a, 640, 652, True), (b, 100, 101, True)], 0, "cuda")
    made = world.cache.backend.plan(batch)
    made.run(0, heads)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = made.run(0, heads)
    for _ in range(3):
        for x in (heads.q_TQD, heads.k_TKD, heads.v_TKD, heads.gate_TI):
            x.copy_(torch.randn(x.shape, device="cuda"))
        graph.replay()
        replayed = y.clone()
        assert replayed.isfinite().all() and torch.equal(replayed, made.run(0, heads))


def test_tokens_without_a_place_are_stored_nowhere():
    world = writes.World(130, 60, group=64)
    nowhere = torch.arange(130, device="cuda") % 3 == 1
    stores = {"codes": "page_T", "halves": "half_T"}
    before = {name: getattr(world.pages, name).clone() for name in stores}
    at = {name: getattr(world.places, place).long() for name, place in stores.items()}
    offset = world.places.offset_T.long()
    hidden = {name: getattr(world.places, name).masked_fill(nowhere, -1) for name in ("page_T", "half_T", "sink_T")}
    q = torch.empty_like(world.heads.q_TQD).contiguous()
    write_rows(world.heads, world.pages, replace(world.places, **hidden), world.centres, q)
    for name, where in at.items():
        changed = (getattr(world.pages, name) != before[name])[where, :, :, offset].flatten(1).any(1)
        assert torch.equal(changed, ~nowhere)


@pytest.mark.parametrize(
    "case",
    [
        Case(1216, 2049, 6, 4),  # beside the grid of what the library takes, and of blocks of queries
        Case(1280, 2048, 6, 4),
        Case(131_008, 129, 6, 4),
        Case(1024, 2049, 6, 4, codec="bf16"),
    ],
    ids=str,
)
def test_prefill_at_the_borders_of_its_cuts(case):
    check(replace(case, dtype=torch.float16))


def test_strange_values_pass_through_the_cache_as_on_the_plain_path():
    gpu, cpu = caches.World(), caches.World(device="cpu")
    a = caches.Sequence(gpu.spec, 700, 1, 9)
    q, k, v, _ = (x.unflatten(-1, (-1, 256)) for x in a.qkvg.split([6 * 256, 2 * 256, 2 * 256, 6 * 256], -1))
    v[:, 5::50] = 2.5  # constant
    v[:, 6::50] = 0
    v[:, 70::90, 0, 17] = 1e4
    k[:, 7::50] = 0
    k[:, 8::50, :, 1:] = 0  # constant in the rotated frame
    q[:, 9::50, 0] = 0
    for parts in ([(a, 0, 640, False)], [(a, 640, 641, True)], [(a, 641, 649, True)]):
        y, wanted = gpu.run(parts), cpu.run(parts)
        assert y.isfinite().all() and caches.error(y, wanted) <= caches.BOUND
