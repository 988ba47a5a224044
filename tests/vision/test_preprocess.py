from __future__ import annotations

import base64
import io
import struct
import zlib

import numpy as np
import pytest
from drawn import file, image, noise, pattern, png
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps

import kakera.vision.decode
from kakera.arch.preprocessor import LEAST, MOST, Pixels
from kakera.errors import RequestRefused
from kakera.vision.decode import MOST_BYTES, resized_size
from kakera.vision.picture import picture
from kakera.vision.sizes import MOST_PIXELS, fitted
from kakera.vision.sources import of_base64, of_url

pytestmark = [
    pytest.mark.filterwarnings("ignore:Corrupt EXIF"),
    pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning"),
]
PIXELS = Pixels(32)
SMALL = Pixels(32, 16_384, 262_144)  # of the reference model


def decoded(data: bytes, pixels: Pixels) -> np.ndarray:
    return np.asarray(kakera.vision.decode.decoded(data, pixels))


# sizes


@pytest.mark.parametrize(
    ("size", "found"),
    [
        ((480, 640), (480, 640)),
        ((1080, 1920), (1088, 1920)),
        ((300, 200), (320, 224)),
        ((240, 320), (256, 320)),  # 7.5 tokens are 8: halves to even
        ((80, 1008), (64, 1024)),  # 2.5 are 2, 31.5 are 32
        ((112, 1008), (128, 1024)),  # 3.5 are 4
        ((33, 1000), (64, 1440)),
        ((1, 1), (256, 256)),
        ((16, 16), (256, 256)),
        ((64, 64), (256, 256)),
        ((4100, 4100), (4096, 4096)),
        ((5000, 3000), (4992, 3008)),
    ],
)
def test_sizes_behind_the_resize(size, found):
    assert fitted(*size, PIXELS) == found


@given(st.integers(1, 6000), st.integers(1, 6000), st.sampled_from([PIXELS, SMALL]))
def test_sides_are_whole_tokens_areas_within_limits_and_the_aspect_is_kept(height, width, pixels):
    if max(height, width) > 200 * min(height, width):
        with pytest.raises(RequestRefused, match="200 times the other"):
            fitted(height, width, pixels)
        return
    found = fitted(height, width, pixels)
    assert found[::-1] == fitted(width, height, pixels)
    assert all(side % 32 == 0 and side > 0 for side in found)
    assert found[0] * found[1] <= pixels.most or 32 in found  # a strip is never thinner than a token
    assert found[0] * found[1] >= pixels.least
    low, high = ([(side + d) / was for side, was in zip(found, (height, width), strict=True)] for d in (-32, 32))
    assert max(low) <= min(high)  # one scale for both, but for a token


# pixels


def test_the_example_of_the_specification():
    """Of Pillow 13; a release that resizes otherwise moves these by a level."""
    rgb = decoded(png(70, 100), PIXELS)
    assert rgb.shape == (224, 320, 3) and rgb.dtype == np.uint8
    points = {(0, 0): (0, 0, 0), (0, 16): (13, 33, 0), (16, 0): (23, 4, 0), (0, 32): (28, 68, 0), (32, 0): (48, 9, 0)}
    assert {at: tuple(rgb[at].tolist()) for at in points} == points
    assert int(rgb.astype(np.int64).sum()) == 26_686_644


