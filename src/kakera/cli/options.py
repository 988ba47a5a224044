"""The options that several commands share. The memory options are declared once and become one Wishes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from kakera.errors import UsageError
from kakera.plan.plan import Wishes

MEMORY = "Memory"
MODEL_HELP = (
    "A directory, a Hugging Face repo id (owner/name or owner/name@revision), `mini`, scripted:FILE or spec:NAME."
)
ModelArgument = Annotated[
    str,
    typer.Argument(metavar="MODEL", help=MODEL_HELP),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]


LEVELS = ("debug", "info", "warning", "error")
# What serve takes and `service install` writes into the unit.
HostOption = Annotated[str, typer.Option("--host", help="Address to listen on.")]
PortOption = Annotated[int, typer.Option("--port", min=1, max=65535, help="Port to listen on.")]
KeyOption = Annotated[str | None, typer.Option("--api-key", help="Refuse requests without this key.")]
AllowedHostOption = Annotated[
    list[str] | None,
    typer.Option("--allowed-host", metavar="NAME", help="Answer to this name, too, such as a proxy's. Repeatable."),
]
CorsOption = Annotated[
    list[str] | None,
    typer.Option("--cors-origin", metavar="ORIGIN", help="Let this site's pages use the server. Repeatable."),
]
NameOption = Annotated[
    list[str] | None,
    typer.Option(
        "--served-name",
        "--served-model-name",
        metavar="NAME",
        help="Model name that clients see. Repeatable: answers carry the first, requests may have any of them.",
    ),
]
AnyNameOption = Annotated[
    bool, typer.Option("--any-name", help="Answer to every model name. Default: 404 for a name that is not served.")
]
LevelOption = Annotated[str, typer.Option("--log-level", help=f"One of {', '.join(LEVELS)}.")]
KeepAliveOption = Annotated[
    int,
    typer.Option("--keep-alive", min=1, max=3600, help="Seconds for which a connection may wait for its next request."),
]
DrainOption = Annotated[
    float,
    typer.Option("--drain-seconds", min=0, max=86400, help="Seconds for which requests may go on after SIGTERM."),
]
DEFAULT_DRAIN = 3.0  # as in server/run.py
SleepAfterOption = Annotated[
    float | None,
    typer.Option(
        "--sleep-after",
        min=1,
        metavar="SECONDS",
        help="Give the card's memory back after so long without a request; the next one wakes it.",
    ),
]
SleepLevelOption = Annotated[
    int, typer.Option("--sleep-level", min=1, max=2, help="Then: 1 weights to host memory, 2 read them again.")
]
DEFAULT_SLEEP_LEVEL = 1


def _drafts(text: str) -> Any:
    from kakera.plan.plan import AUTO, MOST_DRAFTS, OFF

    wanted = {AUTO: AUTO, "off": OFF}.get(text.strip().lower())
    if wanted is None and text.isascii() and text.isdecimal() and int(text) <= MOST_DRAFTS:
        wanted = int(text)
    if wanted is None:
        raise typer.BadParameter(f"{text!r}: write auto, off, or the most tokens to guess at once, up to {MOST_DRAFTS}")
    return wanted


DraftsOption = Annotated[
    Any,
    typer.Option(
        "--drafts",
        parser=_drafts,
        metavar="auto|off|N",
        help="Guess what comes next from the text so far, N tokens at most; auto: on a CPU, as far as it pays.",
    ),
]
ThreadsOption = Annotated[
    int | None, typer.Option("--threads", min=1, help="Threads of a CPU. Default: as many as are fast here, measured.")
]
KeyFileOption = Annotated[
    Path | None, typer.Option("--api-key-file", help="Keys from a file, one a line: process lists show options.")
]
CachePerKeyOption = Annotated[
    bool, typer.Option("--cache-per-key", help="What one key has sent is not reused for another.")
]
EventsOption = Annotated[
    str | None,
    typer.Option("--kv-events", help="Tell routers what is cached, as vLLM does.", metavar="tcp://HOST:PORT[,TOPIC]"),
]
ImageUrlsOption = Annotated[
    str | None,
    typer.Option("--image-urls", help="Fetch images from these hosts, or `public`. Default: none.", metavar="HOST,.."),
]
ProveOption = Annotated[
    bool, typer.Option("--prove", help="First fill the plan once, unless it was proven already; see kakera prove.")
]
LEAST_DISK = 64 * 10**6  # bytes: less is no cache
DEFAULT_KEEP_ALIVE = 130  # as in server/http/connection.py, which is not imported to say --help
DEFAULT_HOST, DEFAULT_PORT, DEFAULT_LEVEL = "127.0.0.1", 30000, "info"


def token_count(text: str) -> int:
    """8k is 8,192. Raises ValueError."""
    text = text.strip().lower()
    return 1024 * int(text[:-1]) if text.endswith("k") else int(text)


def _context(text: str) -> int:
    try:
        return token_count(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no number of tokens; write 131072 or 128k") from None


def _disk(text: str) -> int:
    from kakera.target.devices import parse_bytes

    try:
        size = parse_bytes(text)
    except UsageError as error:
        raise typer.BadParameter(str(error)) from None
    if size < LEAST_DISK:
        raise typer.BadParameter(f"{text}: give at least {LEAST_DISK // 10**6} MB")
    return size


DiskOption = Annotated[
    int | None,
    typer.Option(
        "--disk-cache",
        help="Keep prefixes on disk over restarts, up to so many bytes (at least 64MB), such as 50GB.",
        parser=_disk,
        metavar="BYTES",
    ),
]


def _pool(text: str) -> int | str:
    return "all" if text.strip().lower() == "all" else _context(text)


def _option(name: str, help: str, **more: Any) -> Any:
    return typer.Option(name, help=help, rich_help_panel=MEMORY, **more)


# field of Wishes -> (type on the command line, default)
MEMORY_OPTIONS: dict[str, tuple[Any, Any]] = {
    "gpus": (
        Annotated[
            str,
            _option("--gpus", "auto, cpu, cpu:4GB, cpu,cpu (two processes), sizes (12GB) or names (rtx5070,rtx5070)."),
        ],
        "auto",
    ),
    "context": (
        Annotated[
            int | None,
            _option(
                "--context",
                "Tokens of the longest request, such as 32768 or 32k. Default: the most that fits.",
                parser=_context,
                metavar="TOKENS",
            ),
        ],
        None,
    ),
    "max_running": (
        Annotated[int | None, _option("--max-running", "Requests that run at once. Default: 1 to 8.")],
        None,
    ),
    "chunk": (
        Annotated[
            int | None, _option("--chunk", "Most prompt tokens in one step. Default: up to 512 on a CPU, else 2048.")
        ],
        None,
    ),
    "kv": (Annotated[str, _option("--kv", "Codec of the KV cache: fp32, bf16 or int2.")], "int2"),
    "kv_group": (
        Annotated[int | None, _option("--kv-group", "Channels that share an int2 scale. Default: up to 256.")],
        None,
    ),
    "kv_window": (Annotated[int, _option("--kv-window", "Recent tokens that attention reads in 16 bit.")], 256),
    "rotation": (
        Annotated[str | None, _option("--rotation", "What kakera calibrate wrote. Default: Hadamard.", metavar="DIR")],
        None,
    ),
    "state_dtype": (
        Annotated[str | None, _option("--state-dtype", "Stored states: fp32 (exact; CPU default) or fp16.")],
        None,
    ),
    "host_cache": (
        Annotated[str | None, _option("--host-cache", "Memory for the prefix cache, such as 2GB.", metavar="BYTES")],
        None,
    ),
    "staging": (
        Annotated[int | None, _option("--staging", "Checkpoints on their way to the host at once. Default: 2 or 1.")],
        None,
    ),
    "embedding": (
        Annotated[str, _option("--embedding", "Where its rows lie: auto, device, or host memory that is pinned.")],
        "auto",
    ),
    "reserve": (
        Annotated[
            str | None,
            _option(
                "--reserve",
                "Memory of each card that stays free beyond 4 %. Default: 0; 1GB under WSL2.",
                metavar="BYTES",
            ),
        ],
        None,
    ),
    "pool": (
        Annotated[
            Any,
            _option(
                "--pool",
                "KV pages for so many tokens in all, or `all` that fit. Default: half of what is left over.",
                parser=_pool,
                metavar="TOKENS",
            ),
        ],
        None,
    ),
    "vision": (
        Annotated[str, _option("--vision", "Where a vision tower lies: auto, device, host, or off.")],
        "auto",
    ),
    "vision_tower": (
        Annotated[
            str | None,
            _option("--vision-tower", "Take the tower of this directory, of the same family.", metavar="DIR"),
        ],
        None,
    ),
    "image_tokens": (
        Annotated[
            int | None,
            _option(
                "--image-tokens",
                "Of the largest image, 64 to 16384; larger ones are scaled down. Default: 2048, of a CPU 256.",
                metavar="TOKENS",
            ),
        ],
        None,
    ),
}


def with_memory_options(command: Callable[..., None]) -> Callable[..., None]:
    """Turn the parameter `wishes: Wishes` of a command into the memory options on its command line."""

    @functools.wraps(command)
    def wrapper(**values: Any) -> None:
        command(wishes=wishes_of({name: values.pop(name) for name in MEMORY_OPTIONS}), **values)

    own = inspect.signature(command, eval_str=True)
    kind = inspect.Parameter.KEYWORD_ONLY
    parameters = [p.replace(kind=kind) for name, p in own.parameters.items() if name != "wishes"]
    parameters += [
        inspect.Parameter(name, kind, default=default, annotation=annotation)
        for name, (annotation, default) in MEMORY_OPTIONS.items()
    ]
    return _signed(wrapper, parameters)


def with_options_of(other: Callable[..., None]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command, in the place of its `**options`, the options of another one that it does not have itself."""

    def of(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def wrapper(**values: Any) -> None:
            command(**values)

        own = inspect.signature(command, eval_str=True).parameters
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters = [p.replace(kind=kind) for p in own.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        more = inspect.signature(other).parameters
        return _signed(wrapper, parameters + [p.replace(kind=kind) for name, p in more.items() if name not in own])

    return of


def _signed(wrapper: Callable[..., None], parameters: list[inspect.Parameter]) -> Callable[..., None]:
    """Typer reads what a command takes from its signature and its annotations."""
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
    return wrapper


def wishes_of(values: dict[str, Any]) -> Wishes:
    """From the memory options as typer gives them. Raises UsageError."""
    from kakera.target.devices import parse_bytes

    values = dict(values)

    assert {*values, "drafts"} == {field.name for field in fields(Wishes)}
    for name in ("host_cache", "reserve"):
        if (text := values[name]) is not None:
            values[name] = parse_bytes(text, f"--{name.replace('_', '-')} ")
    if values["state_dtype"] not in (None, "fp32", "fp16"):
        raise UsageError(f"--state-dtype {values['state_dtype']}: choose fp32 or fp16")
    if (rotation := values["rotation"]) is not None and not Path(rotation).is_dir():
        raise UsageError(f"--rotation {rotation}: no such directory; kakera calibrate makes one")
    if (tower := values["vision_tower"]) is not None:
        if not Path(tower).is_dir():
            raise UsageError(f"--vision-tower {tower}: no such directory; it holds config.json and the tower's files")
        values["vision_tower"] = str(Path(tower).resolve())
    return Wishes(**values)
