"""Lend the card: how soon it is free, what stays on it, and how soon a long conversation goes on.

`python -m tools.lend MODEL` in the root of the repository, with the memory options of `kakera serve`; `--spec` takes
random weights of a known shape. It starts a server, fills one conversation, has the server sleep at each level and asks
on, which wakes it. Exit status 1 if a bar is missed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from kakera.bench.client import Client
from kakera.bench.figure import Figure, table
from kakera.bench.server import ServerProcess, flags
from kakera.bench.text import Prose
from kakera.cli import main
from kakera.cli.bench_common import SpecOption, model_of, show, waiting
from kakera.cli.options import JsonOption, ModelArgument, with_memory_options
from kakera.errors import KakeraError
from kakera.plan.plan import Wishes
from kakera.target.devices import device_bytes_used

ANSWER_TOKENS = 16
SAMPLE_CHARS = 2000
# Of level 1, on an H200 with a 27B at 190,000 tokens; of level 2 nothing is promised but that it goes on.
MOST_SLEEP_SECONDS, MOST_LEFT_BYTES, MOST_FIRST_TOKEN_SECONDS, LEAST_CACHED = 2.0, 0.9e9, 3.0, 0.95

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Nap:
    """Seconds until POST /sleep was answered, from a request that wakes the server to its first text, and until POST
    /wake_up was answered; bytes of the card that were not in use before the server came, and of the host."""

    level: int
    sleep_seconds: float
    left_bytes: int
    host_bytes: int
    first_token_seconds: float
    wake_seconds: float
    prompt_tokens: int
    cached_tokens: int
    same_text: bool

    def figures(self) -> list[Figure]:
        name, cached = f"level {self.level}: ", self.cached_tokens / max(1, self.prompt_tokens)
        text = "the same text" if self.same_text else "ANOTHER TEXT"
        tokens = f"{self.cached_tokens} of {self.prompt_tokens} tokens, {text}"
        kept = [Figure(f"{name}cached share", cached, ">=", LEAST_CACHED, ".3f", note=tokens)]
        if self.level > 1:
            return kept
        host = f"{self.host_bytes / 1e9:.2f} GB of the host"
        woken = f"{self.wake_seconds:.2f} s of it for waking alone"
        return [
            Figure(f"{name}asleep after", self.sleep_seconds, "<=", MOST_SLEEP_SECONDS, unit=" s", note=host),
            Figure(f"{name}left on the card", self.left_bytes / 1e9, "<=", MOST_LEFT_BYTES / 1e9, unit=" GB"),
            Figure(
                f"{name}first token", self.first_token_seconds, "<=", MOST_FIRST_TOKEN_SECONDS, unit=" s", note=woken
            ),
            *kept,
        ]


async def measure(url: str, others: int, tokens: int | None, tell: Callable[[str], None]) -> tuple[float, list[Nap]]:
    """Seconds to the first text of a second turn without a sleep, and the naps. `others`: bytes of the card in use
    before the server came."""
    async with Client(url) as client:
        prose = Prose()
        sample = prose.text[:SAMPLE_CHARS]
        prose.calibrate(sample, (await client.complete(sample, 1)).prompt_tokens)
        most = (await client.status())["context"] - 4 * ANSWER_TOKENS
        said = await _fitting(client, prose.take(min(tokens or most, most)), most)
        tell("filling a conversation")
        turn = said + (await client.complete(said, ANSWER_TOKENS)).text
        await client.complete(turn, ANSWER_TOKENS)
        again = await client.complete(turn, ANSWER_TOKENS)
        naps = []
        for level in (1, 2):
            tell(f"asleep at level {level}")
            slept, answer = await _told(client, f"/sleep?level={level}&wake_on_request=true")
            left = device_bytes_used() - others
            woken = await client.complete(turn, ANSWER_TOKENS)
            await _told(client, f"/sleep?level={level}")
            wake, _ = await _told(client, "/wake_up")
            naps.append(
                Nap(
                    level,
                    slept,
                    left,
                    answer["host_bytes"],
                    woken.ttft,
                    wake,
                    woken.prompt_tokens,
                    woken.cached_tokens,
                    woken.text == again.text,
                )
            )
    return again.ttft, naps


async def _fitting(client: Client, text: str, tokens: int) -> str:
    """So much of the text that it has no more tokens: its density varies."""
    while True:
        status, body = await client.send("/tokenize", {"prompt": text})
        if status != 200:
            raise KakeraError(f"/tokenize: HTTP {status}: {body[:300]}")
        if (count := json.loads(body)["count"]) <= tokens:
            return text
        text = text[: int(0.99 * len(text) * tokens / count)]


async def _told(client: Client, path: str) -> tuple[float, dict[str, Any]]:
    """Seconds until the answer, and what it says."""
    began = time.perf_counter()
    status, body = await client.send(path, {})
    seconds = time.perf_counter() - began
    if status != 200:
        raise KakeraError(f"{path}: HTTP {status}: {body[:300]}")
    return seconds, json.loads(body)


@app.command()
@with_memory_options
def lend(
    model: ModelArgument = "mini",
    spec: SpecOption = None,
    tokens: Annotated[int | None, typer.Option("--tokens", help="Of the conversation. Default: the context.")] = None,
    as_json: JsonOption = False,
    *,
    wishes: Wishes,
) -> None:
    """Sleep and wake under a stop watch. Exit status 1 if a bar is missed."""
    subject, others = model_of(model, spec), device_bytes_used()
    with contextlib.ExitStack() as stack:
        with waiting("starting the server"):
            process = stack.enter_context(ServerProcess(subject, flags(wishes)))
        with waiting("measuring") as tell:
            awake, naps = asyncio.run(measure(process.url, others, tokens, tell))
    figures = [figure for nap in naps for figure in nap.figures()]
    lines = [f"first token of the same turn without a sleep: {awake:.2f} s"]
    lines += [
        f"level {nap.level}: asleep after {nap.sleep_seconds:.2f} s, awake after {nap.wake_seconds:.2f} s, first token "
        f"{nap.first_token_seconds:.2f} s after the request"
        for nap in naps
    ]
    result = {"subject": subject, "awake_ttft_seconds": awake, "naps": [asdict(nap) for nap in naps]}
    result["figures"] = [figure.json() for figure in figures]
    show(result, as_json, [table(figures, subject), *lines])
    if not all(figure.ok for figure in figures):
        raise typer.Exit(1)


if __name__ == "__main__":
    main(app)
