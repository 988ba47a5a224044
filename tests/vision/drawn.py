"""Images of all kinds, made here, as bytes of files."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from PIL import Image

ORIENTATION = 0x0112  # EXIF's tag


def pattern(height: int, width: int) -> np.ndarray:
    """Of the specification: three colours that differ at every pixel, uint8 [height, width, 3]."""
    y, x = np.mgrid[:height, :width]
    return np.stack([(3 * x + 5 * y) % 256, (7 * x + y) % 256, (x * y) % 256], axis=-1).astype(np.uint8)


def noise(height: int, width: int, channels: int = 3) -> np.ndarray:
    return np.random.default_rng(height * 10_007 + width).integers(0, 256, (height, width, channels), dtype=np.uint8)


def image(mode: str, height: int, width: int) -> Image.Image:
    """Noise in a mode of Pillow; with transparency if the mode has some."""
    if mode == "I;16":
        return Image.fromarray(noise(height, width, 2).view(np.uint16)[..., 0])
    if mode == "P+":  # a palette one colour of which is transparent
        found = Image.fromarray(noise(height, width)).convert("P")
        found.info["transparency"] = 7
        return found
    if mode == "RGB+":
        found = Image.fromarray(noise(height, width) // 128)
        found.info["transparency"] = (1, 1, 1)
        return found
    if mode in ("RGBA", "LA"):
        return Image.fromarray(noise(height, width, 4)).convert(mode)
    return Image.fromarray(noise(height, width)).convert(mode)


def file(picture: Image.Image, kind: str = "PNG", orientation: int = 0, **options: Any) -> bytes:
    if orientation:
        exif = Image.Exif()
        exif[ORIENTATION] = orientation
        options["exif"] = exif
    if "transparency" in picture.info:
        options["transparency"] = picture.info["transparency"]
    stream = io.BytesIO()
    picture.save(stream, kind, **options)
    return stream.getvalue()


def png(height: int, width: int) -> bytes:
    return file(Image.fromarray(pattern(height, width)))
