"""A whole model on the way of a GPU without one: kernels' references, Triton's interpreter, rows given as tensors."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs Triton (Linux)")

from test_kv_gpu_glue import error, launches  # noqa: F401

from kakera.kv.batch import Batch, SingleTokens, Span
from kakera.kv.cache import KVCache
from kakera.kv.gpu.backend import GpuAttention
from kakera.model.mixers import gdn, gdn_kernels
from kakera.model.mixers.gdn_kernels import KernelCore
from kakera.model.qwen3_5 import HybridModel
from kakera.model.state import StatePool
from kakera.ops.gdn_step import gdn_step_reference
from kakera.plan.kv_format import KvFormat

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is off where there is a GPU")
SLOTS, PAGES, PROMPT = 3, 4, 190  # page 1 is read as codes, and a border is crossed
DTYPE = torch.float16


@dataclass
class World:
    """`model` over a cache of SLOTS sequences of PAGES pages; slot s has prompt s."""

    model: HybridModel
    cache: KVCache
    states: StatePool

    def prefill(self, slot: int) -> Tensor:
        tokens_T, positions_T = prompt(slot), torch.arange(PROMPT)
        span = Span(0, PROMPT, 0, slot, tables()[slot])
        batch = Batch(tokens_T, positions_T, (), (span,), positions_T[-1:])
        return self.model.forward(batch, self.cache.backend, self.states)

    def decode(self, tokens_R: Tensor, start: int, slots: list[int], singles: bool) -> Tensor:
        starts_R, slots_R = torch.full_like(tokens_R, start), torch.tensor(slots)
        spans = tuple(Span(i, 1, start, slot, tables()[slot]) for i, slot in enumerate(slots))
        made = SingleTokens(starts_R, slots_R, tables()[slots_R].int()) if singles else None
        if singles:  # nothing reads their places then
            spans = tuple(Span(i, 1, 0, i, slots_R) for i in range(len(slots)))
        batch = Batch(tokens_R, starts_R, spans, (), torch.arange(len(slots)), made)
        return self.model.forward(batch, self.cache.backend, self.states)


def prompt(slot: int) -> Tensor:
    return torch.randint(0, 200, (PROMPT,), generator=torch.Generator().manual_seed(slot))


def tables() -> Tensor:
    return torch.randperm(SLOTS * PAGES, generator=torch.Generator().manual_seed(9)).view(SLOTS, PAGES)


def build(directory, codec: str) -> World:
    model = HybridModel.load(directory, DTYPE)
    fmt = KvFormat(codec, model.spec.head_dim, 1)
    return World(model, KVCache(model.spec, fmt, SLOTS * PAGES, SLOTS), StatePool(model.spec, SLOTS, dtype=DTYPE))


@pytest.mark.parametrize("codec", ["int2", "bf16"])
def test_decode_rows_as_tensors_are_the_plain_paths(tiny_model, launches, monkeypatch, codec):  # noqa: F811
    """Prompts by the plain path, then rows in an order that is not that of their slots."""
    plain = build(tiny_model, codec)
    monkeypatch.setattr(gdn_kernels, "gdn_step", gdn_step_reference)
    ours = build(tiny_model, codec)
    for slot in range(SLOTS):
        assert torch.equal(plain.prefill(slot), ours.prefill(slot))
    monkeypatch.setattr(gdn, "core_for", lambda spec, eps, *_: KernelCore(spec, eps))
    ours.model = HybridModel(ours.model.spec, ours.model.weights)
    ours.cache.backend = GpuAttention(ours.model.spec, ours.cache.store, SLOTS, 64)
    assert ours.model.capturable and ours.cache.backend.capturable and not plain.model.capturable
    launches.clear()
    for step in range(3):
        tokens_R = torch.randint(0, 200, (2,), generator=torch.Generator().manual_seed(100 + step))
        wanted = plain.decode(tokens_R, PROMPT + step, [2, 0], singles=False)
        assert error(ours.decode(tokens_R, PROMPT + step, [2, 0], singles=True), wanted) <= 5e-3
    full = len(ours.model.spec.full_layers)
    assert launches == [("write", 2), ("attend", 1, 1), ("finish", 2)] * full * 3
