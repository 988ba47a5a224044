"""kakera chat: a conversation in the terminal, streamed, with the reuse and the speed of every turn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kakera.cli.options import ModelArgument, with_memory_options
from kakera.plan.plan import Wishes

if TYPE_CHECKING:
    from rich.console import Console

    from kakera.cli.conversation import Conversation

HELP = "/new starts over, /system TEXT sets the system message, /quit ends; Ctrl-C stops an answer"


@with_memory_options
def chat(
    model: ModelArgument = "mini",
    system: Annotated[str | None, typer.Option("--system", help="System message.")] = None,
    thinking: Annotated[bool, typer.Option("--thinking/--no-thinking", help="Let the model reason first.")] = False,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Longest answer.")] = 1024,
    temperature: Annotated[
        float | None, typer.Option("--temperature", min=0.0, help="0 is greedy. Default: the model's.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Same seed, same answers.")] = 0,
    *,
    wishes: Wishes,
) -> None:
    """Talk to a model. Each answer shows how many tokens the prefix cache saved, and its speed."""
    from rich.console import Console

    from kakera.cli.conversation import Conversation, Settings
    from kakera.cli.engine import recipe_for, served_model
    from kakera.cli.model import resolve_model

    console = Console(highlight=False)
    found = resolve_model(model)
    offered = served_model(found)
    recipe = recipe_for(found, wishes, lambda line: console.print(line, style="dim", soft_wrap=True))
    with console.status("loading"):
        engine = recipe()
    settings = Settings(max_tokens, seed, thinking, temperature)
    conversation = Conversation(engine, offered, settings, console, system)
    console.print(HELP, style="dim", soft_wrap=True)
    while (line := _read_line(console)) is not None:
        if not _command(conversation, line):
            return


def _read_line(console: Console) -> str | None:
    """The next message; None at the end of the input."""
    try:
        return console.input("[bold]> [/]")
    except (EOFError, KeyboardInterrupt):
        console.print()
        return None


def _command(conversation: Conversation, line: str) -> bool:
    """Do what a line says; False ends the chat."""
    word, _, rest = line.strip().partition(" ")
    match word:
        case "":
            pass
        case "/quit" | "/exit":
            return False
        case "/new":
            conversation.restart()
        case "/system":
            conversation.restart(rest.strip() or None)
        case _ if word.startswith("/"):
            conversation.console.print(HELP, style="dim", soft_wrap=True)
        case _:
            conversation.turn(line)
    return True
