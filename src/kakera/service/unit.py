"""The systemd user unit as text: a pure function of facts about the machine and the plan."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from kakera.errors import UsageError
from kakera.service.limits import Bounds

RESTART_SECONDS = 5
BURST = 5  # starts in a row that fail before systemd gives up: a broken model must not load for ever
# After the drain: 2 for last words, 15 for SIGTERM of the engine (11 of them for the disk cache), as long again
STOP_SECONDS = 37
GRACE_SECONDS = 30  # the server's own watchdog acts first, because it can tell clients and the log why


@dataclass(frozen=True)
class Facts:
    """`serve` and `doctor` are whole commands, the first word an absolute path. `environment`: what to carry over."""

    model: str
    serve: tuple[str, ...]
    doctor: tuple[str, ...]
    bounds: Bounds
    environment: tuple[tuple[str, str], ...] = ()
    drain_seconds: float = 3.0  # what `serve` gives running requests


def unit_text(facts: Facts) -> str:
    """Raises UsageError for a word that no unit file can hold."""
    b = facts.bounds
    start, stop = int(b.start_seconds), STOP_SECONDS + ceil(facts.drain_seconds)
    environment = "".join(f"Environment={quoted(f'{name}={value}')}\n" for name, value in facts.environment)
    return f"""\
# Written by `kakera service install`; running that again replaces this file.

[Unit]
Description=kakera serves {facts.model.replace("%", "%%")}
# {BURST} failed starts, each as long as it may take, then systemd gives up instead of loading for ever.
StartLimitIntervalSec={BURST * (start + RESTART_SECONDS + stop)}
StartLimitBurst={BURST}

[Service]
# READY=1 comes after the first token; the watchdog is fed when the engine finishes a step or says that it is idle.
Type=notify
NotifyAccess=main
ExecStartPre={command(facts.doctor)}
ExecStart={command(facts.serve)}
{environment}TimeoutStartSec={start}
WatchdogSec={int(b.stall_seconds) + GRACE_SECONDS}
Restart=on-failure
RestartSec={RESTART_SECONDS}
# Wrong options (2) stay wrong.
RestartPreventExitStatus=2

# SIGTERM to the server alone, which lets requests end, then ends its engine; what is left after that is killed.
KillMode=mixed
TimeoutStopSec={stop}

# If the kernel kills one process for memory, stop the rest too: half a service would hold the card and answer nobody.
OOMPolicy=stop
# The plan's bytes of host memory and room for files that are read while loading. Above MemoryHigh the kernel takes
# pages back and slows the service down; at MemoryMax it kills it, and not the desktop.
MemoryHigh={b.memory_high}
MemoryMax={b.memory_max}

# A core would hold the prompts and the memory of a card: tens of GB on the disk. Where it crashed is in the journal.
LimitCORE=0

UMask=0077
NoNewPrivileges=yes
# TCP, the socket to the engine and what lists network cards; Bluetooth, raw packets and others are no business of ours.
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX AF_NETLINK
# No programs of another machine's kind. Code in memory stays allowed: kernels are compiled where they run.
LockPersonality=yes
RestrictSUIDSGID=yes
RestrictRealtime=yes
# Two processes and their threads are some hundred on a large machine.
TasksMax=4096

# The journal rotates by itself. To bound it: SystemMaxUse=500M in /etc/systemd/journald.conf.d/size.conf.
StandardOutput=journal
StandardError=journal
SyslogIdentifier=kakera

[Install]
WantedBy=default.target
"""


def command(words: tuple[str, ...]) -> str:
    """A command line for Exec*=. The colon keeps systemd from replacing $NAME in it."""
    first, *rest = words
    return " ".join([quoted(":" + first), *map(quoted, rest)])


def quoted(word: str) -> str:
    """One word in systemd's quoting, in which % begins a specifier."""
    if not word.isprintable():
        raise UsageError(f"{word!r} has a character that a unit file can not hold")
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return escaped if escaped and not set(escaped) & set(" '\"\\;#") else f'"{escaped}"'
