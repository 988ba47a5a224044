"""The kernel between projection and attention against plain torch, codes to the bit. Skipped where there is no GPU."""

from __future__ import annotations

import pytest
import torch

from kakera.kv import codec
from kakera.kv.gpu.decode import LayerPages
from kakera.kv.gpu.write import Places, write_rows, write_rows_reference
from kakera.ops.heads import ProjectedHeads
from kakera.ops.rotary import Rotary

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
PAGE, SLOTS = 64, 3


class World:
    """Tokens of one sequence from `start` on, written twice: by the kernel, and by torch into copies of the pages."""

    def __init__(
        self, tokens, start=0, heads=24, kv_heads=4, dim=256, rotary=64, group=256, dtype=torch.float16, scale=1.0
    ):
        self.made = torch.Generator("cuda").manual_seed(tokens + start)
        width = (heads + 2 * kv_heads) * dim
        projected = self._normal(tokens, width + 64).mul_(scale).to(dtype)
        self.kv = projected[:, heads * dim : width]
        q, k, v = (
            part.unflatten(1, (-1, dim)) for part in projected[:, :width].split([heads * dim, *[kv_heads * dim] * 2], 1)
        )
        positions = torch.arange(start, start + tokens, device="cuda")
        scales = [1 + 0.2 * self._normal(dim) for _ in range(2)]
        self.heads = ProjectedHeads(q, k, v, None, *scales, 1e-6, Rotary.at(positions, rotary, 1e6))
        count = (start + tokens - 1) // PAGE + 1
        table = torch.randperm(count + 2, generator=self.made, device="cuda")[:count]
        page = positions // PAGE
        half = (page - start // PAGE).flip(0)[0] - (page - start // PAGE) if group else table[page]
        sink = torch.where(page == 0, 1, -1)
        self.places = Places(*(x.int() for x in (table[page], half, sink, positions % PAGE)))
        self.centres = self._normal(2, kv_heads, dim)
        shape = (2, kv_heads, PAGE, dim)
        halves = torch.full((count + 2, *shape), 7.0, dtype=torch.bfloat16, device="cuda")
        if group:
            codes = torch.full((count + 2, *shape[:3], dim // 4), 0xA5, dtype=torch.uint8, device="cuda")
            parameters = torch.full((count + 2, 2, kv_heads, 2, dim // group, PAGE), 7.0, device="cuda").half()
            sinks = torch.full((SLOTS, *shape), 7.0, dtype=torch.bfloat16, device="cuda")
            self.pages = LayerPages(codes, parameters, halves, sinks)
        else:
            self.pages = LayerPages(None, None, halves, None)
        self.dim, self.group, self.tokens = dim, group, tokens

    def _normal(self, *shape):
        return torch.randn(shape, device="cuda", generator=self.made)

    def check(self):
        parts = ("codes", "parameters", "halves", "sink")
        copies = LayerPages(*(None if (x := getattr(self.pages, p)) is None else x.clone() for p in parts))
        q = torch.full((*self.heads.q_TQD.shape,), float("nan"), dtype=torch.float16, device="cuda")
        write_rows(self.heads, self.pages, self.places, self.centres, q)
        expected = write_rows_reference(self.heads, copies, self.places, self.centres)
        assert ((q.float() - expected).norm() / expected.norm()).item() < 4e-4
        assert (q.float() - expected).abs().max() <= 2e-3 * expected.abs().max()
        bound = 2e-3 if self.heads.q_TQD.dtype == torch.bfloat16 else 3e-4
        self._check_rows(self.pages.halves, copies.halves, bound)
        if not self.group:
            return
        self._check_rows(self.pages.sink, copies.sink, bound)
        # the codes are those of the 16-bit rows that the kernel wrote, to the bit
        half, offset, page = (x.long() for x in (self.places.half_T, self.places.offset_T, self.places.page_T))
        rows = codec.encode(self.pages.halves[half, :, :, offset], self.group)
        assert torch.equal(self.pages.codes[page, :, :, offset], rows.codes)
        parameters = torch.stack((rows.scale, rows.minimum), -2)
        assert torch.equal(self.pages.parameters[page, ..., offset], parameters)
        # and nothing beside them has changed
        copies.codes[page, :, :, offset] = rows.codes
        copies.parameters[page, ..., offset] = parameters
        assert torch.equal(self.pages.codes, copies.codes)
        assert torch.equal(self.pages.parameters, copies.parameters)

    @staticmethod
    def _check_rows(found, expected, bound):
        same = (found == expected).float().mean().item()
        bits = (found.view(torch.int16).int() - expected.view(torch.int16).int()).abs()
        # one value behind the norm, rounded the other way, moves all dims of a row by a sixteenth of its last bit
        close = (found.float() - expected.float()).abs() <= bound * expected.float().abs().max()
        print(f"equal {same:.5f}", end=" ")
        assert same > 0.99 and ((bits <= 1) | close).all()


@pytest.mark.parametrize("tokens", [1, 5, 64, 1000, 8192])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_tokens_of_a_sequence(tokens, dtype):
    World(tokens, dtype=dtype).check()
    World(tokens, start=4000 if tokens < 64 else 4032, dtype=dtype).check()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotary"),
    [(12, 2, 256, 64), (16, 4, 256, 256), (8, 8, 128, 128), (1, 1, 128, 64), (32, 8, 128, 32), (6, 2, 256, 128)],
)
def test_every_shape_of_heads(heads, kv_heads, dim, rotary):
    World(130, 60, heads, kv_heads, dim, rotary, group=dim).check()
    World(130, 60, heads, kv_heads, dim, rotary, group=0).check()


@pytest.mark.parametrize(
    ("dim", "group"), [(256, 32), (256, 64), (256, 128), (256, 256), (128, 32), (128, 64), (128, 128)]
)
def test_every_group(dim, group):
    World(200, 640, dim=dim, rotary=64, group=group).check()


@pytest.mark.parametrize("case", ["zeros", "constant", "outlier", "huge", "tiny"])
@pytest.mark.parametrize("group", [32, 256])
def test_strange_rows(case, group):
    world = World(70, 64, group=group)
    world.centres.zero_()
    value = world.heads.v_TKD
    if case == "zeros":
        world.kv.zero_()
    elif case == "constant":  # in the frame: all of a row's weight in its first dim
        value.zero_()
        value[..., 0] = 3.0
        value[3:5, :, 1:] = 0
    elif case == "outlier":
        value[:, :, 5] = 60_000.0
    elif case == "huge":
        value.fill_(65_504.0)
    else:
        value.mul_(1e-4)
    write_rows(world.heads, world.pages, world.places, world.centres, torch.empty_like(world.heads.q_TQD).contiguous())
    half, offset, page = (x.long() for x in (world.places.half_T, world.places.offset_T, world.places.page_T))
    rows = codec.encode(world.pages.halves[half, :, :, offset], group)
    assert torch.equal(world.pages.codes[page, :, :, offset], rows.codes)
    assert torch.equal(world.pages.parameters[page, ..., offset], torch.stack((rows.scale, rows.minimum), -2))
