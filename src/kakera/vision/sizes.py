"""To what size an image is resized: sides that are whole tokens, an area within limits, the aspect kept. No Pillow.

As transformers' `smart_resize`, to the pixel: halves are rounded to even, as Python does.
"""

from __future__ import annotations

import math

from kakera.arch.preprocessor import Pixels
from kakera.errors import RequestRefused

MOST_PIXELS = 50_000_000  # of an image as it is sent: 150 MB once it is decoded
MOST_ASPECT = 200


def fitted(height: int, width: int, pixels: Pixels) -> tuple[int, int]:
    """Height and width behind the resize. Raises RequestRefused for sizes that are not read."""
    if min(height, width) < 1:
        raise RequestRefused(f"the image has {width} x {height} pixels")
    if height * width > MOST_PIXELS:
        raise RequestRefused(
            f"an image of {width} x {height} pixels: at most {MOST_PIXELS // 10**6} million are decoded; scale it down"
        )
    if max(height, width) > MOST_ASPECT * min(height, width):
        raise RequestRefused(
            f"the image has {width} x {height} pixels; no side may be more than {MOST_ASPECT} times the other"
        )
    factor = pixels.factor
    rows, columns = round(height / factor), round(width / factor)
    if rows * columns * factor**2 > pixels.most:
        shrink = math.sqrt((height * width) / pixels.most)
        rows, columns = (max(1, math.floor(side / shrink / factor)) for side in (height, width))
    elif rows * columns * factor**2 < pixels.least:
        grow = math.sqrt(pixels.least / (height * width))
        rows, columns = (math.ceil(side * grow / factor) for side in (height, width))
    return rows * factor, columns * factor
