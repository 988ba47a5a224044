"""kakera service: a systemd user service that starts the server at boot and again when it fails."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kakera.cli.options import (
    DEFAULT_DRAIN,
    DEFAULT_HOST,
    DEFAULT_KEEP_ALIVE,
    DEFAULT_LEVEL,
    DEFAULT_PORT,
    DEFAULT_SLEEP_LEVEL,
    MEMORY_OPTIONS,
    AllowedHostOption,
    AnyNameOption,
    CachePerKeyOption,
    CorsOption,
    DiskOption,
    DraftsOption,
    DrainOption,
    EventsOption,
    HostOption,
    ImageUrlsOption,
    JsonOption,
    KeepAliveOption,
    KeyFileOption,
    KeyOption,
    LevelOption,
    ModelArgument,
    NameOption,
    PortOption,
    ProveOption,
    SleepAfterOption,
    SleepLevelOption,
    ThreadsOption,
    with_memory_options,
)
from kakera.plan.plan import Wishes
from kakera.target.allocator import VARIABLES

if TYPE_CHECKING:
    from kakera.cli.model import Model
    from kakera.service.unit import Facts

app = typer.Typer(help="Run the server as a systemd user service.", no_args_is_help=True)
CARRIED = ("CUDA_VISIBLE_DEVICES", "HF_HOME", "XDG_CACHE_HOME", *VARIABLES)  # a service has no shell's environment


@app.command()
@with_memory_options
def install(
    model: ModelArgument = "mini",
    host: HostOption = DEFAULT_HOST,
    port: PortOption = DEFAULT_PORT,
    api_key: KeyOption = None,
    api_key_file: KeyFileOption = None,
    cache_per_key: CachePerKeyOption = False,
    allowed_host: AllowedHostOption = None,
    cors_origin: CorsOption = None,
    served_name: NameOption = None,
    any_name: AnyNameOption = False,
    log_level: LevelOption = DEFAULT_LEVEL,
    keep_alive: KeepAliveOption = DEFAULT_KEEP_ALIVE,
    drain_seconds: DrainOption = DEFAULT_DRAIN,
    sleep_after: SleepAfterOption = None,
    sleep_level: SleepLevelOption = DEFAULT_SLEEP_LEVEL,
    threads: ThreadsOption = None,
    disk_cache: DiskOption = None,
    kv_events: EventsOption = None,
    drafts: DraftsOption = "auto",
    image_urls: ImageUrlsOption = None,
    prove: ProveOption = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the unit and change nothing.")] = False,
    *,
    wishes: Wishes,
) -> None:
    """Write the unit from the plan, enable it and start it. Takes the options of `kakera serve`."""
    from kakera.cli.engine import with_drafts
    from kakera.cli.model import resolve_model
    from kakera.cli.serve import check_level, keys_of
    from kakera.service import systemd, wsl
    from kakera.service.unit import unit_text
    from kakera.target.devices import resolve_to_compute
    from kakera.target.wsl import under_wsl

    check_level(log_level)
    keys = keys_of(api_key, api_key_file)
    windows = under_wsl()
    if not dry_run:
        systemd.require_systemd(wsl=windows)
    found = resolve_model(model)
    wishes = with_drafts(wishes, drafts, resolve_to_compute(wishes.gpus))
    own_file = systemd.unit_path().parent.parent.parent / "kakera" / "api-key" if api_key else None
    key_file = api_key_file.resolve() if api_key_file else own_file
    options = serve_options(found, model, host, port, key_file, served_name or [found.name], log_level, wishes)
    options += access_options(host, allowed_host or [], cors_origin or [])
    options += flags({"any-name": any_name, "cache-per-key": cache_per_key, "prove": prove})
    options += changed(
        {"keep-alive": (keep_alive, DEFAULT_KEEP_ALIVE), "drain-seconds": (drain_seconds, DEFAULT_DRAIN)}
    )
    options += changed({"drafts": (drafts or "off", "auto")})
    options += changed({"sleep-after": (sleep_after, None), "sleep-level": (sleep_level, DEFAULT_SLEEP_LEVEL)})
    options += changed({"threads": (threads, None), "disk-cache": (disk_cache, None), "kv-events": (kv_events, None)})
    options += changed({"image-urls": (image_urls, None)})
    facts = facts_for(found, options, wishes, drain_seconds)
    text = unit_text(facts)
    if windows:
        for line in wsl.needs(facts.bounds.memory_max, systemd.BOOTED.is_dir()):
            typer.echo(line, err=True)
    if dry_run:
        typer.echo(text, nl=False)
        return
    if own_file:
        write_private(own_file, "".join(f"{key}\n" for key in keys))
    write_private(systemd.unit_path(), text)
    systemd.systemctl("daemon-reload")
    systemd.systemctl("enable", systemd.UNIT)
    systemd.systemctl("restart", "--no-block", systemd.UNIT)
    if problem := systemd.linger_problem():
        typer.echo(f"warning: {problem}", err=True)
    typer.echo(f"{systemd.unit_path()} is enabled and starting; kakera service logs --follow shows how it goes")


@app.command()
def status(as_json: JsonOption = False) -> None:
    """What systemd says about the service. Exit status 0 if it runs, 3 if not."""
    from kakera.service import systemd

    _require()
    if as_json:
        import json

        found = systemd.properties()
        typer.echo(json.dumps(found, indent=2))
        raise typer.Exit(0 if found["active"] == "active" else 3)
    raise typer.Exit(systemd.show("systemctl", "--user", "status", "--no-pager", systemd.UNIT))


@app.command()
def logs(
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with new lines.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="How many of the last lines.")] = 100,
) -> None:
    """The service's lines in the journal."""
    from kakera.service import systemd

    _require()
    more = ["--follow"] if follow else ["--no-pager"]
    raise typer.Exit(systemd.show("journalctl", "--user", "--unit", systemd.UNIT, "--lines", str(lines), *more))


