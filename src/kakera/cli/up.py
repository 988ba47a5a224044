"""kakera up: choose a checkpoint for this machine, say why, download it and serve it."""

from __future__ import annotations

import inspect
import shlex
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kakera.cli.options import MEMORY_OPTIONS, JsonOption, wishes_of, with_options_of
from kakera.cli.serve import check_port, serve

if TYPE_CHECKING:
    from kakera.cli.choice import Candidate
    from kakera.hub.names import Repository
    from kakera.target.devices import Machine


@dataclass(frozen=True)
class Place:
    """Where the files of a choice are or would go, None if they came along. `coming`: bytes to download; `free`: those
    of the disk."""

    directory: Path | None = None
    coming: int = 0
    free: int = 0


@with_options_of(serve)
def up(
    model: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="MODEL as for serve. Default: the best that fits here.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Download without a question.")] = False,
    as_json: JsonOption = False,
    **options: Any,
) -> None:
    """Choose a model for this machine's cards (without one: the CPU), say why, download it and serve it.

    The same as `kakera plan`, `kakera pull` and `kakera serve` one after the other; takes the options of serve.
    """
    import json

    from kakera.cli.choice import considered
    from kakera.errors import PlanRefused
    from kakera.target.devices import resolve_to_compute

    wishes = wishes_of({name: options[name] for name in MEMORY_OPTIONS})
    machine = resolve_to_compute(wishes.gpus)
    found = considered(model, wishes, machine)
    chosen = next((candidate for candidate in found if not candidate.against), None)
    if chosen is None:
        raise PlanRefused(f"{found[-1].checkpoint.name} can not be served here: {found[-1].against}")
    name, others = chosen.checkpoint.name, [candidate for candidate in found if candidate is not chosen]
    repository = repository_of(name)
    place = place_of(chosen, repository) if repository else Place()
    options["chunk"] = chosen.wishes.chunk
    told = (machine, chosen, others, place, by_hand(name, options))
    if as_json:
        typer.echo(json.dumps(document(*told), indent=2))
    else:
        for line in explanation(*told):
            typer.echo(line)
    if dry_run:
        return
    check_port(options["host"], options["port"])
    if repository:
        _download(repository, ask=sys.stdin.isatty() and not (yes or as_json))
    serve(model=name, **options)


def repository_of(name: str) -> Repository | None:
    """None for what is on this disk in any case."""
    from kakera.hub.names import Repository

    return None if Path(name).expanduser().is_dir() else Repository.called(name)


def place_of(chosen: Candidate, repository: Repository) -> Place:
    """By the published size, or by what the hub says of a name that is in no list. Raises CheckpointError."""
    from kakera.cli.model import needed, whole
    from kakera.errors import CheckpointError
    from kakera.hub.disk import on_disk, room
    from kakera.hub.remote import look

    if kept := on_disk(repository):
        try:
            return Place(whole(kept))
        except CheckpointError:
            pass  # a part of it is there
    coming = chosen.checkpoint.bytes or sum(needed(look(repository))[1].values())
    directory, free = room()
    return Place(directory, coming, free)


def _download(repository: Repository, *, ask: bool) -> None:
    """What has to come. Of a hub that does not answer nothing: `serve` takes what is there, or says why it can not."""
    from kakera.cli.model import pulled
    from kakera.errors import CheckpointError
    from kakera.hub.remote import look
    from kakera.plan.table import gigabytes

    def question(coming: int) -> None:
        if ask and not typer.confirm(f"Download {gigabytes(coming)}?", default=True):
            raise typer.Exit(1)

    try:
        remote = look(repository)
    except CheckpointError:
        return
    pulled(remote, question)


def explanation(
    machine: Machine, chosen: Candidate, others: list[Candidate], place: Place, command: str
) -> Iterator[str]:
    """Lines: the machine, the choice and its plan, what else there was, the download, the same by hand."""
    from kakera.plan.table import gigabytes, speed_line, summary

    assert chosen.plan and chosen.speed
    cards = ", ".join(f"{d.name} ({gigabytes(d.bytes)}, {gigabytes(d.used)} in use)" for d in machine.devices)
    yield f"Machine: {cards if machine.target.has_cards else f'no NVIDIA card is used; {cards}'}"
    yield from (f"  {warning}" for warning in machine.warnings)
    yield f"Choice: {chosen.checkpoint.name} ({chosen.checkpoint.about}){', the best that fits' if others else ''}"
    yield f"  {summary(chosen.plan)}"
    yield f"  {speed_line(chosen.speed, chosen.plan, machine)}"
    second = runner_up(others)
    for candidate in sorted(others, key=lambda candidate: candidate is not second):
        reason = candidate.against or candidate.checkpoint.about
        yield f"{'Runner-up:' if candidate is second else 'Not'} {candidate.checkpoint.name}: {reason}"
    if place.coming:
        short = "" if place.coming < place.free else "; that is not enough: free some, or set HF_HOME to another disk"
        yield f"Download: {gigabytes(place.coming)} into {place.directory}, {gigabytes(place.free)} free{short}"
    elif place.directory:
        yield f"On this disk: {place.directory}"
    yield f"The same by hand: {command}"


def runner_up(others: list[Candidate]) -> Candidate | None:
    """The best of those that could be served, else of those that other cards could serve."""
    could = [candidate for candidate in others if not candidate.against]
    return next(iter(could + [candidate for candidate in others if not candidate.checkpoint.unserved]), None)


def by_hand(name: str, options: dict[str, Any]) -> str:
    """The command that does the same without a choice: what was given, but for the key."""
    words = ["kakera", "serve", name]
    for field, parameter in inspect.signature(serve).parameters.items():
        value = options.get(field, parameter.default)
        if value != parameter.default:
            given = value if isinstance(value, list) else ["KEY" if field == "api_key" else value]
            option = f"--{field.replace('_', '-')}"
            words += [word for one in given for word in ([option] if one is True else [option, str(one)])]
    return shlex.join(words)


def document(
    machine: Machine, chosen: Candidate, others: list[Candidate], place: Place, command: str
) -> dict[str, Any]:
    """The same for a program."""
    return {
        "devices": [asdict(device) for device in machine.devices],
        "warnings": list(machine.warnings),
        "choice": chosen.json(),
        "runner_up": second.checkpoint.name if (second := runner_up(others)) else None,
        "others": [candidate.json() for candidate in others],
        "directory": str(place.directory) if place.directory else None,
        "download_bytes": place.coming,
        "free_bytes": place.free,
        "command": command,
    }
