"""What a GPU engine does before its first request: every kernel is compiled and loaded, the largest step is run once.

So the first request is as fast as the next, and memory that a step takes beside our tensors has been taken by then.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from msgspec.structs import replace

from kakera.arch.vision import COLOURS
from kakera.cache.host import CacheSizes
from kakera.contract.grid import PAGE, pages_for
from kakera.contract.request import Sampling
from kakera.contract.step import Drop, ResetSlot, RestoreCheckpoint, SamplingInput, SavePoint, Segment, StepPlan
from kakera.errors import KakeraError
from kakera.plan.plan import Plan
from kakera.run.step.graphs import MOST_ROWS
from kakera.run.step.runner import TorchRunner

REQUEST = "warm-up"
# Tokens of short segments: all variants of products with coded weights, which 32, 16 and 8 rows have
SHORT = (PAGE, 37, 16)
SAVED = -1  # a checkpoint that no cache knows


def warm_up(runner: TorchRunner, plan: Plan, progress: Callable[[int, int], None] | None = None) -> None:
    """Run prefill steps of the shapes that serving takes, then capture the decode graphs. Nothing may run yet; slots
    and pages hold nonsense before and after. `progress` gets (steps done, steps in all). Raises KakeraError."""
    runner.kv.backend.prepare()
    if runner.images is not None:  # the largest image takes what is planned for it, and its kernels are loaded
        rows = math.isqrt(plan.image_tokens)
        columns = plan.image_tokens // rows
        tower = runner.images.tower
        tower.encode(bytes(rows * columns * tower.spec.factor**2 * COLOURS), rows, columns)
    steps = prefill_steps(plan)
    total = len(steps) + (min(plan.slots, MOST_ROWS) if runner.graphs is not None else 0)
    tell = progress or (lambda done, of: None)
    for i, step in enumerate(steps):
        failed = [row.error for row in runner.execute(step, _sampling(step)).rows if row.error]
        if failed:
            raise KakeraError(f"the first step of {step.token_count} tokens failed: {failed[0]}")
        tell(i + 1, total)
    if runner.graphs is not None:
        runner.graphs.capture(runner.model, lambda done, _: tell(len(steps) + done, total))
    runner.execute(StepPlan(0, tuple(ResetSlot(slot) for slot in range(plan.slots))))


def prefill_steps(plan: Plan) -> list[StepPlan]:
    """The longest segment at the start and behind history, shorter ones, and a save with its way back. None is longer
    than a request may be: where little room is left behind the longest, others come behind less history or none."""
    held = min(plan.pages, pages_for(plan.context))
    longest = min(plan.chunk // PAGE, held) * PAGE
    saves = (SavePoint(PAGE, SAVED),) if CacheSizes.of(plan).can_save and longest > PAGE else ()
    first = replace(_row(0, longest), saves=saves)
    back = (RestoreCheckpoint(0, SAVED, PAGE, None), Drop((SAVED,))) if saves else ()
    steps = [StepPlan(0, (ResetSlot(0),), prefill=(first,), after=back)]
    for count in (longest, longest // 2, longest // 4, *SHORT):
        start = min(longest, (held - pages_for(count)) * PAGE)
        if start or count < longest:
            steps.append(StepPlan(0, prefill=(_row(start, count),)))
    return steps


def _row(start: int, count: int) -> Segment:
    pages = tuple(range(pages_for(start + count)))
    return Segment(REQUEST, 0, tuple(i % 97 for i in range(count)), start, 0, pages, sampled=1)


def _sampling(plan: StepPlan) -> dict[str, SamplingInput]:
    (row,) = plan.rows
    return {REQUEST: SamplingInput(REQUEST, Sampling(max_tokens=1, seed=0, temperature=0.0), row.tokens, row.end)}
