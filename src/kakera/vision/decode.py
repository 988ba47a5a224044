"""From the bytes of an image file to its pixels as the model sees them, by Pillow.

Decoders are what strangers attack: a list of formats, the header's size before anything is decoded, and whatever a
decoder raises is an error in words. First frame, EXIF's orientation, transparency over white, RGB, then one bicubic
resize: bit for bit what transformers' PIL processor makes of an image that stands upright.
"""

from __future__ import annotations

import contextlib
import io
import struct
from typing import TYPE_CHECKING

from kakera.arch.preprocessor import Pixels
from kakera.errors import RequestRefused, UsageError
from kakera.vision.sizes import fitted

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MOST_BYTES = 20_000_000
MISSING = "images need Pillow: pip install 'kakera[vision]', or start with --vision off"


def require_pillow() -> None:
    """Raises UsageError if it is not installed."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise UsageError(f"{MISSING} ({error})") from None


def resized_size(data: bytes, pixels: Pixels) -> tuple[int, int]:
    """Height and width of what `decoded` gives, but for a turn by 90 degrees: from the header alone, nothing decoded.

    Raises RequestRefused as `decoded` does, of what the header tells.
    """
    image = _opened(data)
    return fitted(image.height, image.width, pixels)


def decoded(data: bytes, pixels: Pixels) -> Image:
    """In RGB, resized. Raises RequestRefused: too many bytes or pixels, no image of a known format, or one that is
    damaged."""
    from PIL.Image import Resampling

    image = _opened(data)
    fitted(image.height, image.width, pixels)  # before anything is decoded
    try:
        image.load()
        image = _rgb(_upright(image))
    except Exception as error:  # whatever a decoder raises
        raise _damaged(error) from None
    height, width = fitted(image.height, image.width, pixels)
    return image.resize((width, height), Resampling.BICUBIC)


def _opened(data: bytes) -> Image:
    """Its header is read, and no more."""
    from PIL import Image, UnidentifiedImageError

    if len(data) > MOST_BYTES:
        raise RequestRefused(f"the image has {len(data):,} bytes; at most {MOST_BYTES:,} are read")
    if not data:
        raise RequestRefused("the image has 0 bytes")
    try:
        return Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise RequestRefused(f"the image is in no format that is read ({', '.join(FORMATS)})") from None
    except Image.DecompressionBombError:
        raise RequestRefused("the image has more pixels than are decoded (50 million): scale it down") from None
    except Exception as error:  # whatever a decoder raises
        raise _damaged(error) from None


def _upright(image: Image) -> Image:
    """Turned as EXIF says; EXIF that can not be read turns nothing."""
    from PIL import ImageOps

    with contextlib.suppress(OSError, SyntaxError, ValueError, KeyError, TypeError, AttributeError, struct.error):
        return ImageOps.exif_transpose(image)
    return image


def _rgb(image: Image) -> Image:
    from PIL import Image as Pillow

    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    white = Pillow.new("RGBA", image.size, (255, 255, 255, 255))
    return Pillow.alpha_composite(white, image.convert("RGBA")).convert("RGB")


def _damaged(error: Exception) -> RequestRefused:
    return RequestRefused(f"the image can not be decoded ({str(error)[:200] or type(error).__name__})")
