from __future__ import annotations

import base64
import threading

import pytest
from drawn import png

from kakera.arch.preprocessor import Pixels
from kakera.errors import RequestRefused
from kakera.vision import reader
from kakera.vision.reader import ImageReader


def url(data: bytes) -> str:
    return f"data:;base64,{base64.b64encode(data).decode()}"


PIXELS = Pixels(32, 16_384, 262_144)


def test_pictures_are_kept_within_a_bound_and_decoded_once(monkeypatch):
    calls = []
    monkeypatch.setattr(reader, "picture", lambda data, limits: calls.append(data) or original(data, limits))
    from kakera.vision.picture import picture as original

    eyes = ImageReader(PIXELS, 256, kept_bytes=2 * 3 * 128 * 160)
    one, two, three = (png(128, 160 - 32 * i) for i in range(3))
    assert eyes.picture(one) is eyes.picture(one) and calls == [one]
    eyes.picture(two)
    eyes.picture(one)
    eyes.picture(three)  # the least recently used goes
    eyes.picture(one)
    assert calls == [one, two, three]
    eyes.picture(two)
    assert calls == [one, two, three, two]


def test_limits_of_the_server_are_below_those_of_the_model():
    data = png(640, 800)
    assert ImageReader(PIXELS, 10_000).picture(data).tokens == 238  # the model's
    assert ImageReader(PIXELS, 64).picture(data).tokens <= 64
    assert ImageReader(PIXELS, 64).measure(url(data)).tokens == ImageReader(PIXELS, 64).picture(data).tokens
    wide = ImageReader(Pixels(32), 2048)
    assert wide.picture(data).tokens == 500 and wide.picture(data, low=True).tokens <= 256
    assert ImageReader(Pixels(32), 64).picture(png(8, 8)).tokens == 64  # a least area above the server's limit


def test_who_waits_too_long_for_a_turn_is_told_to_come_again(monkeypatch):
    """Two are decoded at a time; another one's image is no error of his."""
    monkeypatch.setattr(reader, "PATIENCE", 0.01)
    eyes, busy, go = ImageReader(PIXELS, 256), threading.Barrier(3), threading.Event()

    def slowly(data, limits):
        busy.wait()
        go.wait()
        raise RequestRefused("no image")

    monkeypatch.setattr(reader, "picture", slowly)

    def look():
        with pytest.raises(RequestRefused, match="no image"):
            eyes.picture(png(8, 8))

    threads = [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    busy.wait()
    with pytest.raises(RequestRefused, match="too many images") as refused:
        eyes.picture(png(9, 9))
    go.set()
    for thread in threads:
        thread.join()
    assert refused.value.status == 503
    monkeypatch.setattr(reader, "picture", lambda data, limits: "a picture")
    monkeypatch.setattr(eyes, "_most_kept", 1 << 40)
    with pytest.raises(AttributeError):  # a turn was free again
        eyes.picture(png(9, 9))
