"""Each verdict has a trace that yields it and a neighbour that does not; healthy traces yield none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from traces import CARD, MIB, healthy, on_host, samples, slower, without

from kakera.contract.events import RegionRead
from kakera.prove.trace import Link, Trace
from kakera.prove.verdict import FAILS, judge
from kakera.run.spilled import spilled

BASE = healthy()
SENSORS = ("free", "watts", "clock_mhz", "utilization", "slowed")


def kinds(trace: Trace) -> set[str]:
    return {finding.kind for finding in judge(trace).findings}


def low_power(trace: Trace, watts: float = 45, since: float = 0.7) -> Trace:
    return samples(trace, lambda s: replace(s, watts=watts), "filling", since)


def free(trace: Trace, size: int, since: float = 0.7) -> Trace:
    return samples(trace, lambda s: replace(s, free=size), since=since)


def filled(trace: Trace, **change: object) -> Trace:
    assert trace.filled
    return replace(trace, filled=replace(trace.filled, **change))


def resent(trace: Trace, **change: object) -> Trace:
    assert trace.resent
    return replace(trace, resent=replace(trace.resent, **change))


def decoding(trace: Trace, seconds: float) -> Trace:
    assert trace.decoding
    return replace(trace, decoding=replace(trace.decoding, seconds=seconds))


def linked(**change: float) -> Trace:
    return replace(BASE, links=(replace(Link(1, 10e9, 12e9, 4e-6, 12e-6, 0.1), **change),))


def clocks(trace: Trace, mhz: int) -> Trace:
    return samples(trace, lambda s: replace(s, clock_mhz=mhz), "filling")


def hot(share: int) -> Trace:
    found = tuple(replace(s, slowed=i % share == 0) for i, s in enumerate(BASE.samples))
    return replace(BASE, samples=found)


# what happens -> the verdicts that follow, all of them
TABLE: list[tuple[str, Callable[[], Trace], set[str]]] = [
    ("healthy", lambda: BASE, set()),
    # spill, by sweeps
    ("a piece of 64 MiB on the host", lambda: on_host(BASE, "weights", 1, (1, 2)), {"spill"}),
    ("and by an idle, fast bus", lambda: on_host(BASE, "KV pages", 1, (2,), 50e9), {"spill"}),
    (
        "the first touch alone brings it back, in two sweeps",
        lambda: on_host(BASE, "weights", 1, (1, 2), reads=1),
        {"spill"},
    ),
    ("the first touch alone, once", lambda: on_host(BASE, "weights", 9, (1,), reads=1), set()),
    ("slower by the half", lambda: on_host(BASE, "weights", 120, (1, 2), 300e9), set()),
    ("on the host from the start", lambda: on_host(BASE, "weights", 40, (0, 1, 2)), {"spill"}),
    ("most of the card, from the start", lambda: on_host(BASE, "weights", 120, (0, 1, 2)), {"spill"}),
    ("no sensor says anything", lambda: without(on_host(BASE, "weights", 1, (1, 2)), *SENSORS), {"spill"}),
    ("slowed by heat too", lambda: on_host(hot(2), "weights", 1, (1, 2)), {"spill", "throttled"}),
    # spill, by steps
    ("slow chunks at low power", lambda: low_power(slower(BASE, 2.0)), {"spill"}),
    ("slow chunks at full power", lambda: slower(BASE, 2.0), {"slow"}),
    ("slow chunks, power at 60 %", lambda: low_power(slower(BASE, 2.0), 140), {"slow"}),
    ("low power at the usual speed", lambda: low_power(BASE), set()),
    ("chunks at 1.3 at low power", lambda: low_power(slower(BASE, 1.3)), set()),
    ("two slow chunks in a row", lambda: low_power(slower(BASE, 2.0, 0.7, 2), since=0.69), set()),
    ("low power, utilisation not told", lambda: without(low_power(slower(BASE, 2.0)), "utilization"), {"spill"}),
    (
        "low power of a card that idles",
        lambda: samples(low_power(slower(BASE, 2.0)), lambda s: replace(s, utilization=30), "filling", 0.7),
        {"slow"},
    ),
    ("power not told", lambda: without(low_power(slower(BASE, 2.0)), "watts"), {"slow"}),
    ("no sensor, no sweep", lambda: replace(without(slower(BASE, 2.0), *SENSORS), sweeps=()), {"slow"}),
    # a full card takes a slow chunk for its verdict, else it is tight; this one is beyond its plan as well
    ("slow chunks with nothing free", lambda: free(slower(BASE, 2.0), 60 * MIB), {"spill", "over plan", "tight"}),
    ("nothing free at the usual speed", lambda: free(BASE, 60 * MIB), {"over plan", "tight"}),
    # tight
    ("less than half the margin", lambda: free(BASE, CARD.margin // 2 - MIB), {"over plan", "tight"}),
    ("within the plan, but others took it", lambda: _others(CARD.margin // 2 - MIB), {"tight"}),
    ("half the margin", lambda: _others(CARD.margin // 2 + MIB), set()),
    ("nearly full and slower", lambda: slower(_others(CARD.margin - 50 * MIB), 1.3), {"tight"}),
    ("slower with the margin free", lambda: slower(_others(CARD.margin + MIB), 1.3), set()),
    ("free memory not told", lambda: without(free(BASE, MIB), "free"), set()),
    # over plan
    ("4 % more than planned", lambda: _taken(1.04), {"over plan"}),
    ("2 % more than planned", lambda: _taken(1.02), set()),
    # throttled
    ("slowed by heat", lambda: hot(2), {"throttled"}),
    ("slowed for a moment", lambda: hot(40), set()),
    ("low clocks", lambda: clocks(BASE, 1900), {"throttled"}),
    ("clocks a little lower", lambda: clocks(BASE, 2200), set()),
    ("low clocks are not memory", lambda: low_power(slower(clocks(BASE, 1300), 2.0)), {"throttled"}),
    ("clocks not told", lambda: without(clocks(BASE, 1300), "clock_mhz"), set()),
    # link
    ("a calm link", lambda: linked(), set()),
    ("a slow link", lambda: linked(rate=7e9), {"link"}),
    ("a link with a long tail", lambda: linked(p99=21e-6), {"link"}),
    ("a card that waits", lambda: linked(waiting=0.31), {"link"}),
    # slow
    ("decode that is slow at the end", lambda: decoding(BASE, 0.025), {"slow"}),
    ("decode that reads its context", lambda: decoding(BASE, 0.021), set()),
    ("prefill under 1,000 tokens/s at 100K", lambda: replace(BASE, chunks=_scaled(2.0), calm_chunks=()), {"slow"}),
    (
        "of a context that ends before",
        lambda: replace(healthy(context=90_000), chunks=_scaled(2.0)[:180], calm_chunks=()),
        set(),
    ),
    ("a slow second turn", lambda: resent(BASE, first_token=20.0), {"slow"}),
    ("a second turn within 5 %", lambda: resent(BASE, first_token=7.0), set()),
    ("disturbed from the start", lambda: low_power(replace(BASE, chunks=_scaled(2.0)), since=1e-9), {"spill"}),
    # wrong
    ("a step fails", lambda: replace(BASE, failure="the engine could not compute this step"), {"wrong"}),
    ("tokens are missing", lambda: filled(BASE, answered=255), {"wrong"}),
    ("no answer", lambda: replace(BASE, filled=None), {"wrong"}),
    ("not sent again", lambda: replace(BASE, resent=None), {"wrong"}),
    ("answers differ", lambda: resent(BASE, same=False), {"wrong"}),
    ("not cached", lambda: resent(BASE, cached_tokens=150_000), {"wrong"}),
    ("cached but for a little", lambda: resent(BASE, cached_tokens=185_000), set()),
    # a CPU
    ("no card", lambda: replace(without(BASE, *SENSORS), card=None), set()),
    ("no card, slow reads", lambda: replace(on_host(BASE, "weights", 9, (0, 1, 2)), card=None), set()),
    ("no card, slow chunks", lambda: replace(slower(BASE, 2.0), card=None), {"slow"}),
    ("no card, a wrong answer", lambda: resent(replace(BASE, card=None), same=False), {"wrong"}),
]


def _others(free_bytes: int) -> Trace:
    """Others held so much before that this is left in the middle of it, within the plan."""
    used = CARD.bytes - CARD.planned - free_bytes
    return free(replace(BASE, card=replace(CARD, used_before=used)), free_bytes, 0.5)


def _taken(share: float) -> Trace:
    """The plan is so small that the margin stays free."""
    planned = 10_000_000_000
    card = replace(CARD, planned=planned)
    return free(replace(BASE, card=card), card.bytes - card.used_before - int(planned * share), 0.0)


def _scaled(factor: float):
    return slower(BASE, factor, 0.0).chunks


@pytest.mark.parametrize(("make", "expected"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_verdicts(make: Callable[[], Trace], expected: set[str]) -> None:
    verdict = judge(make())
    assert {finding.kind for finding in verdict.findings} == expected
    assert verdict.proven == (not expected & set(FAILS))


@pytest.mark.parametrize("seed", range(50))
def test_healthy_traces_are_proven(seed: int) -> None:
    """With noise of 3 %, slow single steps and reads, whatever sensors are missing and however long the chunks."""
    missing = [name for i, name in enumerate(SENSORS) if seed >> i & 1]
    trace = without(healthy(1000 + seed, (512, 2048)[seed % 2], (190_000, 70_000)[seed % 3 == 0]), *missing)
    assert judge(trace).findings == ()


@pytest.mark.parametrize("seed", range(10))
def test_planted_spills_are_found_and_named(seed: int) -> None:
    region = ("weights", "KV pages", "recurrent states", "scratch")[seed % 4]
    trace = on_host(healthy(seed), region, 1 + seed % 3, (1 + seed % 2,), 3e9 + 5e9 * seed)
    (found,) = judge(trace).findings
    (where,) = found.spilled
    assert (found.kind, where.region, where.offset) == ("spill", region, 0)
    assert where.bytes == 64 * MIB * (1 + seed % 3) and 0.9 < where.rate / (3e9 + 5e9 * seed) < 1.1
    assert region in found.text and f"{where.bytes / 1e6:,.0f} MB" in found.text


def test_what_was_not_watched_is_said() -> None:
    def unwatched(trace: Trace) -> str:
        return "; ".join(judge(trace).unwatched)

    assert unwatched(BASE) == ""
    assert "power: the driver" in unwatched(without(BASE, "watts"))
    assert "none were timed" in unwatched(replace(BASE, sweeps=()))
    assert "too few whole chunks" in unwatched(replace(BASE, chunks=BASE.chunks[:20]))
    assert "was slowed" in unwatched(hot(2))
    assert unwatched(replace(without(BASE, *SENSORS), card=None)).startswith("a CPU")


@pytest.mark.parametrize("makers", [672e9, 4.8e12, 8e12])
def test_short_reads_far_below_a_fast_cards_bandwidth_are_no_spill_and_reads_over_a_bus_are(makers: float) -> None:
    """An H200 reads pieces at 525 GB/s of its 4,800; PCIe 5.0 gives 51."""

    def sweep(rates: list[float]) -> list[RegionRead]:
        return [RegionRead("weights", 64 * MIB * i, 64 * MIB, (64 * MIB / rate,) * 2) for i, rate in enumerate(rates)]

    assert spilled([sweep([525e9] * 20 + [300e9] * 2)], makers) == ()
    assert spilled([sweep([525e9] * 5 + [51e9] * 15)], makers)[0].bytes == 15 * 64 * MIB
