"""Sums over two cards through host memory: both ranks have the reference's bits; a rank left alone leaves in time."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as multiprocessing
from exchange_pair import run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
]


@pytest.mark.parametrize("rows", [1, 5, 64])
def test_both_ranks_have_the_references_bits_and_one_alone_gives_up_in_a_second(rows):
    results = multiprocessing.get_context("spawn").Queue()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        multiprocessing.spawn(run, args=(Path(directory) / "segment", rows, results), nprocs=2)
    found = sorted(results.get(timeout=5) for _ in range(2))
    assert [(same, close, healthy) for _, same, close, healthy, _, _ in found] == [(True, True, "")] * 2
    assert 0.7 < found[0][4] < 1.5 and "waited too long" in found[0][5]
