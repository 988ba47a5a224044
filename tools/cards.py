"""`python -m tools.cards`: writes the table card -> command -> context -> speed of docs/getting-started.md.

Every figure is the planner's, for the model's known shape, so that the page can not say what `kakera plan` does not.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace
from pathlib import Path

from kakera.arch.registry import spec_of
from kakera.arch.spec import ModelSpec
from kakera.plan.known import KNOWN
from kakera.plan.plan import Plan, Wishes
from kakera.plan.search import draft
from kakera.plan.speed import Speed, predict
from kakera.plan.weights import WeightBytes, from_config
from kakera.target.cards import CARDS
from kakera.target.devices import Machine, resolve

PAGE = Path(__file__).parents[1] / "docs" / "getting-started.md"
BEGIN = "<!-- written by `make docs`: change tools/cards.py, not the lines below -->\n"
END = "<!-- end of what `make docs` writes -->\n"

SHAPE = "qwen3.8-27b"
CHECKPOINT = "EschaLabs/Qwen3.8-27B-Escha-W2"
SERVE = f"`kakera serve {CHECKPOINT}`"
HOST_BYTES, HOST_USED = 32 * 2**30, 4 * 10**9  # a usual machine: the page must not depend on the one it is written on
DESKTOP = 500 * 10**6  # of a card that also shows a desktop, or Windows beside WSL2
SMALLER = Wishes(chunk=512)  # what is tried when the default does not fit beside a desktop
PAIR = "rtx5070,rtx5070"
MEASURED = "h200"  # the one card on which the predictions can be held against measurements

HEAD = (
    "| your card | command | context (tokens) | beside a desktop | requests at once | answer, tokens/s: short, full | "
    "prompt, tokens/s |\n| --- | --- | --- | --- | --- | --- | --- |\n"
)


@dataclass(frozen=True)
class Row:
    plan: Plan
    speed: Speed


def table() -> str:
    """Markdown: a row for each card that holds the model, then two cards, those that do not, and the measured one."""
    names = [name for name in CARDS if name.startswith("rtx")]
    planned = {name: planned_on(name) for name in names}
    lines = [_line(title(name), SERVE, row, beside_a_desktop(name)) for name, row in planned.items() if row]
    first, pair = planned[PAIR.partition(",")[0]], planned_on(PAIR)
    assert first and pair
    two = f"2 x {title(PAIR.partition(',')[0])}"
    lines.append(_line(f"{two} (so two of any)", f"{SERVE}, [on the first](#two-cards)", first, ""))
    together = f"`kakera plan {SHAPE} --gpus {PAIR}`"
    lines.append(_line(f"*{two} together: planned, not served yet*", together, pair, ""))
    small = ", ".join(title(name) for name, row in planned.items() if row is None)
    lines.append(f"| {small} | `kakera serve mini`: the 27B does not fit | | | | | |\n")
    if row := planned_on(MEASURED):
        lines.append(
            _line(f"*{MEASURED.upper()}, to compare with [what was measured](#how-good-the-guesses-are)*", "", row, "")
        )
    return HEAD + "".join(lines)


def title(name: str) -> str:
    """ "rtx4070tisuper" -> "RTX 4070 Ti Super 16 GB"."""
    number, suffix = re.fullmatch(r"rtx(\d+)(\w*)", name).groups()  # type: ignore[union-attr]
    words = suffix.replace("tisuper", "Ti Super") if suffix == "tisuper" else suffix.capitalize()
    return f"RTX {number} {words}".rstrip() + f" {round(CARDS[name].memory_mib / 1024)} GB"


def planned_on(gpus: str, wishes: Wishes | None = None, used: int = 0) -> Row | None:
    """The plan on cards of which others use `used` bytes each, or None if it is refused."""
    spec, weights = _model()
    machine = _machine(gpus, used)
    found = draft(spec, replace(wishes or Wishes(), gpus=gpus), machine, weights)
    return Row(found.plan, predict(found.plan, machine, weights)) if found.fits else None


def beside_a_desktop(gpus: str) -> str:
    """The context that is left, and the option that it needs."""
    if row := planned_on(gpus, used=DESKTOP):
        return f"{row.plan.context:,}"
    if row := planned_on(gpus, SMALLER, DESKTOP):
        return f"{row.plan.context:,} with `--chunk {SMALLER.chunk}`"
    return "no room"


@functools.cache
def _model() -> tuple[ModelSpec, WeightBytes]:
    spec = spec_of(KNOWN[SHAPE], planned=True)
    return spec, from_config(spec, KNOWN[SHAPE])


def _machine(gpus: str, used: int) -> Machine:
    machine = resolve(gpus)
    devices = tuple(replace(device, used=used) for device in machine.devices)
    return replace(machine, devices=devices, ram=HOST_BYTES, ram_used=HOST_USED, warnings=())


def _line(name: str, command: str, row: Row, desktop: str) -> str:
    plan, speed = row.plan, row.speed
    answer = f"{_rate(speed.decode_short)}, {_rate(speed.decode_full)}"
    return f"| {name} | {command} | {plan.context:,} | {desktop} | {plan.slots} | {answer} | {_rate(speed.prefill)} |\n"


def _rate(value: float | None) -> str:
    assert value, "cards of the table have known speeds"
    return f"{value:.2g}" if value < 100 else f"{round(value, -1 if value < 1000 else -2):,.0f}"


def written(page: str) -> str:
    """The page with a table of today's planner between the marks."""
    before, _, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert end, f"{PAGE.name} lacks the marks {BEGIN!r} and {END!r}"
    return before + BEGIN + "\n" + table() + "\n" + END + after


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
