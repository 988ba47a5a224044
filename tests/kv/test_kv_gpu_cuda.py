"""A KVCache with its kernels against the plain one on the CPU: prefill, decode, checkpoints. Skipped without a GPU."""

from __future__ import annotations

import pytest
import torch
from kv_world import make_spec, new_window

from kakera.kv.batch import Batch, CheckpointTensors, Save, Span
from kakera.kv.cache import KVCache
from kakera.kv.rotation import Frame, Rotation
from kakera.ops.heads import ProjectedHeads
from kakera.ops.rotary import Rotary, frequencies
from kakera.plan.kv_format import KvFormat

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
PAGE, SLOTS, POOL = 64, 3, 80
BOUND = 3e-3  # relative, of a call's output: operands are fp16, and a bf16 or a code may be rounded the other way


def specification(heads=6, kv_heads=2, dim=256):
    return make_spec(heads, kv_heads, dim, full=2, rotary_dim=dim // 4, gated=True)


class Sequence:
    """Projected heads of one request, both layers, and where it lives."""

    def __init__(self, spec, tokens, slot, seed):
        made = torch.Generator().manual_seed(seed)
        self.spec, self.slot = spec, slot
        width = (2 * spec.heads + 2 * spec.kv_heads) * spec.head_dim
        self.qkvg = torch.randn(2, tokens, width, generator=made).half()
        self.pages = torch.randperm(POOL // SLOTS, generator=made) * SLOTS + slot


def pass_of(parts, layer, device, saves=()):
    """A batch of (sequence, start, end, decode?) and its heads."""
    spans, rows, positions, offset = [], [], [], 0
    for sequence, start, end, _ in parts:
        own = tuple(Save(save) for of, save in saves if of is sequence)
        spans.append(Span(offset, end - start, start, sequence.slot, sequence.pages.to(device), own))
        rows.append(sequence.qkvg[layer, start:end])
        positions += range(start, end)
        offset += end - start
    spec = parts[0][0].spec
    q, k, v, gate = (
        torch.cat(rows)
        .to(device)
        .split([n * spec.head_dim for n in (spec.heads, spec.kv_heads, spec.kv_heads, spec.heads)], 1)
    )
    q, k, v = (x.unflatten(1, (-1, spec.head_dim)) for x in (q, k, v))
    scales = (1 + 0.2 * torch.randn(2, spec.head_dim, generator=torch.Generator().manual_seed(0))).to(device)
    position_T = torch.tensor(positions, device=device)
    decode = sum(part[3] for part in parts)
    batch = Batch(position_T, position_T, tuple(spans[:decode]), tuple(spans[decode:]), position_T[:1])
    return batch, ProjectedHeads(
        q, k, v, gate, *scales, 1e-6, Rotary.at(position_T, frequencies(spec.rotary_dim, 1e4).to(position_T.device))
    )


class World:
    def __init__(self, codec="int2", device="cuda", rotation=None, **shape):
        self.spec = specification(**shape)
        fmt = KvFormat(codec, self.spec.head_dim, 2)
        self.cache = KVCache(self.spec, fmt, POOL, SLOTS, rotation, device, 1024)
        self.device = device

    def run(self, parts, saves=()):
        batches = [pass_of(parts, layer, self.device, saves) for layer in range(2)]
        made = self.cache.backend.plan(batches[0][0])
        return torch.stack([made.run(layer, heads) for layer, (_, heads) in enumerate(batches)]).cpu()

    def checkpoint(self, position):
        k, v = new_window(self.cache)
        return CheckpointTensors(position, {"window_k": k, "window_v": v})


def error(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


@pytest.mark.parametrize("codec", ["int2", "bf16"])
@pytest.mark.parametrize("shape", [{}, {"heads": 4, "kv_heads": 1, "dim": 128}])
def test_a_conversation_equals_the_plain_path(codec, shape):
    gpu, cpu = World(codec, **shape), World(codec, "cpu", **shape)
    assert gpu.cache.backend.capturable
    a, b = (Sequence(gpu.spec, 1300, slot, seed) for slot, seed in ((2, 1), (0, 2)))
    steps = [
        [(a, 0, 640, False)],
        [(a, 640, 1000, False), (b, 0, 100, False)],
        [(a, 1000, 1001, True), (b, 100, 101, True)],
        [(b, 101, 106, True), (a, 1001, 1002, True)],
        *[[(a, n, n + 1, True), (b, n - 896, n - 895, True)] for n in range(1002, 1030)],
        [(a, 1030, 1050, True), (b, 134, 140, True)],
        [(a, 1050, 1051, True)],
    ]
    for parts in steps:
        assert error(gpu.run(parts), cpu.run(parts)) <= BOUND, parts


def test_the_plain_path_takes_what_has_no_kernel():
    spec = specification()
    matrix = torch.linalg.qr(torch.randn(2, 2, 256, 256))[0]
    frame = Frame(matrix, torch.zeros(2, 2, 256))
    gpu = World(rotation=Rotation(frame, frame))
    assert not gpu.cache.backend.capturable
    sequence = Sequence(spec, 300, 1, 3)
    assert gpu.run([(sequence, 0, 300, False)]).isfinite().all()


@pytest.mark.parametrize("cut", [64, 320, 576, 640])
def test_chunks_and_company_do_not_matter(cut):
    whole, cuts = World(), World()
    a, b = Sequence(whole.spec, 800, 0, 4), Sequence(whole.spec, 800, 1, 5)
    y = whole.run([(a, 0, 700, False)])
    parts = [cuts.run([(a, 0, cut, False), (b, 0, 130, False)])[:, :cut], cuts.run([(a, cut, 700, False)])]
    assert error(torch.cat(parts, 1), y) <= 1e-3
    alone = whole.run([(a, 700, 701, True)])
    together = cuts.run([(b, 130, 131, True), (a, 700, 701, True)])[:, 1:]
    assert error(together, alone) <= 1e-3


def test_a_checkpoint_continues_as_if_nothing_had_happened():
    world, other = World(), World()
    a = Sequence(world.spec, 800, 0, 6)
    save = world.checkpoint(640)
    world.run([(a, 0, 700, False)], [(a, save)])
    pages = world.cache.store.read_pages(a.pages.tolist())
    other.cache.store.write_pages(a.pages.tolist(), pages)
    other.cache.store.load_window(1, save)
    other.cache.store.load_sink(1, world.cache.store.save_sink(0))
    later = Sequence(world.spec, 800, 1, 6)
    later.pages = a.pages
    assert error(other.run([(later, 640, 700, False)]), world.run([(a, 640, 700, False)])) <= 1e-6
    rolled = world.checkpoint(704)
    world.run([(a, 700, 704, True)], [(a, rolled)])
    fresh, direct = World(), World().checkpoint(704)
    fresh.run([(a, 0, 704, False)], [(a, direct)])
    assert error(rolled.window_k, direct.window_k) <= 1e-3
    assert error(rolled.window_v, direct.window_v) <= 1e-3


def test_scratch_does_not_grow_with_the_context():
    world = World()
    a = Sequence(world.spec, 1300, 0, 7)
    before = world.cache.bytes()
    world.run([(a, 0, 1000, False)])
    world.run([(a, 1000, 1001, True)])
    assert world.cache.bytes() == before
