"""Made-up traces of a 12 GB card: healthy ones with noise, and changes that make them anything else."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from kakera.contract.events import RegionRead
from kakera.prove.trace import Card, Chunk, Decoding, Filled, Resent, Sample, Trace

MIB = 2**20
CARD = Card("NVIDIA GeForce RTX 5070", "580.88", 12227 * MIB, 489 * MIB, 11_900_000_000, 300_000_000, 672e9)
CHUNK, CONTEXT = 512, 190_000
REGIONS = {"weights": 120, "KV pages": 40, "recurrent states": 3, "scratch": 8}  # pieces of 64 MiB


def healthy(seed: int = 0, chunk: int = CHUNK, context: int = CONTEXT) -> Trace:
    dice = random.Random(seed)

    def noisy(seconds: float, hiccup: float = 0.01) -> float:
        return seconds * dice.gauss(1, 0.03) * (dice.uniform(1.5, 6) if dice.random() < hiccup else 1)

    def at(position: int) -> float:
        return chunk * (1 / 1400 + position / 2e5 * 1 / 2500)

    calm = tuple(Chunk(0, p, chunk, noisy(at(p))) for p in range(0, 8192, chunk))
    chunks, now = [], 20.0
    for position in range(0, context - chunk - 256, chunk):
        seconds = noisy(at(position))
        now += seconds
        chunks.append(Chunk(now, position, chunk, seconds))

    def sample(seconds: float, phase: str, watts: float) -> Sample:
        clock = round(dice.gauss(2600, 40))
        free = CARD.bytes - CARD.planned - CARD.used_before + dice.randrange(30 * MIB)
        return Sample(seconds, phase, free, dice.gauss(watts, 12), clock, dice.randint(96, 100), dice.random() < 0.01)

    samples = [sample(t / 2, "calibration", 225) for t in range(40)]
    samples += [sample(20 + t / 2, "filling", 225) for t in range(int(2 * (now - 20)))]
    samples += [sample(now + t / 2, "answering", 180) for t in range(20)]

    def sweep() -> tuple[RegionRead, ...]:
        pieces = [(region, i) for region, count in REGIONS.items() for i in range(count)]
        return tuple(
            RegionRead(region, 64 * MIB * i, 64 * MIB, tuple(noisy(64 * MIB / 600e9) + 1e-5 for _ in range(2)))
            for region, i in pieces
        )

    return Trace(
        CARD,
        tuple(samples),
        calm,
        tuple(chunks),
        Decoding(noisy(0.016, 0), 8_700_000),
        Decoding(noisy(0.019, 0), 1_620_000_000),
        (sweep(), sweep(), sweep()),
        (),
        Filled(context - 256, 256, 256, now - 20),
        Resent(context - 206, context - 300, 0.9, True),
    )


def samples(trace: Trace, change: Callable[[Sample], Sample], phase: str = "", since: float = 0.0) -> Trace:
    """With another reading wherever it is this phase (or any) and late enough, as a share of the fill."""
    begin = trace.chunks[0].at + since * (trace.chunks[-1].at - trace.chunks[0].at)
    wanted = [s.phase == (phase or s.phase) and (s.seconds >= begin or not since) for s in trace.samples]
    changed = tuple(change(s) if yes else s for s, yes in zip(trace.samples, wanted, strict=True))
    return replace(trace, samples=changed)


def without(trace: Trace, *names: str) -> Trace:
    """What sensors do not say."""
    return samples(trace, lambda sample: replace(sample, **dict.fromkeys(names)))


def slower(trace: Trace, factor: float, since: float = 0.7, count: int | None = None) -> Trace:
    """Chunks behind a share of the fill take so many times as long; the time line grows with them."""
    first = int(since * len(trace.chunks))
    last = len(trace.chunks) if count is None else first + count
    now, chunks = trace.chunks[0].at - trace.chunks[0].seconds, []
    for i, chunk in enumerate(trace.chunks):
        seconds = chunk.seconds * (factor if first <= i < last else 1)
        now += seconds
        chunks.append(replace(chunk, at=now, seconds=seconds))
    longer = chunks[-1].at - trace.chunks[-1].at
    filling = [s for s in trace.samples if s.phase == "filling"]
    more = [replace(filling[-1], seconds=filling[-1].seconds + t / 2) for t in range(1, int(2 * longer) + 1)]
    later = [replace(s, seconds=s.seconds + longer) for s in trace.samples if s.phase in ("answering", "other")]
    kept = [s for s in trace.samples if s.phase in ("calibration", "filling")]
    return replace(trace, chunks=tuple(chunks), samples=(*kept, *more, *later))


def on_host(
    trace: Trace, region: str, pieces: int, sweeps: tuple[int, ...], rate: float = 20e9, reads: int = 2
) -> Trace:
    """The first pieces of a region are read over the bus, in these sweeps, the first reads of each."""
    made = []
    for number, sweep in enumerate(trace.sweeps):
        hit = [read.region == region and read.offset < 64 * MIB * pieces and number in sweeps for read in sweep]
        made.append(
            tuple(
                replace(r, seconds=tuple(r.bytes / rate if i < reads else s for i, s in enumerate(r.seconds)))
                if yes
                else r
                for r, yes in zip(sweep, hit, strict=True)
            )
        )
    return replace(trace, sweeps=tuple(made))
