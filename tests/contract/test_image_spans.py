from __future__ import annotations

import random

import msgspec
import pytest

from kakera.contract.grid import PAGE
from kakera.contract.images import ImageSpan, page_extras, rope_positions
from kakera.contract.step import ImageRows, Segment


def span(start: int, rows: int, columns: int, digest: bytes = b"i" * 32) -> ImageSpan:
    return ImageSpan(start, rows, columns, digest, b"")


EXAMPLE = (span(4, 2, 3), span(14, 4, 2))  # 5 6 7 S [2 x 3] E 8 9 S [4 x 2] E 10 11


def test_the_example_of_the_specification():
    time, row, column = rope_positions(EXAMPLE, 0, 25)
    assert time == (0, 1, 2, 3, *[4] * 6, 7, 8, 9, 10, *[11] * 8, 15, 16, 17)
    assert row == (0, 1, 2, 3, 4, 4, 4, 5, 5, 5, 7, 8, 9, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 16, 17)
    assert column == (0, 1, 2, 3, 4, 5, 6, 4, 5, 6, 7, 8, 9, 10, 11, 12, 11, 12, 11, 12, 11, 12, 15, 16, 17)


def test_text_has_the_positions_of_the_cache_and_behind_images_one_axis():
    assert rope_positions((), 0, 9) == () == rope_positions(EXAMPLE, 0, 4)
    assert rope_positions(EXAMPLE, 25, 27) == ((18, 19),)  # generated: the shift is -7
    assert rope_positions(EXAMPLE, 11, 13) == ((8, 9),)
    assert rope_positions((span(2, 1, 3),), 0, 6) == ((0, 1, 2, 2, 2, 5), (0, 1, 2, 2, 2, 5), (0, 1, 2, 3, 4, 5))


@pytest.mark.parametrize("seed", range(20))
def test_any_part_of_a_prompt_has_the_positions_of_the_whole(seed):
    rng = random.Random(seed)
    images, at = [], 0
    for _ in range(rng.randrange(1, 5)):
        at += rng.randrange(0, 30)
        images.append(span(at, rng.randrange(1, 9), rng.randrange(1, 9)))
        at = images[-1].end
    end = at + rng.randrange(0, 20)
    whole = rope_positions(images, 0, end)
    axes = whole if len(whole) == 3 else whole * 3
    assert all(axis[i] <= i for axis in axes for i in range(end))  # never beyond the cache's
    for _ in range(20):
        first = rng.randrange(end)
        last = rng.randrange(first, end) + 1
        part = rope_positions(images, first, last) or (tuple(range(first, last)),)
        assert [part[axis % len(part)] for axis in range(3)] == [axis[first:last] for axis in axes]


@pytest.mark.slow
def test_200_layouts_have_the_positions_of_transformers():
    import torch
    from transformers import Qwen3_5Config
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5Model

    model = Qwen3_5Model.__new__(Qwen3_5Model)
    torch.nn.Module.__init__(model)
    model.config = Qwen3_5Config(image_token_id=7, vision_config={"spatial_merge_size": 2})
    rng = random.Random(0)
    for _ in range(200):
        tokens, images, grids = [1] * rng.randrange(0, 5), [], []
        for _ in range(rng.randrange(1, 4)):
            rows, columns = rng.randrange(1, 9), rng.randrange(1, 9)
            images.append(span(len(tokens) + 1, rows, columns))
            tokens += [8, *[7] * rows * columns, 9, *[1] * rng.randrange(0, 6)]
            grids.append([1, 2 * rows, 2 * columns])
        ids = torch.tensor([tokens])
        theirs, delta = model.get_rope_index(
            ids, mm_token_type_ids=(ids == 7).int(), image_grid_thw=torch.tensor(grids), video_grid_thw=None
        )
        ours = rope_positions(images, 0, len(tokens)) or (tuple(range(len(tokens))),)
        assert [list(ours[axis % len(ours)]) for axis in range(3)] == theirs[:, 0].tolist()
        behind = rope_positions(images, len(tokens), len(tokens) + 1) or ((len(tokens),),)
        assert behind == ((len(tokens) + int(delta),),)


def test_keys_name_images_where_their_tokens_lie():
    """A page before an image says nothing of it; two images in one page both count, and where each is cut."""
    one, two = b"1" * 32, b"2" * 32
    found = page_extras((span(70, 6, 10, one), span(130, 1, 3, two), span(133, 2, 2, one)))
    assert found == {
        1: one + (0).to_bytes(4, "big"),
        2: one + (58).to_bytes(4, "big") + two + bytes(4) + one + bytes(4),
    }
    assert page_extras((span(0, 1, PAGE),)) == {0: b"i" * 32 + bytes(4)}


def test_a_segment_that_is_cut_keeps_what_its_tokens_need():
    row = Segment("a", 0, (1, 7, 7, 7, 7, 2), 64, sampled=1, positions=((64, 65, 65, 65, 65, 67),) * 3)
    parts = (ImageRows(b"d", 1, 5, 4), ImageRows(b"e", 5, 0, 1))
    cut = msgspec.structs.replace(row, images=parts).cut(3)
    assert cut.tokens == (1, 7, 7) and cut.positions == ((64, 65, 65),) * 3 and cut.sampled == 0
    assert cut.images == (ImageRows(b"d", 1, 5, 2),)