CASES = {
    **{f"{h}x{w}": file(Image.fromarray(noise(h, w))) for h, w in ((70, 100), (33, 400), (480, 640), (1, 3))},
    **{f"smooth {h}x{w}": png(h, w) for h, w in ((128, 128), (111, 333), (640, 480), (900, 1000))},
    **{mode: file(image(mode, 90, 130)) for mode in ("1", "L", "LA", "P", "P+", "RGB+", "RGBA", "I;16")},
    **{f"JPEG {mode}": file(image(mode, 90, 130), "JPEG") for mode in ("L", "RGB", "CMYK")},
    "WEBP RGBA": file(image("RGBA", 70, 50), "WEBP", lossless=True),
    "GIF P+": file(image("P+", 70, 50), "GIF"),
    **{f"BMP {mode}": file(image(mode, 70, 50), "BMP") for mode in ("RGB", "P")},
    **{f"EXIF {turn}": file(image("RGB", 70, 150), "JPEG", turn) for turn in range(1, 9)},
    **{f"EXIF {turn} PNG": file(image("LA", 40, 150), "PNG", turn) for turn in (3, 6)},
    "animated": file(image("P", 70, 50), "GIF", save_all=True, append_images=[image("P", 70, 50).rotate(90)]),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("pixels", [PIXELS, SMALL], ids=["published", "reference"])
def test_bit_equal_to_the_processor_of_transformers(pixels):
    """All of them, in every mode, format and orientation: not one level of one value differs."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    processor = Qwen2VLImageProcessorPil(
        size={"shortest_edge": pixels.least, "longest_edge": pixels.most},
        patch_size=16,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )
    for name, data in CASES.items():
        theirs = processor.preprocess(ImageOps.exif_transpose(Image.open(io.BytesIO(data))), return_tensors="np")
        ours = decoded(data, pixels)
        height, width, _ = ours.shape
        assert theirs["image_grid_thw"].tolist() == [[1, height // 16, width // 16]], name
        scaled = ((ours.astype(np.float64) / 255).astype(np.float32) - np.float32(0.5)) / np.float32(0.5)
        blocks = scaled.reshape(height // 32, 2, 16, width // 32, 2, 16, 3).transpose(0, 3, 1, 4, 6, 2, 5)
        patches = np.stack([blocks, blocks], axis=5).reshape(-1, 3 * 2 * 16 * 16)
        assert np.array_equal(patches, theirs["pixel_values"]), name


@pytest.mark.parametrize("name", CASES)
def test_the_header_alone_tells_the_size(name):
    height, width, _ = decoded(CASES[name], SMALL).shape
    assert sorted(resized_size(CASES[name], SMALL)) == sorted((height, width))


def test_what_is_transparent_is_white():
    hidden = np.zeros((64, 64, 4), np.uint8)  # black, and not to be seen
    hidden[:32, :, 3] = 255
    rgb = decoded(file(Image.fromarray(hidden)), SMALL)
    assert rgb[10, 10].tolist() == [0, 0, 0] and rgb[120, 120].tolist() == [255, 255, 255]


def test_a_photograph_taken_sideways_is_upright():
    """Public bug 21: EXIF's orientation ignored."""
    half = np.zeros((64, 128, 3), np.uint8)
    half[:, :64] = 250  # the left half is bright
    rgb = decoded(file(Image.fromarray(half), "JPEG", 6), SMALL)  # to be turned by 90 degrees clockwise
    height, width, _ = rgb.shape
    assert height > width and rgb[5, 5, 0] > 200 and rgb[height - 5, 5, 0] < 50


def test_exif_that_can_not_be_read_turns_nothing():
    data = file(image("RGB", 64, 96), "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff")
    assert decoded(data, SMALL).shape[1] > decoded(data, SMALL).shape[0]


# identity


def test_an_image_is_what_the_model_sees_of_it():
    """Public bugs 2, 3 and 4: identities of 16 bits, of raw bytes without their size, blind to what was decoded how."""
    drawn = Image.fromarray(pattern(128, 160))
    one = picture(file(drawn), SMALL)
    assert (one.rows, one.columns, one.tokens, len(one.digest)) == (4, 5, 20, 32)
    assert len(one.pixels) == 128 * 160 * 3
    assert picture(file(drawn, "BMP"), SMALL).digest == one.digest == picture(file(drawn, "PNG", 1), SMALL).digest
    reshaped = Image.frombytes("RGB", (128, 160), drawn.tobytes())
    assert picture(file(reshaped), SMALL).pixels == one.pixels and picture(file(reshaped), SMALL).digest != one.digest
    assert picture(file(drawn), Pixels(32, 16_384, 18_000)).digest != one.digest
    clear, solid = drawn.copy(), drawn.copy()
    clear.putalpha(128)
    solid.putalpha(255)
    assert picture(file(clear), SMALL).digest != one.digest == picture(file(solid), SMALL).digest


# what is hostile


def bomb(height: int, width: int, body: bytes = b"") -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def text_bomb() -> bytes:
    """A comment of 200 MB in 200 KB."""
    data = b"note\0\0" + zlib.compress(bytes(200_000_000), 1)
    plain = png(64, 64)
    return (
        plain[:33]
        + struct.pack(">I", len(data)) + b"zTXt" + data + struct.pack(">I", zlib.crc32(b"zTXt" + data))
        + plain[33:]
    )  # fmt: skip


HOSTILE = {
    "nothing": (b"", "0 bytes"),
    "text": (b"<html>not found</html>", "no format that is read"),
    "svg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "PNG, JPEG, WEBP, GIF, BMP"),
    "tiff": (file(image("RGB", 64, 64), "TIFF"), "no format that is read"),
    "50,000 x 50,000": (bomb(50_000, 50_000), "more pixels than are decoded"),
    "100 million": (bomb(10_000, 10_000, zlib.compress(bytes(30_000_000), 9)), "at most 50 million"),
    "51 million": (bomb(3_000, 17_000), "at most 50 million"),
    "a line": (bomb(1, 5_000), "200 times"),
    "too many bytes": (png(64, 64) + bytes(MOST_BYTES), "at most 20,000,000"),
    "header only": (png(64, 64)[:33], "no format|can not be decoded"),
    "cut png": (file(Image.fromarray(noise(200, 200)))[:60_000], "can not be decoded"),
    "cut jpeg": (file(Image.fromarray(noise(200, 200)), "JPEG")[:9_000], "can not be decoded"),
    "cut webp": (file(Image.fromarray(noise(200, 200)), "WEBP")[:9_000], "can not be decoded|no format"),
    "cut gif": (file(Image.fromarray(noise(200, 200)), "GIF")[:900], "can not be decoded"),
    "comment": (text_bomb(), "can not be decoded"),
    "wrong checksum": (png(64, 64)[:60] + b"\0\0\0\0" + png(64, 64)[64:], "can not be decoded"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_no_image_is_refused_in_words_before_it_costs(name):
    """Public bug 13: decoded before anybody looked at the number of pixels."""
    data, said = HOSTILE[name]
    with pytest.raises(RequestRefused, match=said) as refused:
        decoded(data, PIXELS)
    assert refused.value.status == 400
    assert decoded(png(64, 64), PIXELS).shape == (256, 256, 3)  # the next one is unharmed


def test_the_limit_of_pixels_is_reached():
    assert fitted(5_000, MOST_PIXELS // 5_000, PIXELS) and LEAST < MOST < MOST_PIXELS


# where bytes come from


def test_spellings_of_data_urls():
    data = png(5, 7)
    plain = base64.b64encode(data).decode()
    spelled = {
        "usual": f"data:image/png;base64,{plain}",
        "type says nothing": f"data:text/html;base64,{plain}",
        "no type": f"data:;base64,{plain}",
        "parameters": f"data:image/png;charset=utf-8;name=a.png;base64,{plain}",
        "capitals": f"DATA:image/png;BASE64,{plain}",
        "no padding": f"data:image/png;base64,{plain.rstrip('=')}",
        "lines": f" data:image/png;base64,{plain[:30]}\r\n {plain[30:]}\n",
        "url-safe": f"data:image/png;base64,{base64.urlsafe_b64encode(data).decode()}",
        "escaped": f"data:image/png;base64,{plain.replace('+', '%2B').replace('/', '%2F').replace('=', '%3D')}",
        "escaped bytes": "data:image/png," + "".join(f"%{byte:02x}" for byte in data),
    }
    assert {name: of_url(url) == data for name, url in spelled.items()} == dict.fromkeys(spelled, True)
    assert of_base64(plain) == data


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("https://example.com/a.png", "https URLs are not fetched"),
        ("http://169.254.169.254/latest/meta-data", "http URLs are not fetched"),
        ("file:///etc/passwd", "file URLs are not fetched"),
        ("/etc/passwd", "not fetched"),
        ("", "not fetched"),
        ("data:image/png;base64", "no comma"),
        ("data:image/png;base64,!!!!", "not valid base64"),
        ("data:image/png;base64,abcde", "not valid base64"),
        ("data:image/png;base64,ü", "not valid base64"),
    ],
)
def test_other_urls_are_refused(url, said):
    with pytest.raises(RequestRefused, match=said):
        of_url(url)
