"""Prefill attention kernels against the plain path: on a GPU if there is one, else tiny shapes in Triton's interpreter.

Operands are fp16 and sums fp32, so errors are near 2^-11 of the result's size: measured as a norm, 1e-3 is allowed, and
four times that for the worst row of a head.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs Triton (Linux)")

from kv_world import make_spec

from kakera.contract.grid import PAGE
from kakera.kv.codec import Int2Rows, decode
from kakera.kv.gpu import dense_attention, prefill
from kakera.kv.gpu.prefill import Bf16History, Int2History, Pages, PrefillAttention
from kakera.kv.plain.attend import attend_prefill
from kakera.kv.plain.pages import DensePool, Int2Pool
from kakera.kv.pool import PagePool
from kakera.kv.rotation import Rotation
from kakera.kv.store import DenseStore, Int2Store
from kakera.plan import prefill_plan
from kakera.plan.kv_format import KvFormat
from kakera.plan.prefill_plan import PrefillPlan, key_pieces, padded_tokens, query_blocks
from kakera.target.kernels import has_large_tiles

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if GPU else torch.device("cpu")
BOUND, ROW_BOUND = 1e-3, 4e-3
gpu = [pytest.mark.gpu, pytest.mark.skipif(not GPU, reason="needs an NVIDIA GPU")]


@dataclass(frozen=True)
class Case:
    """A sequence up to start + tokens, and what the kernels and the plain path make of it."""

    start: int
    tokens: int
    group: int = 2
    kv_heads: int = 2
    head_dim: int = 256
    params_group: int = 256
    window: int = 4
    codec: str = "int2"
    chunk: int = 0
    key_slots: int = 65536
    dtype: torch.dtype = field(default=torch.float32)

    @property
    def plan(self) -> PrefillPlan:
        window = self.window if self.codec == "int2" else 0
        sms = torch.cuda.get_device_properties(0).multi_processor_count if GPU else 1
        chunk = max(self.chunk, self.tokens)
        return PrefillPlan(self.group * self.kv_heads, self.kv_heads, self.head_dim, window, chunk, sms, self.key_slots)


class World:
    """Random keys and values in shuffled pages; everything that must not be read is NaN."""

    def __init__(self, case: Case):
        self.case, self.made = case, torch.Generator(DEVICE).manual_seed(case.start + case.tokens)
        self.first, self.last = case.start // PAGE, (case.start + case.tokens - 1) // PAGE
        used, spare, window = self.last + 1, 5, case.plan.window_pages
        spec = make_spec(case.group * case.kv_heads, case.kv_heads, case.head_dim, full=2)
        shuffled = torch.randperm(used + spare, generator=self.made, device=DEVICE)
        self.table = shuffled[:used]
        shape = (used, 2, case.kv_heads, PAGE, case.head_dim)
        self.kv = torch.empty(shape, dtype=torch.bfloat16, device=DEVICE)
        for part in self.kv.split(64):
            part.copy_(torch.randn(part.shape, generator=self.made, device=DEVICE))
        # one loud key, else every softmax over a long history is flat and an error in its weights would not show
        self.kv[:, 0, :, 17] *= 2
        pool = PagePool(used + spare, DEVICE)
        if case.codec == "int2":
            fmt = KvFormat("int2", case.params_group, window)
            store: Int2Store | DenseStore = Int2Store(spec, fmt, pool, 1, Rotation.hadamard(spec))
            self.pool: Int2Pool | DensePool = Int2Pool(store, 8)
            codes, parameters = store.page_tensors()
            codes.fill_(0xFF), parameters.fill_(float("nan"))
            for ids, part in zip(self.table.split(64), self.kv.split(64), strict=True):
                self.pool.write_pages(1, ids, part)
            hidden = self.table[[0, *range(max(0, self.last - window), used)]]
            parameters[1, hidden] = float("nan")
        else:
            store = DenseStore(spec, torch.bfloat16, pool)
            self.pool = DensePool(store)
            store.kv_LP2KND.fill_(float("nan"))
            self.pool.write_pages(1, self.table, self.kv)
        self.band = self.kv[max(0, self.first - window) :].clone()
        self.sink = self.kv[0].clone()
        behind = (case.start + case.tokens - 1) % PAGE + 1
        self.band[-1, :, :, behind:] = float("nan")
        if case.codec != "int2":
            store.kv_LP2KND[1, self.table[-1], :, :, behind:] = float("nan")
        self.tensors = store.page_tensors()
        q = torch.randn(case.tokens, case.group * case.kv_heads, case.head_dim, generator=self.made, device=DEVICE)
        self.q = (q * 1.5 * case.head_dim**-0.5).half()

    def history(self) -> Int2History | Bf16History:
        tensors = [x[1] for x in self.tensors]
        return Int2History(*tensors, self.sink) if len(tensors) == 2 else Bf16History(*tensors)

    def ours(self, attention: PrefillAttention | None = None) -> Tensor:
        attention = attention or PrefillAttention(self.case.plan, DEVICE)
        for x in attention.scratch():
            x.fill_(float("nan"))
        out = torch.full(self.q.shape, float("nan"), dtype=self.case.dtype, device=DEVICE)
        band = self.band if self.case.codec == "int2" else None
        attention(self.history(), self.table, self.case.start, self.q, band, out)
        return out

    def plain(self) -> Tensor:
        case, count = self.case, self.last - self.first + 1
        q = torch.zeros(count * PAGE, case.kv_heads, case.group, case.head_dim, device=DEVICE)
        q[: case.tokens] = self.q.float().unflatten(1, (case.kv_heads, case.group))
        q = q.unflatten(0, (count, PAGE)).permute(0, 2, 3, 1, 4).flatten(2, 3).contiguous()
        int2 = case.codec == "int2"
        band = self.band.nan_to_num(nan=0.0).float()
        args = (case.window, self.sink.float()) if int2 else (0, None)
        o = attend_prefill(self.pool, 1, self.table, self.first, q, band, *args)
        o = o.unflatten(2, (case.group, PAGE)).permute(0, 3, 1, 2, 4)
        return o.reshape(-1, case.kv_heads * case.group, case.head_dim)[: case.tokens]


def errors(ours: Tensor, plain: Tensor) -> tuple[float, float]:
    """Of the whole and of the worst row of a head, by norms."""
    difference, plain = (ours.double() - plain.double()), plain.double()
    rows = difference.norm(dim=-1) / plain.norm(dim=-1).clamp(min=plain.norm(dim=-1).mean())
    return (difference.norm() / plain.norm()).item(), rows.max().item()


def check(case: Case) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    world = World(case)
    whole, row = errors(world.ours(), world.plain())
    print(f"{case}: {whole:.2e}, worst row {row:.2e}")
    assert whole <= BOUND and row <= ROW_BOUND, f"{case}: {whole:.2e}, worst row {row:.2e}"


@pytest.fixture
def small_grid(monkeypatch):
    """Blocks and pieces so short that tiny segments go every way."""
    for module in (prefill, prefill_plan):
        monkeypatch.setattr(module, "GRID", 128)
    monkeypatch.setattr(prefill, "SUB", 256)


TINY = Case(0, 64, head_dim=32, params_group=32, window=1)


@pytest.mark.parametrize(
    "case",
    [
        TINY,
        replace(TINY, tokens=1),
        replace(TINY, start=64, tokens=63, codec="bf16"),
        replace(TINY, start=320, tokens=65, group=3, window=2),
        replace(TINY, start=640, tokens=200, group=1, window=4),
        replace(TINY, start=704, tokens=130, group=5, kv_heads=1),
        replace(TINY, tokens=700, kv_heads=4, group=1, chunk=1000),  # several calls, the library within the segment
        replace(TINY, start=1088, tokens=320, key_slots=256),  # many pieces
        replace(TINY, start=448, tokens=300, codec="bf16", group=3, dtype=torch.float16),
    ],
)
def test_tiny_segments_are_the_plain_path(case, small_grid):
    check(case)


@pytest.mark.parametrize(("dim", "group"), [(128, 32), (128, 128), (256, 32), (256, 64), (256, 256)])
def test_unpacked_rows_are_the_codecs_values(dim, group):
    world = World(Case(192, 64, head_dim=dim, params_group=group, kv_heads=3, window=1))
    rows = torch.full((2, 2, 128, dim), float("nan"), dtype=torch.float16, device=DEVICE)
    world.history().fill(rows, world.table, Pages(0, 2, 1, 2))
    codes, parameters = (x[1, world.table[1]] for x in world.tensors)
    exact = decode(Int2Rows(codes, *parameters.transpose(-1, -2).unbind(-3)[:2]))
    page = exact.float()[:, 1:].half()
    assert torch.equal(rows[:, :, 64:], page)
    assert torch.equal(rows[:, :, :64], world.sink[:, 1:].half())


def test_values_beyond_fp16_are_clamped():
    pages = torch.full((1, 2, 1, 64, 32), 1e30, dtype=torch.bfloat16, device=DEVICE)
    pages[:, 1] = -1e30
    rows = torch.empty((2, 1, 64, 32), dtype=torch.float16, device=DEVICE)
    prefill.copy_pages(pages, None, rows, Pages(0, 1, 0, 1), 60)
    assert rows[:, 0, :60].unique().tolist() == [-65504, 65504] and not rows[:, :, 60:].any()


def test_a_page_counts_by_its_position(small_grid):
    world = World(replace(TINY, start=640, tokens=64, window=2))
    before = world.ours()
    codes = world.tensors[0]
    for page in (0, 8, 9, 10):  # the sink, the window and the segment: their codes are not read
        codes[1, world.table[page]] ^= 0xFF
    assert torch.equal(world.ours(), before)
    for page in (1, 7):
        codes[1, world.table[page]] ^= 0xFF
        assert not torch.equal(world.ours(), before)
        codes[1, world.table[page]] ^= 0xFF
    assert torch.equal(world.ours(), before)


def test_what_the_scratch_can_not_hold_is_refused():
    world = World(TINY)
    small = PrefillAttention(replace(world.case.plan, chunk=63), DEVICE)
    with pytest.raises(ValueError, match="takes 1 to 63 tokens that start on a multiple of 64"):
        world.ours(small)


@pytest.mark.parametrize("chunk", [64, 1000, 2048, 8192])
@pytest.mark.parametrize(("heads", "kv_heads"), [(24, 4), (12, 2), (8, 8), (16, 1), (6, 1)])
def test_the_plan_holds_every_segment(heads, kv_heads, chunk):
    plan = PrefillPlan(heads, kv_heads, 256, 4, chunk, 132)
    for tokens in {t for t in (1, 63, 64, 65, 500, chunk // 2 + 1, chunk) if t <= chunk}:
        held = plan.heads_per_call(tokens)
        assert held * padded_tokens(tokens) <= plan.query_slots
        assert held * (tokens + prefill_plan.GRID) <= plan.history_slots
        assert held * plan.piece(held) <= plan.history_slots
        assert held * (padded_tokens(tokens) + 4 * PAGE) <= plan.band_slots
        for _, size in query_blocks(tokens):
            splits = plan.splits(held, size, plan.piece(held))
            assert splits == 1 or splits * held * size <= plan.query_slots


def test_scratch_is_what_the_plan_says_and_does_not_know_the_context():
    attention = PrefillAttention(Case(0, 100, kv_heads=4, group=6).plan, DEVICE)
    held = sum(x.untyped_storage().nbytes() for x in attention.scratch())
    assert held == attention.plan.scratch_bytes
    world = PrefillPlan(24, 4, 256, 4, 8192, 132)
    assert world.scratch_bytes + world.transient_bytes < 400e6


def test_blocks_and_pieces_cover_everything_once_in_few_sizes():
    sizes = set()
    for tokens in range(1, 8193, 61):
        blocks = list(query_blocks(tokens))
        assert [first for first, _ in blocks] == [sum(s for _, s in blocks[:i]) for i in range(len(blocks))]
        assert 0 <= padded_tokens(tokens) - tokens < max(64, 256)
        sizes |= {size for _, size in blocks}
    assert sizes <= {1 << i for i in range(6, 14)}
    assert [count for _, count in key_pieces(75 * 1024, 32768)] == [32768, 32768, 8192, 2048, 1024]


# ---- On a GPU only: real sizes ----

GROUPS = (1, 2, 3, 4, 5, 6, 8, 12, 16)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("start", [0, 64, 320, 4096, 70016])
class TestOnAGpu:
    pytestmark = gpu

    @pytest.mark.parametrize("tokens", [1, 63, 64, 65, 1000])
    def test_lengths(self, group, start, tokens):
        check(Case(start, tokens, group, window=4 if tokens % 2 else 1, dtype=torch.float16))


@pytest.mark.parametrize(
    "case",
    [
        Case(0, 8192, 6, 4),
        Case(65536, 8192, 6, 4),
        Case(30016, 5000, 6, 4, params_group=64),
        Case(30016, 5000, 3, 1, head_dim=128, params_group=32, window=1),
        Case(8192, 3000, 1, 8, head_dim=128, params_group=128),
        Case(20032, 700, 16, 2, params_group=128, key_slots=4096),
        Case(0, 4500, 6, 4, codec="bf16"),
        Case(70016, 1000, 6, 4, codec="bf16"),
        Case(4160, 2500, 5, 2, head_dim=128, codec="bf16"),
    ],
    ids=str,
)
class TestLongSegmentsOnAGpu:
    pytestmark = gpu

    def test_plain_path(self, case):
        check(case)


class TestLibraries:
    pytestmark = gpu

    @pytest.mark.parametrize("name", ["cudnn", "flash"])
    @pytest.mark.parametrize(("batch", "rows", "keys", "dim"), [(4, 384, 8192, 256), (2, 700, 1024, 128)])
    def test_output_and_lse(self, name, batch, rows, keys, dim):
        if name == "cudnn" and not has_large_tiles(torch.cuda.get_device_capability()):
            pytest.skip("not used on this card")
        q, k, v = (torch.randn(batch, n, dim, device=DEVICE).half() for n in (rows, keys, keys))
        q *= dim**-0.5
        o, lse = getattr(dense_attention, name)(q, k, v)
        plain_o, plain_lse = dense_attention.plain(q, k, v)
        assert errors(o, plain_o)[0] <= BOUND
        assert (lse - plain_lse).abs().max() <= 1e-3

    def test_nothing_grows_with_the_context(self):
        grown = []
        for start in (8192, 65536, 262144 - 2048):
            world = World(Case(start, 2048, 6, 4))
            attention = PrefillAttention(world.case.plan, DEVICE)
            world.ours(attention)
            torch.cuda.synchronize()
            out = torch.empty(world.q.shape, dtype=torch.float16, device=DEVICE)
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            attention(world.history(), world.table, start, world.q, world.band, out)
            grown.append(torch.cuda.max_memory_allocated() - before)
            assert grown[-1] <= attention.plan.transient_bytes + (64 << 20), grown  # and cuDNN's own workspace
            del world, attention, out
        print("bytes of the library:", grown)
        assert max(grown) - min(grown) <= 1 << 20, grown
