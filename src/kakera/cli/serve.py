"""kakera serve: an OpenAI-compatible server in front of one engine process."""

from __future__ import annotations

import contextlib
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
    LEVELS,
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
from kakera.cli.terminal import say
from kakera.plan.plan import Wishes

OTHERS_READ = 0o044  # group and everybody

if TYPE_CHECKING:
    from kakera.server.watch import EngineWatch
    from kakera.service.instance import Claim, Holder


@with_memory_options
def serve(
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
    record: Annotated[
        Path | None, typer.Option("--record", help="Write every step to FILE, for kakera replay.", metavar="FILE")
    ] = None,
    record_prompts: Annotated[
        bool, typer.Option("--record-prompts", help="Record texts as they are, not as random stand-ins.")
    ] = False,
    disk_cache: DiskOption = None,
    kv_events: EventsOption = None,
    drafts: DraftsOption = "auto",
    image_urls: ImageUrlsOption = None,
    prove: ProveOption = False,
    stall_limit: Annotated[
        float | None, typer.Option("--stall-limit", min=2, hidden=True, help="Seconds without progress, then it ends.")
    ] = None,
    *,
    wishes: Wishes,
) -> None:
    """Serve a model to OpenAI clients until interrupted. Exit status 70 if the engine dies or hangs."""
    import asyncio
    import os
    import signal

    from kakera.cli.engine import (
        recipe_for,
        recording,
        seeing,
        served_model,
        stall_limit_for,
        with_disk,
        with_drafts,
        with_kv_events,
    )
    from kakera.cli.model import resolve_model
    from kakera.cli.prove import prove_first
    from kakera.errors import UsageError
    from kakera.server.http.access import Access
    from kakera.service.instance import Holder
    from kakera.service.notify import Notifier
    from kakera.service.predecessor import wait_for
    from kakera.target.devices import device_bytes_used, resolve_to_compute

    check_level(log_level)
    if record_prompts and record is None:
        raise UsageError("--record-prompts needs --record FILE")
    if sleep_level != DEFAULT_SLEEP_LEVEL and sleep_after is None:
        raise UsageError("--sleep-level needs --sleep-after SECONDS")
    keys = keys_of(api_key, api_key_file)
    names, origins = tuple(allowed_host or ()), tuple(cors_origin or ())
    access = Access.when_bound(host, keys=keys, allowed_hosts=names, origins=origins, cache_per_key=cache_per_key)
    notifier = Notifier.from_environment()
    found = resolve_model(model, wishes.gpus)
    machine = resolve_to_compute(wishes.gpus)
    if sleep_after is not None and machine.ranks > 1:
        raise UsageError("--sleep-after: not for a model that several processes share yet")
    if kv_events is not None and cache_per_key:
        raise UsageError("--kv-events: what each key has of its own is not told; leave --cache-per-key out")
    wishes = with_drafts(wishes, drafts, machine)
    if prove:
        check_port(host, port)  # not after minutes
        prove_first(found, model, wishes)
    aliases = tuple(dict.fromkeys(served_name or (found.name,)))
    name = aliases[0]
    cards = len(machine.devices) if machine.target.has_cards and not found.scripted else 0
    claim = claim_for(cards, port, Holder(os.getpid(), f"{host}:{port}", name))
    check_port(host, port)
    warn_if_open(host, port, keys)
    if claim:
        wait_for(claim.left, device_bytes_used, say)
    offered = served_model(found, aliases, any_name=any_name)
    recipe = recipe_for(found, wishes, say, threads)
    offered = seeing(offered, found, recipe, say, image_urls)
    if record is not None:
        recipe = recording(recipe, record, found.name, record_prompts)
        say(f"recording to {record}: {'texts as they are' if record_prompts else 'random stand-ins for tokens'}")
    if disk_cache is not None:
        recipe = with_disk(recipe, disk_cache, say)
    if kv_events is not None:
        recipe = with_kv_events(recipe, kv_events, say)
    limit = stall_limit or stall_limit_for(found, wishes, machine)

    async def run() -> int:
        from kakera.run.process.client import EngineClient

        notifier.send(f"STATUS=loading {name}")
        starting = asyncio.create_task(EngineClient.start(recipe, computes=not machine.target.has_cards))
        await asyncio.sleep(0)  # the engine's process loads while this one imports the web server, a second's work
        from kakera.server.http.sleep import IdleSleep
        from kakera.server.run import serve as serve_engine
        from kakera.server.watchdog import attendant, first_token

        engine = await starting
        try:
            if claim:
                with contextlib.suppress(OSError):  # a full disk: the next server then waits for nobody
                    claim.note_engine(engine.pid)
            await first_token(engine)
            site = f"http://{f'[{host}]' if ':' in host else host}:{port}"
            answers = f"{offered.name} answers on {site}/v1, its page is {site}/"
            attend = attendant(notifier, answers)

            async def listening(watch: EngineWatch) -> None:
                say(answers)  # nobody shall follow it to a closed port
                await attend(watch)

            return await serve_engine(
                engine,
                offered,
                host=host,
                port=port,
                access=access,
                log_level=log_level,
                stall_seconds=limit,
                drain_seconds=drain_seconds,
                keep_alive_seconds=keep_alive,
                attend=listening,
                plan=recipe.plan,
                idle_sleep=None if sleep_after is None else IdleSleep(sleep_after, sleep_level),
                kv_events=recipe.kv_events,
            )
        finally:
            notifier.send("STOPPING=1")
            await engine.close()

    # SIGTERM unwinds like Ctrl-C, so that the engine process is ended and waited for; both are an orderly end
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        status = asyncio.run(run())
    except KeyboardInterrupt:
        status = 0
    if claim:
        claim.close(orderly=status == 0)
    raise typer.Exit(status)


