"""From a trace to the verdict: whether the plan held, at speed, and what could not be watched. Pure; no clock, no card.

The rules are first settings, to be tuned on reports of real cards. Only `spill`, `over plan` and `wrong` fail a plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Literal

from kakera.contract.grid import PAGE
from kakera.prove.pace import Pace
from kakera.prove.trace import Card, Chunk, Sample, Trace
from kakera.run.spilled import Spilled, spilled

Kind = Literal["wrong", "spill", "over plan", "tight", "throttled", "link", "slow"]
FAILS: tuple[Kind, ...] = ("wrong", "spill", "over plan")

MUCH_SLOWER, SLOWER, IN_A_ROW = 1.5, 1.15, 3  # chunks against their model; touching the line cost a card 29 %
STARVED_POWER, BUSY_PERCENT = 0.5, 90  # of calibration's prefill power while kernels run: they wait for the bus
NOTHING_FREE = 64 * 2**20
NEAR_PLAN = 0.03
SLOW_CLOCK, SLOWED_SAMPLES = 0.8, 0.05  # of calibration's clock; share of samples
LINK_RATE, LINK_TAIL, LINK_WAITING = 0.6, 5.0, 0.3
SLOW_DECODE = 1.25
LEAST_PREFILL, AT_TOKENS = 1000.0, 100_000
CACHED_SHARE = 0.95  # and a page less, on whose border the last checkpoint lies
RESENT_SHARE, RESENT_SECONDS = (
    0.05,
    1.0,
)  # first token of the second turn, beside computing what was not cached: of the cold one's seconds, or these


@dataclass(frozen=True)
class Finding:
    """`spilled`: the regions, where a sweep has found them."""

    kind: Kind
    text: str
    spilled: tuple[Spilled, ...] = ()

    @property
    def fails(self) -> bool:
        return self.kind in FAILS


@dataclass(frozen=True)
class Verdict:
    """`unwatched`: what could not be judged, and why, in words."""

    findings: tuple[Finding, ...]
    unwatched: tuple[str, ...]

    @property
    def proven(self) -> bool:
        return not any(finding.fails for finding in self.findings)

    def has(self, kind: Kind) -> bool:
        return any(finding.kind == kind for finding in self.findings)


def judge(trace: Trace) -> Verdict:
    throttled = _throttled(trace.samples)
    # a card that is slowed says nothing about its memory by being slow
    pace = None if throttled else Pace.of(trace.calm_chunks, trace.chunks)
    spill = _spill(trace, pace)
    found = [_wrong(trace), spill, *throttled, *_links(trace)]
    if trace.card is not None:
        found += [_over_plan(trace.samples, trace.card), _tight(trace, trace.card, pace)]
    if spill is None:  # else that is why
        found += _slow(trace, pace, bool(throttled))
    return Verdict(tuple(finding for finding in found if finding), _unwatched(trace, pace, bool(throttled)))


def _wrong(trace: Trace) -> Finding | None:
    filled, resent = trace.filled, trace.resent
    text = ""
    if trace.failure is not None:
        text = trace.failure
    elif filled is None:
        text = "the context was not filled"
    elif filled.answered < filled.wanted:
        text = f"{filled.answered} of {filled.wanted} tokens came"
    elif resent is None:
        text = "the conversation was not sent again"
    elif resent.cached_tokens < CACHED_SHARE * filled.prompt_tokens - PAGE:
        text = f"sent again, {resent.cached_tokens:,} of {filled.prompt_tokens:,} tokens came from the cache"
    elif not resent.same:
        text = "the same request got two different answers"
    return Finding("wrong", text) if text else None


def _spill(trace: Trace, pace: Pace | None) -> Finding | None:
    if trace.card is None:
        return None
    if regions := spilled(trace.sweeps, trace.card.bandwidth):
        return Finding("spill", "; ".join(region.text for region in regions), regions)
    for run in pace.runs(MUCH_SLOWER, IN_A_ROW) if pace else ():
        if why := _starved(trace.samples, run):
            ratio = max(pace.ratio(chunk) for chunk in run) if pace else 0.0
            where = f"from {run[0].position:,} tokens on chunks take up to {ratio:.1f} times what they should"
            return Finding("spill", f"{where}, and {why}: a part of the card's memory seems to lie on the host")
    return None


def _starved(samples: tuple[Sample, ...], run: list[Chunk]) -> str | None:
    """What else speaks for memory on the host while these chunks ran."""
    during = [s for s in samples if run[0].at - run[0].seconds <= s.seconds <= run[-1].at and s.phase == "filling"]
    if any(sample.free is not None and sample.free < NOTHING_FREE for sample in during):
        return "the card has no free memory"
    calm = [s.watts for s in samples if s.phase == "calibration" and s.watts is not None and _busy(s)]
    now = [s.watts for s in during if s.watts is not None and _busy(s)]
    if calm and now and median(now) < STARVED_POWER * median(calm):
        return f"the card takes {median(now):.0f} W where it took {median(calm):.0f}"
    return None


def _busy(sample: Sample) -> bool:
    """Kernels run: says the driver, or say the steps, which follow each other without a gap."""
    return sample.utilization is None or sample.utilization >= BUSY_PERCENT


def _over_plan(samples: tuple[Sample, ...], card: Card) -> Finding | None:
    peak = peak_bytes(samples, card)
    if peak is None or peak <= card.planned * (1 + NEAR_PLAN):
        return None
    text = f"{peak / 1e9:.2f} GB were taken where {card.planned / 1e9:.2f} GB were planned, by us or by another program"
    return Finding("over plan", text)


def least_free(samples: tuple[Sample, ...]) -> int | None:
    return min((sample.free for sample in samples if sample.free is not None), default=None)


def peak_bytes(samples: tuple[Sample, ...], card: Card) -> int | None:
    """The most that was taken since before we came."""
    free = least_free(samples)
    return None if free is None else card.bytes - free - card.used_before


def _tight(trace: Trace, card: Card, pace: Pace | None) -> Finding | None:
    free = least_free(trace.samples)
    if free is None:
        return None
    if free < card.margin // 2:
        text = f"only {free / 1e6:.0f} MB of the card stayed free, {card.margin / 1e6:.0f} MB were to"
        return Finding("tight", text)
    for run in pace.runs(SLOWER, IN_A_ROW) if pace and free < card.margin else ():
        during = [s for s in trace.samples if run[0].at - run[0].seconds <= s.seconds <= run[-1].at]
        if any(sample.free is not None and sample.free < card.margin for sample in during):
            return Finding("tight", f"from {run[0].position:,} tokens on the card is nearly full, and slower for it")
    return None


def _throttled(samples: tuple[Sample, ...]) -> list[Finding]:
    run = [sample for sample in samples if sample.phase != "calibration"]
    told = [sample.slowed for sample in run if sample.slowed is not None]
    if told and sum(told) > SLOWED_SAMPLES * len(told):
        return [Finding("throttled", f"the card was slowed by heat or its supply in {sum(told) / len(told):.0%} of it")]
    calm = _clocks(samples, "calibration")
    filling = _clocks(samples, "filling")
    if calm and filling and median(filling) < SLOW_CLOCK * median(calm):
        return [Finding("throttled", f"clocks fell from {median(calm):.0f} to {median(filling):.0f} MHz")]
    return []


def _clocks(samples: tuple[Sample, ...], phase: str) -> list[int]:
    return [s.clock_mhz for s in samples if s.phase == phase and s.clock_mhz is not None and _busy(s)]


def _links(trace: Trace) -> list[Finding]:
    found = []
    for link in trace.links:
        if link.rate < LINK_RATE * link.calm_rate:
            text = f"exchanges at {link.rate / 1e9:.1f} GB/s, {link.calm_rate / 1e9:.1f} when calm"
        elif link.p99 > LINK_TAIL * link.p50:
            text = f"one exchange in a hundred takes {link.p99 / link.p50:.0f} times the usual"
        elif link.waiting > LINK_WAITING:
            text = f"it waits for the others in {link.waiting:.0%} of its steps"
        else:
            continue
        found.append(Finding("link", f"card {link.card}: {text}"))
    return found


def _slow(trace: Trace, pace: Pace | None, throttled: bool) -> list[Finding]:
    """Warnings about speed, with no cause that is known."""
    found = []
    if pace and (runs := pace.runs(MUCH_SLOWER, IN_A_ROW)):
        run = runs[0]
        ratio = max(pace.ratio(chunk) for chunk in run)
        found.append(f"chunks from {run[0].position:,} tokens on take up to {ratio:.1f} times what they should")
    card, calm, last = trace.card, trace.calm_decoding, trace.decoding
    if card is not None and calm and last and card.bandwidth and not throttled:
        expected = calm.seconds + (last.kv_bytes - calm.kv_bytes) / card.bandwidth
        if last.seconds > SLOW_DECODE * expected:
            found.append(f"a token takes {last.seconds * 1e3:.1f} ms at the end, {expected * 1e3:.1f} were expected")
    late = [chunk.tokens / max(chunk.seconds, 1e-9) for chunk in trace.chunks if chunk.position >= AT_TOKENS]
    if card is not None and late:
        rate = median(late[:9])
        if rate < LEAST_PREFILL:
            found.append(f"{rate:,.0f} tokens/s of prefill at {AT_TOKENS:,} tokens")
    if (filled := trace.filled) and (turn := trace.resent):
        computed = (turn.prompt_tokens - turn.cached_tokens) * filled.first_token / filled.prompt_tokens
        limit = max(RESENT_SECONDS, RESENT_SHARE * filled.first_token) + computed
        if turn.first_token > limit:
            found.append(f"the second turn's first token took {turn.first_token:.1f} s")
    return [Finding("slow", text) for text in found]


def _unwatched(trace: Trace, pace: Pace | None, throttled: bool) -> tuple[str, ...]:
    found = []
    if trace.card is None:
        found.append("a CPU has no memory that could spill: only the fill, the answers and times of steps were watched")
    else:
        for name, what in (("free", "free memory"), ("watts", "power"), ("clock_mhz", "clocks")):
            if all(getattr(sample, name) is None for sample in trace.samples):
                found.append(f"{what}: the driver does not say")
        if not any(trace.sweeps):
            found.append("reads of the card's memory: none were timed")
    if throttled:
        found.append("times of steps: the card was slowed")
    elif pace is None and trace.failure is None:
        found.append("times of prefill steps: too few whole chunks to know what they should be")
    return tuple(found)
