"""A vision tower in files: of a model's own directory, or of another one of its family. No torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from kakera.arch.registry import load_spec
from kakera.arch.spec import ModelSpec
from kakera.arch.stored import TensorHeader, headers_beginning
from kakera.arch.vision import PREFIX
from kakera.errors import CheckpointError

STORED = (PREFIX, PREFIX.removeprefix("model."))  # how names begin


def tower_headers(directory: Path) -> list[TensorHeader]:
    """Of all files of a directory, without its index: those of the text model need not be there."""
    return headers_beginning(directory, STORED)


def with_tower(spec: ModelSpec, directory: Path) -> ModelSpec:
    """A text model with the tower that another directory declares, which must end in its width. Token and axes are the
    text model's own where its config tells of images at all. Raises CheckpointError."""
    theirs, own = load_spec(directory), spec.vision
    vision = theirs.vision
    if vision is None:
        raise CheckpointError(f"{directory}: {theirs.blind or 'its config.json tells of no vision tower'}")
    if vision.out != spec.hidden:
        sizes = f"{vision.out} channels, and this one has {spec.hidden}"
        raise CheckpointError(f"the vision tower of {directory} is made for a model of {sizes}")
    token, axes = (vision.token, vision.axes) if own is None else (own.token, own.axes)
    if token >= spec.vocab or len(axes) != spec.rotary_dim // 2:
        raise CheckpointError(f"the vision tower of {directory} is one of another family than this model's")
    return replace(spec, vision=replace(vision, token=token, axes=axes), blind="")