@app.command()
def uninstall() -> None:
    """Stop the service and remove its unit. Models, cache and journal stay."""
    from kakera.errors import KakeraError
    from kakera.service import systemd

    _require()
    path = systemd.unit_path()
    if not path.exists():
        raise KakeraError(f"there is no {path}: nothing is installed")
    systemd.systemctl("disable", "--now", systemd.UNIT)
    path.unlink()
    systemd.systemctl("daemon-reload")
    typer.echo(f"{path} is removed")


def serve_options(
    found: Model,
    asked: str,
    host: str,
    port: int,
    key_file: Path | None,
    names: list[str],
    log_level: str,
    wishes: Wishes,
) -> tuple[str, ...]:
    """The arguments of `kakera serve`: paths absolute, and only what was asked for, so that defaults may improve."""
    path = found.path.resolve()
    model = asked if asked == "mini" else f"scripted:{path}" if found.scripted else str(path)
    given: dict[str, tuple[object, object]] = {
        "host": (host, DEFAULT_HOST),
        "port": (port, DEFAULT_PORT),
        "api-key-file": (key_file, None),
        "log-level": (log_level, DEFAULT_LEVEL),
    }
    for name, (_, default) in MEMORY_OPTIONS.items():
        value = getattr(wishes, name)
        given[name.replace("_", "-")] = (value, default)
    if wishes.rotation:
        given["rotation"] = (Path(wishes.rotation).resolve(), None)
    words = [model, *changed(given)]
    # the directory of a downloaded snapshot is a number, which nobody wants to see as a model's name
    if names != [path.stem if found.scripted else path.name]:
        words += [word for name in names for word in ("--served-name", name)]
    return tuple(words)


def changed(given: Mapping[str, tuple[object, object]]) -> tuple[str, ...]:
    """Options whose value is not the default: name -> (value, default)."""
    pairs = ((f"--{name}", _written(value)) for name, (value, default) in given.items() if value != default)
    return tuple(word for pair in pairs for word in pair)


def flags(given: Mapping[str, bool]) -> tuple[str, ...]:
    return tuple(f"--{name}" for name, on in given.items() if on)


def _written(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def access_options(host: str, allowed_hosts: list[str], origins: list[str]) -> tuple[str, ...]:
    """Raises UsageError here rather than at every boot."""
    from kakera.server.http.access import Access

    Access.when_bound(host, allowed_hosts=tuple(allowed_hosts), origins=tuple(origins))
    given = [("--allowed-host", name) for name in allowed_hosts] + [("--cors-origin", origin) for origin in origins]
    return tuple(word for pair in given for word in pair)


def facts_for(found: Model, options: tuple[str, ...], wishes: Wishes, drain_seconds: float) -> Facts:
    """Raises PlanRefused here rather than at every boot."""
    from kakera.cli.engine import bounds_for
    from kakera.service.unit import Facts

    kakera = (sys.executable, "-m", "kakera.cli")
    carried = tuple((name, os.environ[name]) for name in CARRIED if name in os.environ)
    bounds = bounds_for(found, wishes)
    serve, doctor = (*kakera, "serve", *options), (*kakera, "doctor", "--check")
    return Facts(found.name, serve, doctor, bounds, carried, drain_seconds)


def write_private(path: Path, text: str) -> None:
    """Readable by its owner alone, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".new")
    draft.touch(mode=0o600)
    draft.write_text(text)
    draft.replace(path)


def _require() -> None:
    from kakera.service import systemd
    from kakera.target.wsl import under_wsl

    systemd.require_systemd(wsl=under_wsl())
