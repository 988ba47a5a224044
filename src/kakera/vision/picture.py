"""Picture: an image as it goes to the engine, and its identity."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from kakera.arch.preprocessor import Pixels
from kakera.vision.decode import decoded

VERSION = b"kakera image 1"  # what becomes of the pixels behind this; another number, other digests


@dataclass(frozen=True)
class Picture:
    """`rows` x `columns` tokens; `pixels` are RGB bytes of their pixels, row by row. `digest`: of what the model sees,
    so formats, EXIF and where it came from play no part, and the size does."""

    rows: int
    columns: int
    pixels: bytes
    digest: bytes

    @property
    def tokens(self) -> int:
        return self.rows * self.columns


def picture(data: bytes, pixels: Pixels) -> Picture:
    """Of the bytes of an image file. Raises RequestRefused as `decoded`."""
    rgb = decoded(data, pixels)
    width, height = rgb.size
    raw = rgb.tobytes()
    digest = hashlib.sha256(VERSION + height.to_bytes(4, "big") + width.to_bytes(4, "big"))
    digest.update(raw)
    return Picture(height // pixels.factor, width // pixels.factor, raw, digest.digest())
