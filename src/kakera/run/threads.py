"""How many threads a CPU engine computes with: measured at its start, by steps of the model that it serves.

Each small product of a step ends with its threads waiting for each other, so a thread that gets no core holds up all.
What is best depends on the model and on who else computes: for the bundled model one thread is best on a busy laptop.
It is chosen once: the last bits of a product depend on it, and a hit is to have those of a cold run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from statistics import median

from msgspec.structs import replace

from kakera.contract.grid import PAGE
from kakera.contract.step import ResetSlot, Segment, StepPlan
from kakera.run.interface import Runner
from kakera.target.threads import given_threads

USERS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # whoever has set one has chosen
_CLEARLY = 1.5  # fewer threads that take so many times longer: still fewer are not tried
_ALIKE = 1.05  # so near to the fastest the fewest threads are taken
_LONG = 0.5  # seconds: a step that takes longer is measured once
_ANSWER = 4  # tokens of a page, one by one behind the others


def settle_threads(runner: Runner, wish: int | None) -> str:
    """Set torch's threads before the engine's first step, and say what they are. `wish` None: as the user's environment
    says, or measured."""
    import torch

    if wish is None and any(name in os.environ for name in USERS):
        return f"computes with {_counted(torch.get_num_threads())}, as the environment says"
    given = given_threads()
    if wish is not None or given == 1:
        torch.set_num_threads(wish or given)
        return f"computes with {_counted(wish or given)}"

    def seconds(threads: int) -> float:
        torch.set_num_threads(threads)
        return _seconds(runner)

    timings = try_threads(given, seconds)
    torch.set_num_threads(chosen := fewest_of_the_fast(timings))
    measured = ", ".join(f"{threads}: {1000 * timings[threads]:.0f} ms" for threads in sorted(timings))
    return f"computes with {_counted(chosen)} of {given} (a short step took with {measured}; --threads sets it)"


def try_threads(given: int, seconds: Callable[[int], float]) -> dict[int, float]:
    """Seconds by number of threads, from all that are given downwards, until half as many are clearly slower."""
    timings: dict[int, float] = {}
    threads = given
    while True:
        timings[threads] = seconds(threads)
        if threads == 1 or timings[threads] > _CLEARLY * min(timings.values()):
            return timings
        threads = (threads + 1) // 2


def fewest_of_the_fast(timings: Mapping[int, float]) -> int:
    """The rest of the machine is for others."""
    return min(threads for threads, seconds in timings.items() if seconds <= _ALIKE * min(timings.values()))


def _seconds(runner: Runner) -> float:
    """Of a page, its last tokens one by one, in a slot that nobody uses yet."""
    once = [_run(runner)]
    if once[0] > _LONG:
        return once[0]
    return median(_run(runner) for _ in range(3))  # the first was the pool's start, too


def _run(runner: Runner) -> float:
    prompt = Segment("threads", 0, tuple(range(PAGE - _ANSWER)), 0, 0, (0,))
    answer = [replace(prompt, tokens=(0,), start=i) for i in range(PAGE - _ANSWER, PAGE)]
    steps = [StepPlan(0, (ResetSlot(0),), prefill=(prompt,)), *(StepPlan(0, decode=(row,)) for row in answer)]
    began = time.perf_counter()
    for step in steps:
        runner.execute(step)
    taken = time.perf_counter() - began
    runner.execute(StepPlan(0, (ResetSlot(0),)))
    return taken


def _counted(threads: int) -> str:
    return f"{threads} thread{'s' if threads != 1 else ''}"
