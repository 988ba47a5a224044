"""What routers ask before they choose a worker: the tokens of a request's prompt, in the form of vLLM's /render."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from typing_extensions import TypedDict  # pydantic needs this TypedDict before Python 3.12

from kakera.server.http.openapi import closed
from kakera.server.service import new_id


@closed
class Rendered(TypedDict):
    """`features` of pictures and sounds: there are none. `sampling_params` is vLLM's place for them; nothing is said
    there."""

    request_id: str
    model: str
    token_ids: list[int]
    features: None
    sampling_params: dict[str, Any]
    stream: bool


def rendered(model: str, tokens: Sequence[int], stream: bool | None) -> Rendered:
    return {
        "request_id": new_id("render"),
        "model": model,
        "token_ids": list(tokens),
        "features": None,
        "sampling_params": {},
        "stream": bool(stream),
    }
