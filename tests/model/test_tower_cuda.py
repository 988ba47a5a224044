"""The vision tower on a GPU: a CPU's embeddings, streamed as resident, within its plan; prints what an image takes.

pytest -m gpu -s tests/model/test_tower_cuda.py
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kakera.arch.registry import spec_of
from kakera.arch.spec import ModelSpec
from kakera.model.tower import Tower
from kakera.plan.known import KNOWN
from kakera.plan.tower import scratch_bytes, streamed_parameters
from seeing_model import SEEING

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
FAMILY = spec_of({**KNOWN["qwen3.8-27b"], "vision_config": {"depth": 27}, "image_token_id": 248056})


@dataclass(frozen=True)
class RandomTower:
    """A checkpoint with a tower of made-up weights, the same on every device."""

    spec: ModelSpec
    directory: Path = Path("made up")

    def has(self, name: str) -> bool:
        return True

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: Any) -> Tensor:
        generator = torch.Generator().manual_seed(sum(name.encode()))
        scale = shape[-1] ** -0.5 if len(shape) > 1 else 0.1
        return (torch.randn(shape, generator=generator) * scale + ("norm" in name and "weight" in name)).to(
            device, dtype
        )


def tower(spec: ModelSpec, dtype: torch.dtype, device: str, on_host: bool = False) -> Tower:
    return Tower.load(RandomTower(spec), dtype, device, on_host=on_host)  # type: ignore[arg-type]


@cache
def family(on_host: bool) -> Tower:
    return tower(FAMILY, torch.bfloat16, "cuda", on_host)


def picture(of: Tower, rows: int, columns: int) -> tuple[bytes, int, int]:
    generator = torch.Generator().manual_seed(rows)
    size = (rows * columns * of.spec.factor**2 * 3,)
    return torch.randint(0, 256, size, dtype=torch.uint8, generator=generator).numpy().tobytes(), rows, columns


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-4), (torch.bfloat16, 5e-2)], ids=["fp32", "bf16"])
def test_embeddings_are_those_of_a_cpu(dtype, near):
    cpu = tower(spec_of(SEEING), torch.float32, "cpu")
    gpu = tower(spec_of(SEEING), dtype, "cuda")
    for rows, columns in ((1, 1), (3, 7), (20, 30)):
        image = picture(cpu, rows, columns)
        expected = cpu.encode(*image)
        found = gpu.encode(*image).float().cpu()
        assert (found - expected).abs().max() <= near * max(1.0, float(expected.abs().max()))


def test_a_streamed_tower_gives_the_bits_of_a_resident_one():
    image = picture(family(False), 12, 20)
    assert torch.equal(family(True).encode(*image), family(False).encode(*image))


@pytest.mark.parametrize("on_host", [False, True], ids=["resident", "streamed"])
def test_an_image_of_1080p_takes_what_is_planned(on_host):
    """2,040 tokens. Bars on an H200: 60 ms resident, 105 streamed; memory within the plan's rows."""
    of = family(on_host)
    image = picture(of, 34, 60)
    of.encode(*image)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(5):
        of.encode(*image)
    end.record()
    torch.cuda.synchronize()
    taken = torch.cuda.max_memory_allocated() - held
    planned = scratch_bytes(of.spec, 2048, 2) + (2 * streamed_parameters(of.spec)[1] if on_host else 0)
    mean = begin.elapsed_time(end) / 5
    print(f"\n1080p, on_host={on_host}: {mean:.1f} ms, {taken / 1e6:.0f} MB of {planned / 1e6:.0f} planned")
    assert taken <= 1.03 * planned
