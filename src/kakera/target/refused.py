"""In words, that a driver has refused memory of a card: what was asked for, who else has some, what to do. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kakera.target.allocator import Segments

# Windows says "device not ready" to programs and `dxgkio_make_resident: Ioctl failed: -12` in the kernel's log
WORDS = ("out of memory", "device not ready", "make_resident")


@dataclass(frozen=True)
class Room:
    """Of the card when the start began: bytes `planned` of `capacity`, `used` by others, of whom `users` says more."""

    planned: int
    capacity: int
    used: int
    users: Sequence[str] = ()


def is_refusal(error: str) -> bool:
    return any(word in error.lower() for word in WORDS)


def in_words(error: str, room: Room, segments: Segments, wsl: bool) -> str:
    """`error`: of the driver or torch; its first line is kept."""
    gigabytes = [f"{count / 1e9:.2f}" for count in (room.planned, room.capacity, room.used)]
    said = error.strip().partition("\n")[0]
    others = f" ({'; '.join(room.users)})" if room.users else ""
    windows = ""
    if wsl:
        windows = (
            " Under WSL2 Windows refuses memory before a card is full, in reports from 9.6 of 12.2 GiB on; the "
            "kernel's log (dmesg) then has dxgkio_make_resident with -12."
        )
    return (
        f"the driver refused memory of the card at the start ({said}): the plan takes {gigabytes[0]} of {gigabytes[1]} "
        f"GB, and others held {gigabytes[2]} GB{others}.{windows} Close what else uses the card, or plan less: "
        f"--reserve 1.5GB leaves more free, a smaller --context or --max-running takes less. {segments.text}."
    )
