"""The vision tower gives transformers' embeddings, and the whole model its logits, however a prompt is cut."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from model_world import Harness, Row
from torch import Tensor
from vision_world import END, IMAGE, START, patches_of, pixels_of, save_seeing

from kakera.contract.images import ImageSpan, rope_positions
from kakera.errors import CheckpointError
from kakera.model.qwen3_5 import HybridModel
from kakera.model.tower import Tower
from kakera.schedule.images import image_rows
from kakera.weights.checkpoint import Checkpoint

SHAPES = ((3, 5), (9, 8))  # two images, one of them over a border of pages


@dataclass
class Seeing:
    model: HybridModel
    tower: Tower
    reference: Any
    directory: Path
    tokens: Tensor
    images: tuple[ImageSpan, ...]
    embeds: tuple[Tensor, ...]
    logits: Tensor


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    """Text, an image, text, another one, text: transformers' logits of all of it."""
    directory = tmp_path_factory.mktemp("seeing")
    reference = save_seeing(directory)
    checkpoint = Checkpoint.open(directory)
    tower = Tower.load(checkpoint, torch.float32)
    text = torch.randint(10, 211, (120,), generator=torch.Generator().manual_seed(4)).tolist()
    ids, images, pictures = text[:20], [], []
    for seed, (rows, columns) in enumerate(SHAPES):
        picture = pixels_of(seed, rows, columns)
        images.append(ImageSpan(len(ids) + 1, rows, columns, bytes([seed]) * 32, picture.tobytes()))
        pictures.append(picture)
        ids += [START, *[IMAGE] * rows * columns, END, *text[20 + 40 * seed : 60 + 40 * seed]]
    grid = torch.tensor([[1, 2 * rows, 2 * columns] for rows, columns in SHAPES])
    tokens = torch.tensor(ids)
    with torch.no_grad():
        logits = reference(
            input_ids=tokens[None],
            pixel_values=torch.cat([patches_of(picture) for picture in pictures]),
            image_grid_thw=grid,
            mm_token_type_ids=(tokens[None] == IMAGE).int(),
        ).logits[0]
    embeds = tuple(tower.encode(image.pixels, image.rows, image.columns) for image in images)
    return Seeing(HybridModel.load(directory), tower, reference, directory, tokens, tuple(images), embeds, logits)


def test_the_processor_gives_these_patches(seeing: Seeing):
    """To the bit, in its order: block by block, colours before frames."""
    picture = pixels_of(1, 3, 4)
    assert torch.equal(seeing.tower.patches(torch.from_numpy(picture)), patches_of(picture))


@pytest.mark.parametrize("shape", [(2, 3), (4, 2), (1, 1), (2, 2), (7, 1), (20, 17)], ids=str)
def test_embeddings_of_grids(seeing: Seeing, shape: tuple[int, int]):
    """Smaller and larger than the learned grid, of its size, one token, and more patches than a piece of the MLP."""
    rows, columns = shape
    picture = pixels_of(2, rows, columns)
    with torch.no_grad():
        expected = seeing.reference.model.visual(
            patches_of(picture), grid_thw=torch.tensor([[1, 2 * rows, 2 * columns]])
        ).pooler_output
    found = seeing.tower.encode(picture.tobytes(), rows, columns)
    assert found.shape == (rows * columns, seeing.tower.spec.out)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * max(1.0, expected.abs().max().item()))


def run(seeing: Seeing, harness: Harness, start: int, end: int, decode: bool = False) -> Tensor:
    row = Row(seeing.tokens[start:end], start, decode=decode)
    row.positions = rope_positions(seeing.images, start, end)
    named = {image.digest: embeds for image, embeds in zip(seeing.images, seeing.embeds, strict=True)}
    parts = image_rows(seeing.images, start, end)
    row.images = tuple((part.row, named[part.digest][part.first : part.first + part.count]) for part in parts)
    return harness.run(row)[0]


@pytest.mark.parametrize("cuts", [[], [64, 128], [64], [128]], ids=str)
def test_logits_of_text_and_two_images_however_they_are_cut(seeing: Seeing, cuts: list[int]):
    """Token 64 lies in the second image, 128 in the text behind it; the last 20 tokens are decoded one by one."""
    harness, end = Harness(seeing.model), len(seeing.tokens) - 20
    harness.states.reset(0)
    ends = [*cuts, end]
    found = [run(seeing, harness, a, b) for a, b in zip([0, *cuts], ends, strict=True)]
    found += [run(seeing, harness, at, at + 1, decode=True) for at in range(end, len(seeing.tokens))]
    torch.testing.assert_close(torch.cat(found), seeing.logits, rtol=0, atol=1e-4)


def test_a_swapped_axis_another_image_and_a_text_position_all_show(seeing: Seeing):
    """The comparison above would notice each."""
    image = seeing.images[0]
    turned = (ImageSpan(image.start, image.columns, image.rows, image.digest, image.pixels), seeing.images[1])
    for images, embeds in (
        (turned, seeing.embeds),
        ((), seeing.embeds),
        (seeing.images, (seeing.embeds[0].flip(0), seeing.embeds[1])),
    ):
        harness = Harness(seeing.model)
        harness.states.reset(0)
        row = Row(seeing.tokens, 0)
        row.positions = rope_positions(images, 0, len(seeing.tokens))
        row.images = tuple((span.start, part) for span, part in zip(seeing.images, embeds, strict=True))
        assert (harness.run(row)[0] - seeing.logits).abs().max() > 1e-3


def test_the_blocks_may_lie_elsewhere(seeing: Seeing):
    tower = Tower.load(Checkpoint.open(seeing.directory), torch.float32, on_host=True)
    picture = pixels_of(3, 2, 5)
    assert torch.equal(tower.encode(picture.tobytes(), 2, 5), seeing.tower.encode(picture.tobytes(), 2, 5))


def test_a_tower_that_is_not_whole_is_refused(tmp_path: Path, seeing: Seeing):
    class Half:
        spec, directory = seeing.model.spec, tmp_path

        @staticmethod
        def has(name: str) -> bool:
            return "blocks.1" not in name

    with pytest.raises(CheckpointError, match=r"12 of the vision tower's 33 tensors are missing"):
        Tower.load(Half(), torch.float32)
