"""Put on PYTHONPATH, this gives a process and its children a wall clock that jumps by years with every look at it."""

import random
import time

_now, _now_ns = time.time, time.time_ns
YEARS = 10 * 365 * 86_400


def _jump() -> int:
    return random.randint(-YEARS, YEARS)


time.time = lambda: _now() + _jump()
time.time_ns = lambda: _now_ns() + _jump() * 10**9