def claim_for(cards: int, port: int | None, holder: Holder) -> Claim | None:
    """Locks on the port and on the cards. Raises UsageError naming who holds them."""
    import os

    from kakera.service.instance import claim, resources
    from kakera.target.remembered import state_directory

    names = resources(cards, port, os.environ.get("CUDA_VISIBLE_DEVICES"))
    try:
        return claim(names, holder, state_directory() / "locks")
    except OSError as error:  # a read-only home must not keep a server from starting
        say(f"warning: no lock in {state_directory()} ({error.strerror}), so a second server would not be noticed")
        return None


def check_level(log_level: str) -> None:
    from kakera.errors import UsageError

    if log_level not in LEVELS:
        raise UsageError(f"--log-level {log_level}: choose {', '.join(LEVELS)}")


def keys_of(api_key: str | None, path: Path | None) -> tuple[str, ...]:
    """The keys that open the server; none without an option. Raises UsageError: who asks for a key and gives none would
    have an open server."""
    from kakera.errors import UsageError

    if api_key is not None and path is not None:
        raise UsageError("--api-key and --api-key-file are both given; put all keys into the file, one a line")
    if path is not None:
        return read_keys(path)
    return () if api_key is None else (checked_key(api_key, "--api-key"),)


def checked_key(key: str, where: str) -> str:
    """Raises UsageError for what no client could send in a header."""
    from kakera.errors import UsageError

    if not key.strip():
        raise UsageError(f"{where} is empty, so the server would be open to everybody; give a key or leave it out")
    if key != key.strip() or not (key.isascii() and key.isprintable()):
        raise UsageError(f"{where}: a key is of printable ASCII characters, without space around it")
    return key


def read_keys(path: Path) -> tuple[str, ...]:
    """One a line, so that a new key can be valid beside the old one. Raises UsageError, also for a file that others may
    read; a secret that a container mounts is often root's and of mode 0444, and then nobody but us is in there."""
    import os

    from kakera.errors import UsageError

    try:
        with path.open(encoding="utf-8") as file:
            status = os.fstat(file.fileno())
            lines = [line.strip() for line in file]
    except OSError as error:
        raise UsageError(f"--api-key-file {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"--api-key-file {path}: this is no text") from None
    if status.st_mode & OTHERS_READ and status.st_uid == os.geteuid():
        raise UsageError(f"--api-key-file {path}: others on this machine may read it; run chmod 600 {path}")
    keys = tuple(checked_key(line, f"--api-key-file {path}") for line in lines if line)
    if not keys:
        raise UsageError(f"--api-key-file {path}: the file is empty")
    return keys


def warn_if_open(host: str, port: int, keys: tuple[str, ...]) -> None:
    from kakera.server.http.access import is_loopback

    if not keys and not is_loopback(host):
        say(
            f"warning: --host {host} without --api-key-file: whoever can reach port {port} can use this server; in a "
            f"container that is whoever can reach the published port"
        )


def check_port(host: str, port: int) -> None:
    """Refuse before minutes of loading. Raises UsageError."""
    import errno
    import socket

    from kakera.errors import UsageError

    advice = {
        errno.EADDRINUSE: "is kakera running already? Try --port",
        errno.EADDRNOTAVAIL: "this machine has no such address; give --host one that it has, or 0.0.0.0 for all",
        errno.EACCES: "ports below 1024 are reserved: try --port",
    }

    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise UsageError(f"--host {host}: {error.strerror or error}") from None
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does; a listener still refuses
        try:
            probe.bind(address)
        except OSError as error:
            why = error.strerror or str(error)
            what_to_do = advice.get(error.errno or 0, "try another --port or --host")
            raise UsageError(f"{host}:{port} can not be used ({why}): {what_to_do}") from None
