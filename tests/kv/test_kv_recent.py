"""The 16-bit ring: whatever wraps, pages come back in order, beside a list of what was written."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kakera.kv.batch import CheckpointTensors
from kakera.kv.recent import RecentStore
from kakera.plan.kv_format import KvFormat

SPEC = SimpleNamespace(kv_layers=2, kv_heads=1, head_dim=32)
EMPTY = -1.0
SLOT = 1


def store(window: int) -> RecentStore:
    made = RecentStore(SPEC, KvFormat("int2", 32, window), 3, torch.device("cpu"))  # type: ignore[arg-type]
    made.ring.fill_(EMPTY)
    return made


def pages_of(*numbers: int) -> torch.Tensor:
    """[P, 2, 1, 64, 32]: each holds its number, values a half more."""
    pages_P2 = torch.tensor([[number, number + 0.5] for number in numbers]).view(-1, 2, 1, 1, 1)
    return pages_P2.expand(-1, 2, 1, 64, 32).bfloat16()


def checkpoint(window: int, page: int) -> CheckpointTensors:
    window_k, window_v = torch.full((2, 2, window, 1, 64, 32), EMPTY, dtype=torch.bfloat16)
    return CheckpointTensors(page * 64, {"window_k": window_k, "window_v": window_v})


@pytest.mark.parametrize("window", [1, 2, 3, 5])
def test_windows_are_saved_and_loaded_at_every_place_of_the_ring(window):
    """With the page behind the position written already, as a row that goes on has it, and without."""
    for page in range(3 * (window + 2)):
        before = range(max(0, page - window), page)
        wanted = [EMPTY] * (window - len(before)) + [float(number) for number in before]
        for written in (page, page + 1):
            recent, saved = store(window), checkpoint(window, page)
            for layer in range(2):
                for number in range(written):
                    recent.write_pages(layer, SLOT, number, pages_of(number))
            recent.save_window(SLOT, saved)
            assert saved.window_k[1, :, 0, 63, 31].tolist() == wanted
            assert saved.window_v[0, :, 0, 0, 0].tolist() == [x if x == EMPTY else x + 0.5 for x in wanted]
            of_one_layer = checkpoint(window, page)
            recent.save_window_of(1, SLOT, of_one_layer)
            assert torch.equal(of_one_layer.window_k[1], saved.window_k[1])
            assert (of_one_layer.window_k[0] == EMPTY).all()
        loaded = store(window)
        loaded.load_window(2, saved)
        assert (loaded.ring[:, :2] == EMPTY).all()
        for layer in range(2):
            assert torch.equal(loaded.read_pages(layer, 2, before.start, page - 1), pages_of(*before))
        assert torch.count_nonzero(loaded.ring[0, 2, :, 0, 0, 0, 0] != EMPTY) == len(before)


@pytest.mark.parametrize("window", [1, 2, 5])
@pytest.mark.parametrize("count", [1, 2, 4, 9])
def test_segments_of_any_length_leave_their_newest_pages(window, count):
    for first in range(2 * (window + 2)):
        recent, numbers = store(window), range(first, first + count)
        recent.write_pages(0, SLOT, first, pages_of(*numbers))
        kept = numbers[-(window + 2) :]
        assert torch.equal(recent.read_pages(0, SLOT, kept[0], kept[-1]), pages_of(*kept))
        assert (recent.ring[1] == EMPTY).all() and (recent.ring[:, 0] == EMPTY).all()
        assert torch.count_nonzero(recent.ring[0, SLOT, :, 0, 0, 0, 0] != EMPTY) == len(kept)


def test_pages_that_are_read_are_copies():
    recent = store(2)
    recent.write_pages(0, SLOT, 0, pages_of(0, 1, 2))
    read = recent.read_pages(0, SLOT, 1, 2)
    recent.write_pages(0, SLOT, 3, pages_of(3, 4, 5, 6))
    assert torch.equal(read, pages_of(1, 2))
