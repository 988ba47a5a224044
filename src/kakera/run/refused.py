"""A start that a card's driver refuses memory ends in words, with exit status 1, and not as a crash of the engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kakera.errors import KakeraError
from kakera.plan.plan import Plan
from kakera.target.allocator import torch_segments
from kakera.target.devices import detect_gpus
from kakera.target.refused import Room, in_words, is_refusal
from kakera.target.wsl import under_wsl


@contextmanager
def refusals_in_words(plan: Plan) -> Iterator[None]:
    """Around loading and warming up. Raises KakeraError for what torch raises where the driver gives no memory."""
    if not plan.target.has_cards:
        yield
        return
    cards, warnings = detect_gpus()
    users = tuple(line.partition(", which the plan")[0] for line in warnings)
    room = Room(plan.total("device"), plan.device_bytes[0], sum(card.used for card in cards), users)
    try:
        yield
    except RuntimeError as error:  # torch.OutOfMemoryError and AcceleratorError are such
        if not is_refusal(str(error)):
            raise
        raise KakeraError(in_words(str(error), room, torch_segments(), under_wsl())) from error
