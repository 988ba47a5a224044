"""kakera chat: a conversation in the terminal, streamed, with the reuse and the speed of every turn."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kakera.cli.options import MODEL_HELP, ThreadsOption, with_memory_options
from kakera.errors import UsageError
from kakera.plan.plan import Wishes

if TYPE_CHECKING:
    from rich.console import Console

    from kakera.cli.conversation import Answerer, Conversation, Settings

HELP = """\
/new            starts over, with the same system message
/system TEXT    sets the system message and starts over; /system shows it, /system none removes it
/image FILE     shows the model a picture together with the next message
/help           shows this
/quit           ends, as Ctrl-D or Ctrl-C twice
Ctrl-C stops an answer. Pasted text of several lines is one message; Alt-Enter begins a line, Up brings older messages.
What begins with / and is no command is sent, and so is a command behind a space."""
HINT = "/help shows the commands; Ctrl-C stops an answer, Ctrl-D ends"
COMMANDS = ("/new", "/system", "/image", "/help", "/quit", "/exit")


@with_memory_options
def chat(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help=f"{MODEL_HELP} Default: mini, or with --url the server's."),
    ] = None,
    system: Annotated[str | None, typer.Option("--system", help="System message.")] = None,
    thinking: Annotated[bool, typer.Option("--thinking/--no-thinking", help="Let the model reason first.")] = False,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Longest answer.")] = 1024,
    temperature: Annotated[
        float | None, typer.Option("--temperature", min=0.0, help="0 is greedy. Default: the model's.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Same seed, same answers.")] = 0,
    url: Annotated[
        str | None,
        typer.Option("--url", metavar="URL", help="Talk to a running server, such as http://127.0.0.1:30000."),
    ] = None,
    api_key: Annotated[str | None, typer.Option("--api-key", help="Its key, with --url.")] = None,
    threads: ThreadsOption = None,
    *,
    wishes: Wishes,
) -> None:
    """Talk to a model. Each answer shows how many tokens the prefix cache saved, and its speed.

    Text that is piped in is one message, which is answered.
    """
    from rich.console import Console

    from kakera.cli.conversation import Conversation, Settings

    console = Console(highlight=False)
    settings = Settings(max_tokens, seed, thinking, temperature)
    if url is not None:
        answerer = _remote(url, api_key, model or "", wishes, settings)
    elif api_key is not None:
        raise UsageError("--api-key needs --url")
    else:
        answerer = _local(model or "mini", wishes, settings, threads, console)
    conversation = Conversation(answerer, console, system)
    if sys.stdin.isatty():
        talk(conversation)
    elif text := sys.stdin.buffer.read().decode("utf-8", "replace").strip("\r\n"):
        conversation.ask(text)


def _local(model: str, wishes: Wishes, settings: Settings, threads: int | None, console: Console) -> Answerer:
    from kakera.cli.engine import recipe_for, seeing, served_model, with_drafts
    from kakera.cli.local_answers import LocalModel
    from kakera.cli.model import resolve_model
    from kakera.plan.plan import AUTO
    from kakera.target.devices import resolve_to_compute
    from kakera.target.threads import patient_threads

    found, machine = resolve_model(model, wishes.gpus), resolve_to_compute(wishes.gpus)
    offered, wishes = served_model(found), with_drafts(wishes, AUTO, machine)

    def tell(line: str) -> None:
        console.print(line, style="dim", soft_wrap=True)

    recipe = recipe_for(found, wishes, tell, threads)
    offered = seeing(offered, found, recipe, tell)
    with patient_threads(computes=not machine.target.has_cards):
        return LocalModel(recipe(), offered, settings)


def _remote(url: str, key: str | None, model: str, wishes: Wishes, settings: Settings) -> Answerer:
    from kakera.cli.remote_answers import RemoteModel

    if wishes != Wishes():
        raise UsageError("--url: the server has its memory already; give memory options to kakera serve")
    return RemoteModel(url, key, model, settings)


def talk(conversation: Conversation) -> None:
    """Until the user ends it."""
    from kakera.cli.line_editor import LineEditor
    from kakera.target.remembered import state_directory

    editor = LineEditor(state_directory() / "chat-history", COMMANDS)
    say(conversation, HINT)
    interrupted = False
    while True:
        try:
            line = editor.read()
            interrupted = False
            if not obey(conversation, line):
                return
        except EOFError:
            return
        except KeyboardInterrupt:
            if interrupted:
                return
            interrupted = True
            say(conversation, "Ctrl-C again, or Ctrl-D, ends the chat")


def obey(conversation: Conversation, line: str) -> bool:
    """Do what a message says; False ends the chat. A command with words behind it that it does not take is text."""
    command, rest = line.rstrip(), ""
    first = "".join(command.split(maxsplit=1)[:1])
    if first in ("/system", "/image") and line.startswith("/"):
        command, rest = first, command.removeprefix(first).strip()
    match command:
        case "":
            pass
        case "/quit" | "/exit":
            return False
        case "/help":
            say(conversation, HELP)
        case "/new":
            conversation.restart()
            say(conversation, "a new conversation")
        case "/system":
            _set_system(conversation, rest)
        case "/image":
            _attach(conversation, rest)
        case _:
            conversation.turn(line.strip())
    return True


def _set_system(conversation: Conversation, text: str) -> None:
    if text:
        conversation.system = None if text == "none" else text
        conversation.restart()
    state = f"the system message is: {conversation.system}" if conversation.system else "there is no system message"
    how = "/system TEXT sets it, /system none removes it"
    say(conversation, f"a new conversation; {state}" if text else f"{state} ({how})")


def _attach(conversation: Conversation, name: str) -> None:
    """A path as it is typed, pasted or dropped: some terminals put quotes around it."""
    quoted = len(name) > 1 and name[0] == name[-1] and name[0] in "'\""
    path = Path(name[1:-1] if quoted else name).expanduser()
    try:
        conversation.attach(path)
    except OSError as error:
        say(conversation, f"{path}: {error.strerror or error}" if name else "/image FILE names no file")
    else:
        say(conversation, f"{path.name} goes with the next message")


def say(conversation: Conversation, line: str) -> None:
    from rich.text import Text

    conversation.console.print(Text(line, style="dim"), soft_wrap=True)
