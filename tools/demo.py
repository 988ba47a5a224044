"""`make demo`: a real server, a long prompt with a hidden fact, the right answer, and a second turn that is instant.

Exit status 1 if an answer is wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kakera.bench.client import Client, Trace
from kakera.bench.server import ServerProcess
from kakera.cli import main as command_line
from kakera.cli.model import resolve_model
from kakera.plan.asked import kv_format
from kakera.plan.plan import Plan, Wishes
from kakera.plan.planner import plan_for
from kakera.plan.table import gigabytes
from kakera.text.tokenizer import Tokenizer
from tools.demo_text import FIRST, SECOND, Fact, first_message

MODEL = "mini"
ANSWER_TOKENS = 40
POLL_SECONDS = 0.5
LINES = 8
PREFILLED = re.compile(r'kakera_engine_counter\{name="prefilled_tokens"\} ([\d.e+]+)')


def main(model: str = MODEL, console: Console | None = None) -> int:
    """Run the demonstration on a model that knows the wording of its facts; returns the exit status."""
    console = console or Console(highlight=False)
    directory = resolve_model(model).path
    wishes = Wishes()
    plan = plan_for(directory, wishes)
    tokens = len(Tokenizer.load(directory).encode(first_message()))
    console.print(f"[bold]kakera demo[/]: model {model}, {plan.device_names[0]}, KV cache {plan.kv.codec}\n")
    with contextlib.ExitStack() as stack:
        with console.status("starting the server (a process of its own)"):
            began = time.perf_counter()
            server = stack.enter_context(ServerProcess(model))
        console.print(f"The server answers on {server.url}/v1 after {time.perf_counter() - began:.1f} s.\n")
        first, second = asyncio.run(_converse(server, tokens, console))
    console.print(_table(first, second))
    console.print(_sizes(plan))
    right = FIRST.right(first.text) and SECOND.right(second.text)
    console.print("\n[green]Both answers are right.[/]" if right else "\n[red]An answer is wrong.[/]")
    if right:
        kakera = f"[bold]{_command()}"
        console.print(f"Yours to talk to: {kakera} chat[/], or {kakera} serve {model}[/].")
    return 0 if right else 1


async def _converse(server: ServerProcess, tokens: int, console: Console) -> tuple[Trace, Trace]:
    """Ask about the first fact behind the long text, then about the second in the same conversation."""
    messages = [{"role": "user", "content": first_message()}]
    async with Client(server.url) as client:
        console.print(f"A book of about {tokens:,} tokens, two sentences hidden in it, and a question behind it.")
        first = await _ask(client, server, messages, FIRST, tokens, console)
        messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": SECOND.question}]
        second = await _ask(client, server, messages, SECOND, tokens, console)
    return first, second


async def _ask(
    client: Client, server: ServerProcess, messages: list[dict[str, str]], fact: Fact, tokens: int, console: Console
) -> Trace:
    """Stream one answer to the terminal; until it begins, show how far the engine is with `tokens` prompt tokens."""
    console.print(f"\n[bold]> {fact.question}[/]")
    reading = _Reading(console, tokens)
    watcher = asyncio.create_task(_watch(server, reading))

    def on_text(text: str) -> None:
        reading.stop()
        console.print(text, end="", markup=False)

    try:
        return await client.chat(messages, ANSWER_TOKENS, on_text)
    finally:
        watcher.cancel()
        reading.stop()
        console.print()


class _Reading:
    """How much of the prompt has been read: a bar on a terminal, elsewhere a line now and then."""

    def __init__(self, console: Console, total: int):
        self._console, self._total = console, total
        self._told = 0.0
        columns = (TextColumn("reading the prompt"), BarColumn(), TextColumn("{task.completed:,.0f} tokens"))
        self._bar = Progress(*columns, TimeElapsedColumn(), console=console, transient=True)
        self._task = self._bar.add_task("", total=total)
        self._active = True
        if console.is_terminal:
            self._bar.start()

    def show(self, done: float) -> None:
        self._bar.update(self._task, completed=done)
        if not self._console.is_terminal and self._active and done - self._told >= self._total / LINES:
            self._told = done
            self._console.print(f"reading the prompt: {done:,.0f} of {self._total:,} tokens")

    def stop(self) -> None:
        if self._active and self._console.is_terminal:
            self._bar.stop()
        self._active = False


async def _watch(server: ServerProcess, reading: _Reading) -> None:
    """Follow the engine's own count of prompt tokens."""
    before = await asyncio.to_thread(_prefilled, server)
    while True:
        await asyncio.sleep(POLL_SECONDS)
        reading.show(await asyncio.to_thread(_prefilled, server) - before)


def _prefilled(server: ServerProcess) -> float:
    match = PREFILLED.search(server.get("/metrics"))
    return float(match[1]) if match else 0.0


def _table(first: Trace, second: Trace) -> Table:
    view = Table(title="what was measured", show_header=True)
    for name in ("", "first turn (cold)", "second turn"):
        view.add_column(name, justify="right" if name else "left")
    view.add_row("prompt tokens", f"{first.prompt_tokens:,}", f"{second.prompt_tokens:,}")
    view.add_row("of these cached", f"{first.cached_tokens:,}", f"{second.cached_tokens:,}")
    view.add_row("time to first token", f"{first.ttft:.2f} s", f"{second.ttft:.2f} s")
    view.add_row("prompt tokens a second", f"{first.prompt_tokens / first.ttft:,.0f}", "")
    view.add_row("answer tokens a second", _speed(first), _speed(second))
    return view


def _sizes(plan: Plan) -> str:
    dense = kv_format(plan.spec, Wishes(kv="bf16")).token_bytes(plan.spec)
    return (
        f"KV cache: {plan.kv.token_bytes(plan.spec):,} bytes a token in {plan.kv.codec}, {dense:,} would be bf16's.\n"
        f"Planned: {gigabytes(plan.total('device'))} and {gigabytes(plan.total('host'))} of prefix cache, for "
        f"{plan.slots} requests at once of up to {plan.context:,} tokens each."
    )


def _command() -> str:
    """How `kakera` is called from here: where a virtual environment is not active, by its path."""
    name = "kakera"
    beside = Path(sys.executable).with_name(name)
    if shutil.which(name) is not None or not beside.exists():
        return name
    return str(beside.relative_to(Path.cwd())) if beside.is_relative_to(Path.cwd()) else str(beside)


def _speed(trace: Trace) -> str:
    return f"{trace.tokens_per_second:,.0f}" if len(trace.arrivals) > 1 else "–"


if __name__ == "__main__":
    command_line(lambda: sys.exit(main()))
