"""Waiting for the memory of a server that was killed: a plan made too early would be a smaller one, or be refused."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil

from kakera.service.instance import Holder

WAIT_SECONDS = 30.0  # the driver takes some seconds to tear a process with 10 GB of device memory down
POLL_SECONDS = 0.25
STILL_POLLS = 4  # without change, then the rest belongs to others
NOISE = 16 * 2**20  # bytes that a desktop moves all the time


def wait_for(
    left: tuple[Holder, ...],
    used: Callable[[], int],
    say: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Wait until the engines of `left` are gone and `used` (bytes of device memory) stops falling; at most 30 seconds.

    Returns False if an engine is still there, which `say` then gets to know.
    """
    engines = [holder for holder in left if _lives(holder)]
    if engines:
        say(f"waiting for the engine of a server that was killed (pid {engines[0].engine}) to give its memory back")
    waited, still, before = 0.0, 0, used()
    while waited < WAIT_SECONDS and left and (any(map(_lives, engines)) or (before and still < STILL_POLLS)):
        sleep(POLL_SECONDS)
        waited += POLL_SECONDS
        now = used()
        still = 0 if now < before - NOISE else still + 1
        before = now
    if any(map(_lives, engines)):
        say(f"warning: process {engines[0].engine} is still there after {WAIT_SECONDS:.0f} seconds and holds memory")
        return False
    return True


def _lives(holder: Holder) -> bool:
    """A zombie has given its memory back. The start time tells a process from a later one with the same id."""
    if holder.engine is None:
        return False
    try:
        process = psutil.Process(holder.engine)
        same = abs(process.create_time() - holder.engine_started) < 1  # second
        return bool(same and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
