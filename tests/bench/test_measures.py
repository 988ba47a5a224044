import math

import pytest

from kakera.bench.client import Trace
from kakera.bench.figure import Figure
from kakera.bench.load import _joint_speed
from kakera.bench.plot import Line, check, draw
from kakera.bench.quantiles import Times, milliseconds
from kakera.bench.text import Prose
from kakera.errors import UsageError


def test_quantiles_are_measured_times():
    times = Times.of(n / 1000 for n in range(1, 101))
    assert (times.p50, times.p95, times.max) == (0.050, 0.095, 0.100)
    assert Times.of([3.0]) == Times(3.0, 3.0, 3.0)
    assert math.isnan(Times.of([]).p95)
    assert Times.of([]).text() == "– / – / –"
    assert milliseconds(0.0123) == "12.3" and milliseconds(1.5) == "1,500"


def trace(*arrivals, sent=0.0, tokens=None):
    return Trace(sent, arrivals, "", 10, 0, tokens or len(arrivals))


def test_a_trace_tells_first_token_gaps_and_decode_speed():
    seen = trace(1.0, 1.5, 2.5, sent=0.25)
    assert seen.ttft == 0.75
    assert seen.gaps == [0.5, 1.0]
    assert seen.tokens_per_second == pytest.approx(2 / 1.5)


def test_joint_speed_counts_only_while_all_streams_run():
    first, second = trace(1.0, 2.0, 3.0, 4.0), trace(2.0, 3.0, 4.0, 5.0)
    assert _joint_speed([first, second]) == pytest.approx(4 / 2)  # 3.0 and 4.0 of each, from 2.0 to 4.0
    assert _joint_speed([trace(1.0, 2.0), trace(3.0, 4.0)]) == 0.0


def test_a_figure_passes_on_its_bar_and_never_on_nan():
    assert Figure("a", 0.05, "<=", 0.05).ok
    assert not Figure("a", 0.051, "<=", 0.05).ok
    assert Figure("b", 2.5, ">=", 2.5).ok
    assert not Figure("b", math.nan, ">=", 2.5).ok


def test_prose_has_the_wanted_length_and_never_the_same_beginning_twice():
    prose = Prose()
    texts = [prose.take(100) for _ in range(50)]
    assert {len(text) for text in texts} == {400}
    assert len({text[:12] for text in texts}) == 50
    prose.calibrate("x" * 300, 100)
    assert len(prose.take(100_000)) == 300_000


def test_plots_are_written_and_a_wrong_ending_is_refused_before_measuring(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "speed.svg"
    draw(path, "Decode", "batch", "tokens/s", [Line("4,096 tokens", [1, 2, 4], [30, 50, 80])])
    assert "<svg" in path.read_text()
    with pytest.raises(UsageError, match="must end in"):
        check(tmp_path / "speed.gif")
