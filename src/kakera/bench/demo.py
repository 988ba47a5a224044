"""`make demo`: a real server, a long prompt with a hidden fact, the right answer, and a second turn that is instant.

Exit status 1 if an answer is wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from kakera.bench.client import Client, Trace
from kakera.bench.demo_text import FIRST, SECOND, Fact, first_message
from kakera.bench.server import ServerProcess
from kakera.cli.model import resolve_model
from kakera.errors import KakeraError
from kakera.evaluate.session import plan_for
from kakera.plan.budget import kv_format
from kakera.plan.plan import Plan, Wishes
from kakera.plan.table import gigabytes
from kakera.text.tokenizer import Tokenizer

MODEL = "mini"
ANSWER_TOKENS = 40
POLL_SECONDS = 0.5
PREFILLED = re.compile(r'kakera_engine_counter\{name="prefilled_tokens"\} ([\d.e+]+)')


def main(console: Console | None = None) -> int:
    """Run the demonstration; returns the exit status."""
    console = console or Console(highlight=False)
    directory = resolve_model(MODEL).path
    wishes = Wishes()
    plan = plan_for(directory, wishes)
    tokens = len(Tokenizer.load(directory).encode(first_message()))
    console.print(f"[bold]kakera demo[/]: model {MODEL}, {plan.device_names[0]}, KV cache {plan.kv.codec}\n")
    with contextlib.ExitStack() as stack:
        with console.status("starting the server (a process of its own)"):
            began = time.perf_counter()
            server = stack.enter_context(ServerProcess(MODEL))
        console.print(f"The server answers on {server.url}/v1 after {time.perf_counter() - began:.1f} s.\n")
        first, second = asyncio.run(_converse(server, tokens, console))
    console.print(_table(first, second, plan))
    right = FIRST.right(first.text) and SECOND.right(second.text)
    console.print("\n[green]Both answers are right.[/]" if right else "\n[red]An answer is wrong.[/]")
    if right:
        console.print(f"Yours to talk to: [bold]kakera chat[/], or [bold]kakera serve {MODEL}[/].")
    return 0 if right else 1


async def _converse(server: ServerProcess, tokens: int, console: Console) -> tuple[Trace, Trace]:
    """Ask about the first fact behind the long text, then about the second in the same conversation."""
    messages = [{"role": "user", "content": first_message()}]
    async with Client(server.url) as client:
        console.print(f"A book of about {tokens:,} tokens, two sentences hidden in it, and a question behind it.")
        first = await _ask(client, server, messages, FIRST, tokens, console)
        messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": SECOND.question}]
        second = await _ask(client, server, messages, SECOND, 0, console)
    return first, second


async def _ask(
    client: Client, server: ServerProcess, messages: list[dict[str, str]], fact: Fact, tokens: int, console: Console
) -> Trace:
    """Stream one answer to the terminal; while `tokens` prompt tokens are read, show how far the engine is."""
    console.print(f"\n[bold]> {fact.question}[/]")
    columns = (TextColumn("  reading the prompt"), BarColumn(), TextColumn("{task.completed:,.0f} tokens"))
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
        watcher = asyncio.create_task(_watch(server, bar, bar.add_task("", total=max(1, tokens))))

        def on_text(text: str) -> None:
            if watcher.cancel():  # the first text: the prompt has been read
                bar.stop()
            console.print(text, end="", markup=False)

        try:
            trace = await client.chat(messages, ANSWER_TOKENS, on_text)
        finally:
            watcher.cancel()
    console.print()
    return trace


async def _watch(server: ServerProcess, bar: Progress, task: TaskID) -> None:
    """Follow the engine's own count of prompt tokens."""
    before = await asyncio.to_thread(_prefilled, server)
    while True:
        await asyncio.sleep(POLL_SECONDS)
        bar.update(task, completed=await asyncio.to_thread(_prefilled, server) - before)


def _prefilled(server: ServerProcess) -> float:
    match = PREFILLED.search(server.get("/metrics"))
    return float(match[1]) if match else 0.0


def _table(first: Trace, second: Trace, plan: Plan) -> Table:
    dense = kv_format(plan.spec, Wishes(kv="bf16")).token_bytes(plan.spec)
    coded = plan.kv.token_bytes(plan.spec)
    view = Table(title="what was measured", show_header=True)
    for name in ("", "first turn (cold)", "second turn"):
        view.add_column(name, justify="right" if name else "left")
    view.add_row("prompt tokens", f"{first.prompt_tokens:,}", f"{second.prompt_tokens:,}")
    view.add_row("of these cached", f"{first.cached_tokens:,}", f"{second.cached_tokens:,}")
    view.add_row("time to first token", f"{first.ttft:.2f} s", f"{second.ttft:.2f} s")
    view.add_row("prompt tokens a second", f"{first.prompt_tokens / first.ttft:,.0f}", "")
    view.add_row("answer tokens a second", _speed(first), _speed(second))
    view.add_section()
    view.add_row("KV bytes a token", f"{coded:,} in {plan.kv.codec}", f"{dense:,} in bf16")
    view.add_row("longest request", f"{plan.context:,} tokens", f"{plan.slots} requests at once")
    view.add_row("planned memory", gigabytes(plan.total("device")), f"+ {gigabytes(plan.total('host'))} prefix cache")
    return view


def _speed(trace: Trace) -> str:
    return f"{trace.tokens_per_second:,.0f}" if len(trace.arrivals) > 1 else "–"


def run(work: Callable[[], int]) -> int:
    """Errors in words and an orderly end on Ctrl-C."""
    try:
        return work()
    except KakeraError as error:
        Console(stderr=True).print(f"[bold red]demo:[/] {error}")
        return error.exit_status
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(run(main))
