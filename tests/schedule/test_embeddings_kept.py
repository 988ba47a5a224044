"""Which images a step encodes, and which embeddings stay: decided without a device."""

from __future__ import annotations

from kakera.contract.images import ImageSpan
from kakera.contract.step import EncodeImage, ForgetImages, ImageRows
from kakera.schedule.images import Embeddings, image_rows


def span(start: int, tokens: int, name: str) -> ImageSpan:
    return ImageSpan(start, 1, tokens, name.encode().ljust(32), b"")


def told(actions) -> list[str]:
    return [
        "+" + a.digest.decode().strip()
        if isinstance(a, EncodeImage)
        else "-" + "".join(d.decode().strip() for d in a.digests)
        for a in actions
    ]


def test_rows_of_a_segment_that_are_images():
    images = (span(10, 100, "a"), span(115, 3, "b"))
    digest = [image.digest for image in images]
    assert image_rows(images, 0, 10) == () == image_rows(images, 118, 200)
    assert image_rows(images, 64, 128) == (ImageRows(digest[0], 0, 54, 46), ImageRows(digest[1], 51, 0, 3))


def test_an_image_is_encoded_once_and_the_least_recently_used_goes():
    kept = Embeddings(100)
    a, b, c, big = span(0, 40, "a"), span(40, 40, "b"), span(80, 40, "c"), span(0, 300, "d")
    assert told(kept.take([a, b])) == ["+a", "+b"]
    assert told(kept.take([a, a])) == []
    assert told(kept.take([c])) == ["-b", "+c"]
    assert told(kept.take([big, c])) == ["-a", "+d"]  # one step may need more than is kept
    assert told(kept.take([a])) == ["-cd", "+a"] and kept.tokens == 40
    assert told(kept.flush()) == ["-a"] and kept.flush() == ()


def test_what_failed_is_computed_anew():
    kept = Embeddings(100)
    image = span(0, 40, "a")
    kept.take([image])
    kept.distrust(image_rows([image], 0, 64))
    assert [type(action) for action in kept.take([image])] == [ForgetImages, EncodeImage]


def test_a_step_encodes_a_chunk_of_tokens_or_one_image():
    """So that streams that run wait for no more, and a prompt of many images comes through."""
    kept = Embeddings(10_000)
    images = (span(10, 600, "a"), span(700, 300, "b"), span(1010, 300, "c"), span(1320, 5, "d"))
    assert kept.reach(images, 0, 2000, 512, first=True) == (640, 600)
    assert kept.reach(images, 576, 2000, 512, first=True) == (640, 600)  # a goes on: needed again unless it is kept
    kept.take(images[:1])
    assert kept.reach(images, 576, 2000, 512, first=True) == (960, 300)
    assert kept.reach(images, 0, 600, 512, first=True) == (600, 0)
    assert kept.reach(images, 640, 2000, 100, first=False) == (640, 0)  # another row has encoded: it begins later
    assert kept.reach(images, 512, 2000, 100, first=False) == (640, 0)
    together = (span(3, 20, "e"), span(30, 500, "f"))
    assert kept.reach(together, 0, 2000, 512, first=True) == (2000, 520)  # both lie in the first page
