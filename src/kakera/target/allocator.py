"""How memory is taken of a card's driver: by segments that grow, by pages that can go back, or plainly. No torch.

Both need memory to be mapped behind addresses that are reserved first. Under WSL2 that is blamed for memory that
Windows refuses to keep on the card (docs/developers/decisions.md has the reports), so neither is used there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from kakera.target.wsl import under_wsl

VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # torch's own; of two the first counts (seen in 2.13)
_CHOSEN = re.compile(r"expandable_segments\s*:\s*(True|False)")  # torch takes no other spelling


@dataclass(frozen=True)
class Segments:
    """Whether torch's `expandable_segments` is on, who has chosen that and why. `settings`: what torch is to be told,
    None where it knows."""

    on: bool
    by: str
    why: str
    settings: str | None = None

    @property
    def text(self) -> str:
        return f"expandable_segments is {'on' if self.on else 'off'}, set by {self.by}: {self.why}"


def torch_segments(environ: Mapping[str, str] = os.environ, wsl: bool | None = None) -> Segments:
    """A user who has chosen is left alone, and so is the rest of what a variable says. `wsl` None: as this machine."""
    said = {name: environ[name] for name in VARIABLES if environ.get(name)}
    for name, words in said.items():
        if chosen := _CHOSEN.findall(words):
            return Segments(chosen[-1] == "True", name, "the environment says so")
    if under_wsl() if wsl is None else wsl:
        return Segments(False, "kakera", "under WSL2 it is blamed for memory that the driver refuses")
    why = "segments that grow leave no gaps that a plan would have to hold"
    return Segments(True, "kakera", why, ",".join([*list(said.values())[:1], "expandable_segments:True"]))


def maps_pages(wsl: bool | None = None) -> bool:
    """Whether KV pages lie in memory that can go back to the driver while others need the card."""
    return not (under_wsl() if wsl is None else wsl)
