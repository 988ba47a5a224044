"""Known NVIDIA cards: memory as nvidia-smi reports it, bandwidth, dense fp16 tensor throughput. No torch.

Memory is what the driver shows (MiB), a little below the number on the box. Bandwidth and TFLOP/s (dense, fp32
accumulation) are the vendor's figures; `kakera.plan.speed` applies a stated efficiency to them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Card:
    memory_mib: int
    bandwidth_gbs: float
    fp16_tflops: float


CARDS: dict[str, Card] = {
    "rtx3060": Card(12288, 360, 51),
    "rtx3060ti": Card(8192, 448, 65),
    "rtx3070": Card(8192, 448, 81),
    "rtx3080": Card(10240, 760, 119),
    "rtx3080ti": Card(12288, 912, 136),
    "rtx3090": Card(24576, 936, 142),
    "rtx3090ti": Card(24564, 1008, 160),
    "rtx4060": Card(8188, 272, 60),
    "rtx4060ti": Card(16380, 288, 88),
    "rtx4070": Card(12282, 504, 117),
    "rtx4070super": Card(12282, 504, 142),
    "rtx4070ti": Card(12282, 504, 160),
    "rtx4070tisuper": Card(16376, 672, 176),
    "rtx4080": Card(16376, 717, 195),
    "rtx4080super": Card(16376, 736, 209),
    "rtx4090": Card(24564, 1008, 330),
    "rtx5060": Card(8151, 448, 77),
    "rtx5060ti": Card(16311, 448, 95),
    "rtx5070": Card(12227, 672, 123),
    "rtx5070ti": Card(16303, 896, 176),
    "rtx5080": Card(16303, 960, 225),
    "rtx5090": Card(32607, 1792, 419),
    "a10": Card(23028, 600, 125),
    "a40": Card(46068, 696, 150),
    "a100": Card(81920, 2039, 312),
    "l4": Card(23034, 300, 121),
    "l40s": Card(46068, 864, 362),
    "h100": Card(81559, 3350, 989),
    "h200": Card(143771, 4800, 989),
    "b200": Card(183359, 8000, 2250),
}


def normalise(name: str) -> str:
    """ "NVIDIA GeForce RTX 5070 Ti" -> "rtx5070ti"."""
    text = "".join(c for c in name.lower() if c.isalnum())
    for word in ("nvidia", "geforce", "laptop", "gpu"):
        text = text.replace(word, "")
    return text


def find(name: str) -> Card | None:
    """The longest known name that begins the given one ("h100pcie" -> h100). None if there is none."""
    text = normalise(name)
    matches = [known for known in CARDS if text == known or (text.startswith(known) and known[0] in "abhl")]
    return CARDS[max(matches, key=len)] if matches else None
