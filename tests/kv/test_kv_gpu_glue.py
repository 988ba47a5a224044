"""What GpuAttention does around its kernels, without a GPU: references stand in for the CUDA launches, Triton's
interpreter runs the rest, and memory that no call may rely on is NaN. The plain path is what must come out."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton (Linux)")

from test_kv_gpu_cuda import BOUND, PAGE, SLOTS, Sequence, World, error, pass_of, specification

from kakera.kv.batch import SingleTokens, Span
from kakera.kv.gpu import backend, prefill
from kakera.kv.gpu.backend import GpuAttention, can_attend
from kakera.kv.gpu.decode import DecodeRows, attend_decode_reference, query_tiles
from kakera.kv.gpu.finish import Finish
from kakera.kv.gpu.layout import DecodeLayout
from kakera.kv.gpu.write import write_rows_reference
from kakera.kv.rotation import Frame, Rotation, fast_hadamard
from kakera.kv.store import Int2Store
from kakera.plan.kv_format import KvFormat
from kakera.plan.sizes import attends_plainly

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is off where there is a GPU")
NAN, CHUNK, WINDOW = float("nan"), 320, 2
SHAPE = {"heads": 4, "kv_heads": 2, "dim": 32}


class Launches(list):
    """The CUDA launches in their order, each checked for what the kernels rely on and done by its reference."""

    def write(self, heads, pages, places, centres_2KD, q_to_TQD):
        tokens = len(heads.q_TQD)
        self.append(("write", tokens))
        assert q_to_TQD.dtype == torch.float16 and q_to_TQD.is_contiguous() and len(q_to_TQD) == tokens
        strides = {x.stride(0) for x in (heads.q_TQD, heads.k_TKD, heads.v_TKD)}
        assert (len(strides) == 1 or tokens == 1) and heads.rotary.cos.is_contiguous()
        stores = {places.half_T: len(pages.halves.flatten(0, -5)) if pages.codes is not None else len(pages.halves)}
        if pages.codes is not None:
            stores |= {places.page_T: len(pages.codes), places.sink_T: 0 if pages.sink is None else len(pages.sink)}
        for place_T, count in stores.items():
            self._check_ints(place_T, tokens)
            assert place_T.max() < count
            at = [pair for pair in zip(place_T.tolist(), places.offset_T.tolist(), strict=True) if pair[0] >= 0]
            assert len(set(at)) == len(at), "two tokens have one place"
        self._check_ints(places.offset_T, tokens)
        assert places.offset_T.min() >= 0 and places.offset_T.max() < PAGE
        q_to_TQD.copy_(write_rows_reference(heads, pages, places, centres_2KD))

    def attend(self, pages, rows: DecodeRows, q_TQD, finish, scratch):
        self.append(("attend", *rows.offsets.diff().tolist()))
        count, kv_heads = len(rows.starts_R), pages.halves.shape[-3]
        for x, size in ((rows.starts_R, count), (rows.slots_R, count), (rows.offsets, count + 1)):
            self._check_ints(x, size)
        assert rows.tables_RP.dtype == torch.int32 and rows.tables_RP.stride(1) == 1
        assert rows.offsets[0] == 0 and rows.offsets[-1] == rows.tokens == len(q_TQD) == len(finish.y_TQD)
        tiles = query_tiles(rows.most_tokens, q_TQD.shape[1] // kv_heads)
        assert len(scratch.partial) == len(scratch.stats) >= scratch.blocks + count * tiles * kv_heads
        finish(attend_decode_reference(pages, rows, q_TQD).half())

    def finish(self, made: Finish, o_TQD):
        self.append(("finish", len(o_TQD)))
        o_TQD = fast_hadamard(o_TQD.float()) if made.turn_back else o_TQD.float()
        if made.centre_KD is not None:
            o_TQD = o_TQD + made.centre_KD.repeat_interleave(o_TQD.shape[1] // len(made.centre_KD), 0)
        made.y_TQD.copy_(o_TQD * torch.sigmoid(made.gate_TI.float()).view_as(o_TQD))

    @staticmethod
    def _check_ints(x, size):
        assert x.dtype == torch.int32 and x.shape == (size,) and x.is_contiguous()


@pytest.fixture
def launches(monkeypatch):
    made = Launches()
    monkeypatch.setattr(backend, "write_rows", made.write)
    monkeypatch.setattr(backend, "attend_decode", made.attend)
    monkeypatch.setattr(Finish, "__call__", lambda finish, o_TQD: made.finish(finish, o_TQD))
    monkeypatch.setattr(prefill._Tile, "of", lambda *_: prefill._Tile(128, 64, 4, 1))  # fewer steps of the interpreter
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=2))
    return made


def worlds(codec="int2"):
    """A cache with kernels and a plain one, both full of NaN."""
    made = torch.Generator().manual_seed(1)
    centres = torch.randn(2, 2, 2, SHAPE["dim"], generator=made)
    rotation = Rotation(Frame(None, centres[0]), Frame(None, centres[1])) if codec == "int2" else None
    ours, plain = (World(codec, "cpu", rotation, **SHAPE) for _ in range(2))
    for world in (ours, plain):
        store = world.cache.store
        recent = (store.recent.ring, store.recent.sink) if isinstance(store, Int2Store) else ()
        for x in (*store.page_tensors(), *recent):
            x.fill_(255 if x.dtype == torch.uint8 else NAN)
    ours.cache.backend = GpuAttention(ours.spec, ours.cache.store, SLOTS, CHUNK)
    return ours, plain


def step(ours, plain, parts, saves=((), ())):
    for x in ours.cache.backend.scratch():
        x.fill_(NAN)
    y = ours.run(parts, saves[0])
    assert error(y, plain.run(parts, saves[1])) <= BOUND, parts


def same_codes(ours, plain, sequence, tokens):
    """What lies in the pages of a sequence's first tokens."""
    for x, other in zip(ours.cache.store.page_tensors(), plain.cache.store.page_tensors(), strict=True):
        stored, wanted = (t[:, sequence.pages[: -(-tokens // PAGE)]] for t in (x, other))
        axis = -1 if x.dtype == torch.float16 else -2
        for page in range(stored.shape[1]):
            count = min(PAGE, tokens - PAGE * page)
            assert torch.equal(stored[:, page].narrow(axis, 0, count), wanted[:, page].narrow(axis, 0, count))


@pytest.mark.parametrize("codec", ["int2", "bf16"])
def test_a_conversation_equals_the_plain_path(codec, launches):
    ours, plain = worlds(codec)
    a, b = (Sequence(ours.spec, 600, slot, seed) for slot, seed in ((2, 1), (0, 2)))
    for parts in (
        [(a, 0, 320, False)],
        [(a, 320, 380, False), (b, 0, 1, False)],
        [(b, 1, 26, True), (a, 380, 381, True)],  # four rows and one, in launches of three
        [(a, 381, 386, True), (b, 26, 27, True)],  # crosses a page border
        [(a, 386, 387, True)],
    ):
        step(ours, plain, parts)
    same_codes(ours, plain, a, 387), same_codes(ours, plain, b, 27)
    if codec == "int2":
        assert torch.equal(ours.cache.store.save_sink(a.slot), plain.cache.store.save_sink(a.slot))
        mine, theirs = (world.cache.store.save_sink(b.slot)[..., :27, :] for world in (ours, plain))
        assert torch.equal(mine, theirs)


def test_launches_of_a_pass_stand_in_this_order(launches):
    ours, _ = worlds()
    a, b, c = (Sequence(ours.spec, 200, slot, slot) for slot in range(3))
    ours.run([(a, 0, 100, False), (b, 0, 70, False)])
    assert launches == [("write", 100), ("finish", 100), ("write", 70), ("finish", 70)] * 2
    launches.clear()
    ours.run([(a, 100, 120, True), (b, 70, 71, True), (c, 0, 5, False)])
    decode = [("write", 21), ("attend", 8, 8, 4), ("finish", 20), ("attend", 1), ("finish", 1)]
    assert launches == [*decode, ("write", 5), ("finish", 5)] * 2


def test_save_points_hold_the_plain_paths_windows(launches):
    ours, plain = worlds()
    a = Sequence(ours.spec, 600, 1, 3)
    for parts, positions in (
        ([(a, 0, 300, False)], (64, 192, 256)),  # the first has less than a window before it
        ([(a, 300, 325, True)], (320,)),
    ):
        kept = [[world.checkpoint(position) for position in positions] for world in (ours, plain)]
        step(ours, plain, parts, [[(a, save) for save in saves] for saves in kept])
        for mine, theirs in zip(*kept, strict=True):
            assert torch.equal(mine.window_k, theirs.window_k) and torch.equal(mine.window_v, theirs.window_v)


def test_spans_that_the_scratch_can_not_hold_are_refused_before_anything_is_written(launches):
    ours, _ = worlds()
    a = Sequence(ours.spec, 600, 1, 4)
    for part, words in (
        ((a, 0, CHUNK + 1, False), "321 tokens"),
        ((a, 5, 70, False), "starts at 5"),
        ((a, 0, PAGE + 1, True), "65 tokens"),
    ):
        with pytest.raises(ValueError, match=words):
            ours.run([part])
    assert launches == []


def test_a_batch_is_laid_out_once_for_all_layers(launches, monkeypatch):
    ours, _ = worlds()
    a = Sequence(ours.spec, 200, 0, 5)
    made = []
    of_spans = DecodeLayout.of_spans
    monkeypatch.setattr(DecodeLayout, "of_spans", lambda *args: made.append(args) or of_spans(*args))
    ours.run([(a, 0, 3, True)])
    ours.run([(a, 3, 4, True)])
    assert len(made) == 2
    batch, heads = pass_of([(a, 4, 5, True)], 0, "cpu")
    assert ours.cache.backend.plan(batch).run(0, heads).shape == (1, 4 * 32)


@pytest.mark.parametrize("window", [0, 4])
def test_rows_given_as_tensors_are_laid_out_as_their_spans_are(window):
    starts, slots = [0, 63, 64, 700], [2, 0, 3, 1]
    tables = torch.randperm(64)[:48].view(4, 12)
    spans = [Span(i, 1, start, slot, tables[i]) for i, (start, slot) in enumerate(zip(starts, slots, strict=True))]
    singles = SingleTokens(torch.tensor(starts), torch.tensor(slots), tables.int())
    expected, found = DecodeLayout.of_spans(spans, window, 8), DecodeLayout.of_singles(singles, window)
    pairs = [(expected.places, found.places), (expected.rows[0][1], found.rows[0][1])]
    for a, b in pairs:
        for name, value in vars(a).items():
            torch.testing.assert_close(getattr(b, name), value, msg=lambda text, name=name: f"{name}: {text}")
    assert [first for first, _ in expected.rows] == [first for first, _ in found.rows] == [0]


def test_the_plan_knows_what_has_no_kernel():
    """Its scratch differs; a rotation file counts as one that turns, whatever is in it."""
    for dim, codec, group in [(256, "int2", 256), (256, "int2", 64), (256, "int2", 32), (128, "bf16", 128)]:
        for kind in (codec, "fp32"):
            spec, fmt = specification(dim=dim), KvFormat(kind, group, WINDOW)
            assert attends_plainly(spec, fmt, None) != can_attend(spec, fmt, True, "bfloat16")
            assert attends_plainly(spec, fmt, "a file")
    assert attends_plainly(specification(dim=64), KvFormat("int2", 64, WINDOW), None)


def test_what_has_no_kernel_is_refused():
    spec, coded = specification(), KvFormat("int2", 256, WINDOW)
    for dtype in ("bfloat16", "float16"):
        assert can_attend(spec, coded, True, dtype) and can_attend(spec, KvFormat("bf16"), True, dtype)
    assert can_attend(spec, replace(coded, group=64), True, "bfloat16")
    assert not can_attend(spec, replace(coded, group=32), True, "bfloat16")
    assert not can_attend(spec, KvFormat("fp32"), True, "bfloat16")
    assert not can_attend(specification(dim=64), replace(coded, group=64), True, "bfloat16")
    assert not can_attend(spec, coded, False, "bfloat16")
    assert not can_attend(spec, coded, True, "float32")


def test_rotations_but_hadamards_are_told_apart():
    hadamard = Rotation.hadamard(specification())
    assert hadamard.hadamard_only and not replace(hadamard, graded=True).hadamard_only
    matrix = Frame(torch.eye(256).expand(2, 2, -1, -1), torch.zeros(2, 2, 256))
    for rotation in (Rotation(matrix, hadamard.v), Rotation(hadamard.k, matrix)):
        assert not rotation.hadamard_only


def test_activations_of_32_bits_are_refused_before_anything_is_written(launches):
    ours, _ = worlds()
    batch, heads = pass_of([(Sequence(ours.spec, 5, 0, 6), 0, 5, False)], 0, "cpu")
    wide = replace(heads, q_TQD=heads.q_TQD.float(), k_TKD=heads.k_TKD.float(), v_TKD=heads.v_TKD.float())
    with pytest.raises(ValueError, match="16-bit activations"):
        ours.cache.backend.plan(batch).run(0, wide)
    assert launches == []
