"""How often guesses are right, by where they come from, by depth, temperature and kind of text. No speed is told here:
what a guess is worth depends on the machine."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from kakera.contract.request import Request, Sampling
from kakera.contract.step import StepResult
from kakera.evaluate.data import load_cases
from kakera.evaluate.suites import Reader
from kakera.evaluate.windows import cut_held_out
from kakera.plan.plan import MOST_DRAFTS
from kakera.run.engine import LocalEngine
from kakera.run.generate import generate
from kakera.schedule.drafts import Checked, Drafter, Drafts
from kakera.schedule.look_up import LookUp

TEMPERATURES = (0.0, 1.0)
NEW_TOKENS = 160
TEXT_TOKENS = 256  # of held-out text, which goes on
COPIED_TOKENS = 128
SOURCES = ("layer", "look-up")
Prompts = Mapping[str, Sequence[Sequence[int]]]


@dataclass(frozen=True)
class Tally:
    """`rounds`: rows that carried guesses; `made`, `right`: guesses of each depth that were checked behind right ones,
    and right ones; `tokens`: all that was generated."""

    texts: str
    source: str
    temperature: float
    tokens: int
    rounds: int
    made: tuple[int, ...]
    right: tuple[int, ...]

    @property
    def json(self) -> dict[str, Any]:
        return {**asdict(self), "accepted_tokens": sum(self.right)}


class _Counted(Drafts):
    """Drafts that keep count of what became of them."""

    def __init__(self, drafter: Drafter | None, most: int, layer: bool):
        super().__init__(drafter, most, layer=layer)
        self.rounds = 0
        self.made, self.right = [0] * most, [0] * most

    def observe(self, rows: Sequence[Checked], result: StepResult, beside_prompts: bool) -> None:
        super().observe(rows, result, beside_prompts)
        for row in rows:
            self.rounds += row.drafts > 0
            for depth in range(min(row.drafts, row.accepted + 1)):
                self.made[depth] += 1
                self.right[depth] += depth < row.accepted


def prompts(reader: Reader, limit: int, seed: int) -> Prompts:
    """By kind of text, at most `limit` of each: held-out text that goes on, conversations with tools and for JSON, and
    text that is to be copied, whole or with one word changed."""
    windows = cut_held_out(reader.tokenizer, TEXT_TOKENS, 2 * limit, None, seed)
    rng = random.Random(seed)

    def asked(messages: list[dict[str, Any]], tools: Any = None) -> Sequence[int]:
        return reader.template.prompt(messages, tools, {"enable_thinking": False}).tokens

    def said(text: str) -> Sequence[int]:
        return asked([{"role": "user", "content": text}])

    pieces = [reader.tokenizer.decode(window[:COPIED_TOKENS]) for window in windows[-limit:]]
    words = [rng.choice([word for word in piece.split() if len(word) > 3] or ["the"]) for piece in pieces]
    suites = {suite: load_cases(suite, None, limit, seed) for suite in ("tools", "json")}
    return {
        "text": windows[:limit],
        **{name: [asked(case["messages"], case.get("tools")) for case in cases] for name, cases in suites.items()},
        "copy": [said(f"Repeat this text word for word:\n{piece}") for piece in pieces],
        "edit": [
            said(f"Repeat this text with {word!r} changed to 'something':\n{piece}")
            for piece, word in zip(pieces, words, strict=True)
        ],
    }


def acceptance(
    engine: LocalEngine,
    texts: Prompts,
    depth: int,
    layer: bool,
    ends: tuple[int, ...],
    on_done: Callable[[], None] = lambda: None,
) -> list[Tally]:
    """Of the draft layer, `depth` guesses a round, if the engine computes one, and of look-ups, as many as they make.
    Each request runs alone, and always has room for what is guessed."""
    found = []
    for temperature in TEMPERATURES:
        for name, some in texts.items():
            for source in SOURCES if layer else SOURCES[1:]:
                of_layer = source == "layer"
                drafts = _Counted(None, depth, True) if of_layer else _Counted(LookUp(), MOST_DRAFTS, False)
                engine.scheduler.drafts = drafts
                tokens = 0
                for i, prompt in enumerate(some):
                    sampling = Sampling(NEW_TOKENS, seed=i, temperature=temperature, stop_token_ids=ends)
                    (answer,) = generate(engine, [Request(f"{name}-{i}", prompt, sampling)]).values()
                    tokens += len(answer.tokens)
                    on_done()
                found.append(
                    Tally(name, source, temperature, tokens, drafts.rounds, tuple(drafts.made), tuple(drafts.right))
                )
    return found


def table(title: str, tallies: Sequence[Tally], depth: int) -> Table:
    shown = Table(title=title, title_justify="left", show_edge=False, pad_edge=False)
    for name in ("texts", "guesses of", "T", "tokens", "rounds", "right", "of these by depth, if all before are"):
        shown.add_column(name, justify="left" if name in ("texts", "guesses of") else "right")
    for tally in tallies:
        each = zip(tally.right[:depth], tally.made[:depth], strict=True)
        depths = "  ".join(f"{right / made:4.0%}" if made else "   –" for right, made in each)
        all_made = sum(tally.made)
        share = f"{sum(tally.right) / all_made:.0%}" if all_made else "–"
        numbers = (f"{tally.temperature:g}", f"{tally.tokens:,}", f"{tally.rounds:,}", share, depths)
        shown.add_row(tally.texts, tally.source, *numbers)
    return shown
