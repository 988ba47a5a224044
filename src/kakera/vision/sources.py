"""Where the bytes of an image come from: data URLs and base64, in the spellings that clients have. No Pillow."""

from __future__ import annotations

import base64
import binascii
import re
from urllib.parse import unquote_to_bytes

from kakera.errors import RequestRefused
from kakera.vision.fetch import Fetcher

_BLANKS = re.compile(r"\s+")


def of_url(url: str, fetcher: Fetcher | None = None) -> bytes:
    """Bytes of a data URL, whose media type says nothing: the format is seen in the bytes.

    Raises RequestRefused for any other URL, unless there is a `fetcher`: what fetches for whoever writes a prompt reads
    the network that the server stands in.
    """
    scheme, _, rest = url.strip().partition(":")
    if fetcher is not None and scheme.lower() in ("http", "https"):
        return fetcher.get(url)
    if scheme.lower() != "data":
        kind = scheme.lower() if scheme.lower() in ("http", "https", "file", "ftp") and rest else "such"
        raise RequestRefused(
            f"{kind} URLs are not fetched: send the image itself as a data URL (data:image/png;base64,...)"
            + (", or start the server with --image-urls" if kind in ("http", "https") else "")
        )
    parameters, comma, body = rest.partition(",")
    if not comma:
        raise RequestRefused("the data URL has no comma, so nothing follows its media type")
    if "base64" in [part.strip().lower() for part in parameters.split(";")[1:]]:
        return of_base64(body)
    return unquote_to_bytes(body)


def of_base64(text: str) -> bytes:
    """White space, missing padding and the URL-safe alphabet are read. Raises RequestRefused for anything else."""
    packed = _BLANKS.sub("", text)
    if "%" in packed:
        packed = unquote_to_bytes(packed).decode("latin-1")
    packed = packed.rstrip("=").replace("-", "+").replace("_", "/")
    try:
        return base64.b64decode(packed + "=" * (-len(packed) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestRefused(f"the image is not valid base64 ({error})") from None
