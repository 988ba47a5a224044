"""A long conversation sent again with one more message: what the host adds to the first token, and to every step.

`resend` measures any server over HTTP. Without a URL it starts one whose model is a script, so that everything is real
but the model: HTTP, template, tokens, the engine's process, scheduler and prefix cache. `step_costs` times what the
host does between two decode steps. `python -m kakera.bench.resend` prints both; `--url` measures a server that runs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from kakera.bench.client import Client
from kakera.bench.quantiles import Times
from kakera.bench.server import ServerProcess
from kakera.bench.text import Prose
from kakera.cache.host import CacheSizes
from kakera.cache.prefix import PrefixCache
from kakera.contract.grid import PAGE
from kakera.contract.request import Request, Sampling
from kakera.contract.step import RowResult, StepPlan, StepResult
from kakera.run.process.messages import Step, decode_from_engine, encode
from kakera.schedule.limits import Limits
from kakera.schedule.scheduler import Scheduler

CONTEXT = 262_144
ANSWER_TOKENS = 16


@dataclass(frozen=True)
class Resend:
    """Seconds to the first text. `cold` saw the conversation for the first time, `again` with one more message."""

    messages: int
    prompt_tokens: int
    cached_tokens: int
    cold: float
    again: Times


@dataclass(frozen=True)
class StepCost:
    """Host seconds of one decode step: plan, commit, stats, and its message written and read."""

    batch: int
    context: int
    seconds: Times


async def resend(client: Client, prose: Prose, tokens: int, messages: int, times: int) -> Resend:
    """A conversation of `messages` messages and about `tokens` tokens, then `times` further turns."""
    sample = prose.text[: tokens * 2]  # long, because the density of the text varies
    prose.calibrate(sample, (await client.complete(sample, 1)).prompt_tokens)
    said = [{"role": ("user", "assistant")[i % 2], "content": prose.take(tokens // messages)} for i in range(messages)]
    if messages % 2 == 0:
        said.append({"role": "user", "content": "Go on."})
    trace = cold = await client.chat(said, ANSWER_TOKENS)
    seconds = []
    for turn in range(times):
        said += [{"role": "assistant", "content": trace.text}, {"role": "user", "content": f"And then? ({turn})"}]
        trace = await client.chat(said, ANSWER_TOKENS)
        seconds.append(trace.ttft)
    return Resend(len(said), trace.prompt_tokens, trace.cached_tokens, cold.ttft, Times.of(seconds))


@contextlib.contextmanager
def scripted_server(context: int = CONTEXT) -> Iterator[ServerProcess]:
    """A server of the real parts but the model, which answers the same to everything."""
    with tempfile.TemporaryDirectory(prefix="kakera-bench-") as directory:
        script = Path(directory) / "answer.json"
        script.write_text(json.dumps({"context": context, "streams": [{"text": "It goes on like this. " * 8}]}))
        with ServerProcess(f"scripted:{script}") as server:
            yield server


def step_cost(context: int, batch: int, steps: int) -> StepCost:
    """Decode steps of `batch` requests with at least `context` tokens each, whose model takes no time."""
    pages = batch * (context // PAGE + steps + 2)
    limits = Limits(context + PAGE * steps, pages, batch, 8192)
    sizes = CacheSizes(pages, 4096, checkpoint_bytes=1, sink_bytes=1, page_bytes=1, windowed=True)
    scheduler = Scheduler(limits, PrefixCache(sizes))
    sampling = Sampling(max_tokens=limits.context, seed=0, loop_guard=True)
    for i in range(batch):
        prompt = tuple((i + 7 * position) % 50_000 for position in range(context))
        scheduler.submit(Request(f"bench-{i}", prompt, sampling))
    plan = scheduler.plan_step()
    while plan is not None and len(plan.decode) < batch:
        scheduler.commit(plan, _results(plan))
        plan = scheduler.plan_step()
    assert plan is not None
    scheduler.commit(plan, _results(plan))
    seconds = []
    for _ in range(steps):
        began = time.perf_counter()
        plan = scheduler.plan_step()
        assert plan is not None
        planned = time.perf_counter()
        results = _results(plan)
        executed = time.perf_counter()
        events = scheduler.commit(plan, results)
        decode_from_engine(encode(Step.of(events, scheduler.stats())))
        seconds.append(time.perf_counter() - executed + planned - began)
    return StepCost(batch, context, Times.of(seconds))


def _results(plan: StepPlan) -> StepResult:
    rows = tuple(RowResult(row.request_id, (plan.step % 50_000,) if row.sampled else ()) for row in plan.rows)
    return StepResult(plan.step, rows, 0.008)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m kakera.bench.resend", description=__doc__)
    parser.add_argument("--url", help="measure this server; without it one is started, whose model is a script")
    parser.add_argument("--api-key")
    parser.add_argument("--tokens", type=int, default=192_000)
    parser.add_argument("--messages", type=int, default=96)
    parser.add_argument("--times", type=int, default=10)
    given = parser.parse_args(arguments)

    async def measure(url: str) -> Resend:
        async with Client(url, given.api_key) as client:
            return await resend(client, Prose(), given.tokens, given.messages, given.times)

    with contextlib.ExitStack() as stack:
        url = given.url or stack.enter_context(scripted_server()).url
        found = asyncio.run(measure(url))
    gc.collect()
    costs = [step_cost(context, batch, 300) for batch in (1, 8) for context in (16_384, given.tokens)]
    print(json.dumps({"resend": asdict(found), "steps": [asdict(cost) for cost in costs]}, indent=2))


if __name__ == "__main__":
    main()
