"""What a model directory says of pixels: the limits within which an image is resized. No torch.

Of `preprocessor_config.json` or, newer, `image_processor` in `processor_config.json`. A key that would change a pixel
has the value that is computed, or the tower is not served: a class's own defaults are those of another family.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kakera.arch.config import short
from kakera.arch.documents import read_object
from kakera.arch.vision import VisionSpec
from kakera.errors import CheckpointError

FILE, NEWER = "preprocessor_config.json", "processor_config.json"
LEAST, MOST = 256**2, 4096**2  # of the published files; pixels of an image
HALVES, BICUBIC = [0.5, 0.5, 0.5], 3


@dataclass(frozen=True)
class Pixels:
    """How images become pixels: sides are multiples of `factor`, areas lie between `least` and `most`."""

    factor: int
    least: int = LEAST
    most: int = MOST

    def tokens(self, height: int, width: int) -> int:
        """Of an image that has been resized."""
        return height * width // self.factor**2


def read_pixels(directory: Path, vision: VisionSpec) -> Pixels:
    """Raises CheckpointError for a preprocessing that is not computed."""
    said = read_object(directory / FILE) or read_object(directory / NEWER).get("image_processor") or {}
    if not isinstance(said, dict):
        raise CheckpointError(f"{directory / NEWER}: image_processor is {short(said)}, which is no JSON object")
    computed: dict[str, tuple[Any, ...]] = {
        "patch_size": (vision.patch,),
        "merge_size": (vision.merge,),
        "temporal_patch_size": (vision.temporal,),
        "image_mean": (HALVES, 0.5),
        "image_std": (HALVES, 0.5),
        "resample": (BICUBIC,),
        **dict.fromkeys(("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"), (True,)),
    }
    for key, values in computed.items():
        if (value := said.get(key)) is not None and value not in values:
            raise CheckpointError(f"{FILE}: {key} is {short(value)} (kakera computes {short(values[0])})")
    scale = said.get("rescale_factor", 1 / 255)
    if not isinstance(scale, int | float) or abs(scale * 255 - 1) > 1e-6:
        raise CheckpointError(f"{FILE}: rescale_factor is {short(scale)} (kakera computes 1/255)")
    least, most = _areas(said)
    if not 0 < least <= most or most < vision.factor**2:
        raise CheckpointError(f"{FILE}: images between {least} and {most} pixels are none that the tower reads")
    return Pixels(vision.factor, least, most)


def _areas(said: Mapping[str, Any]) -> tuple[int, int]:
    """`size` holds areas, whatever its keys are called; older files name them beside it."""
    size = said.get("size") or {}
    if not isinstance(size, dict):
        raise CheckpointError(f"{FILE}: size is {short(size)}, which is no JSON object")
    found = []
    for key, older, default in (("shortest_edge", "min_pixels", LEAST), ("longest_edge", "max_pixels", MOST)):
        value = next((v for v in (said.get(older), size.get(key), size.get(older)) if v is not None), default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise CheckpointError(f"{FILE}: {key} is {short(value)}, which is no number of pixels")
        found.append(value)
    return found[0], found[1]
