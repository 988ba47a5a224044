"""At the bundled model's own shapes, with the INT2 cache: pages and states have the same bits for any chunking."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import kakera
from kakera.kv.batch import Batch, Span
from kakera.kv.cache import KVCache
from kakera.model.qwen3_5 import HybridModel
from kakera.model.state import StatePool
from kakera.plan.kv_format import KvFormat

MINI = Path(kakera.__file__).parent / "data" / "mini"
LENGTH, PAGES, WINDOW_PAGES = 256, 4, 1  # sink and window aside, the last page reads INT2


@pytest.fixture(scope="module")
def mini() -> HybridModel:
    return HybridModel.load(MINI)


@pytest.fixture(params=[1, 2], ids="{}threads".format)
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def prefill(model: HybridModel, ends: list[int]) -> tuple[Tensor, ...]:
    """Everything that a prefill in chunks up to `ends` leaves behind."""
    spec = model.spec
    kv = KVCache(spec, KvFormat("int2", group=min(256, spec.head_dim), window_pages=WINDOW_PAGES), PAGES, 1)
    states = StatePool(spec, 1)
    tokens_T = torch.randint(0, spec.vocab, (LENGTH,), generator=torch.Generator().manual_seed(1))
    for begin, end in zip([0, *ends], ends, strict=False):
        span = Span(0, end - begin, begin, 0, torch.arange(-(-end // 64)))
        batch = Batch(tokens_T[begin:end], torch.arange(begin, end), (), (span,), torch.empty(0, dtype=torch.int64))
        hidden_TH = model.hidden(batch, kv.backend, states)
    pages = [page.clone() for page in kv.store.read_pages(list(range(PAGES)))]
    return (*pages, states.state_LSVKD, states.conv_LSWC, hidden_TH[-1])


def test_chunking_changes_no_bit(mini: HybridModel, threads: None):
    whole = prefill(mini, [LENGTH])
    assert all(part.float().abs().sum() > 0 for part in whole)
    for one, other in zip(prefill(mini, [64, LENGTH]), whole, strict=True):
        assert torch.equal(one, other)
