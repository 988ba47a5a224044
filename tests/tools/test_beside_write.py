"""An answer's speed beside a write: which times count to which window."""

from __future__ import annotations

import pytest

from kakera.errors import KakeraError
from tools.beside_write import Watch, line


def watched(slow: float) -> Watch:
    """Ten tokens a second for a minute, `slow` seconds more for each of those between 30 and 40."""
    now, watch = 0.0, Watch()
    while now < 60:
        watch.arrivals.append(now)
        now += 0.1 + (slow if 30 <= now < 40 else 0.0)
    watch.written = [(at / 4, 1e6 * min(max(at / 4 - 30, 0), 10)) for at in range(4, 240)]
    return watch


def test_the_write_is_compared_with_what_was_before_and_after() -> None:
    assert watched(0.0).window() == (30.0, 40.0)
    assert line(watched(0.0)).startswith(
        "alone 10.0 tokens/s (10.0 before, 10.0 after), while 10 MB are written in 10.0 s"
    )
    assert "10.0: 100.0%; longest gap 100 ms alone, 100 ms beside" in line(watched(0.0))
    assert "5.0: 50.0%; longest gap 100 ms alone, 200 ms beside" in line(watched(0.1))


def test_without_a_write_there_is_nothing_to_say() -> None:
    watch = watched(0.0)
    watch.written = [(at, 5e6) for at, _ in watch.written]
    with pytest.raises(KakeraError, match="nothing was written"):
        line(watch)
