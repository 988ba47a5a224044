"""Replay of a recording: the same steps on a model again, what comes of them beside what came then, hits beside cold.

A wrong answer behind a hit is a state, a window or a page that is not what computing the prefix gives. So each time a
recorded step restores a checkpoint, the prefix is computed from its first token in a cache of its own, and everything
that the hit brought is held against it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from kakera.arch.layout import Dtypes, checkpoint_record
from kakera.contract.grid import PAGE, pages_for
from kakera.contract.recording import Header, Input, RecordedStep, Yielded
from kakera.contract.step import ResetSlot, RestoreCheckpoint, SamplingInput, Segment, StepPlan, StepResult
from kakera.errors import UsageError
from kakera.kv.cache import KVCache
from kakera.kv.rotation import Rotation
from kakera.model.state import StatePool
from kakera.plan.plan import Plan
from kakera.run.recording.record import prints, rows_kept
from kakera.run.step.draft_layer import DraftLayer
from kakera.run.step.page_tables import PageTables
from kakera.run.step.runner import TorchRunner
from kakera.run.store.host import CheckpointShape, HostStore
from kakera.target.as_torch import activation_of, target_of

# Largest difference over largest value, of a GPU, of states that were stored in 16 bits, and of what was generated
TOLERANCE = 2**-9


@dataclass(frozen=True)
class Difference:
    """`what` differs in a row of a step: tokens, state and pages (by their hashes), or a part of a hit."""

    step: int
    request_id: str
    what: str
    detail: str


@dataclass
class Report:
    """How far the replay has come. Hits whose prompt is not in the recording, or has images, could not be checked."""

    steps: int = 0
    rows: int = 0
    tokens: int = 0
    hits: int = 0
    hits_unknown: int = 0


class Replay:
    """Carries out recorded steps on a runner that has done nothing yet. `cold`: check hits, which computes every
    restored prefix once more."""

    def __init__(self, runner: TorchRunner, plan: Plan, header: Header, inputs: Sequence[Input], cold: bool = True):
        """`inputs`: all of the recording, since a hit comes before the first token. Raises UsageError if the recording
        is of another vocabulary, needs more pages than there are, or is damaged."""
        if header.vocab != plan.spec.vocab:
            raise UsageError(
                f"the recording is of {header.model} with a vocabulary of {header.vocab} tokens, "
                f"and this model has {plan.spec.vocab}: it is another one"
            )
        if header.pages > plan.pages:
            raise UsageError(f"the recording used {header.pages} pages and only {plan.pages} fit here: --gpus larger")
        self.report = Report()
        self._runner = runner
        self._plan = plan
        self._real = header.prompts
        self._cold = cold
        try:
            self._contexts = {given.request_id: given.tokens for given in inputs}
        except ValueError:
            raise _damaged("the text of a request is cut off") from None
        self._exact = plan.state_dtype == "fp32" and not target_of(runner.device).has_cards
        self._restored: dict[int, RestoreCheckpoint] = {}  # slots whose first row comes in a later step
        self._inputs = {given.request_id: given for given in inputs}

    def step(self, recorded: RecordedStep) -> Iterator[Difference]:
        """One step, and what differs in it. Raises UsageError for a step that no scheduler has planned."""
        try:
            yield from self._step(recorded)
        except (LookupError, ValueError, TypeError, OverflowError, AssertionError, RuntimeError) as error:
            raise _damaged(f"step {recorded.plan.step} can not be carried out ({error!r})") from error

    def _step(self, recorded: RecordedStep) -> Iterator[Difference]:
        plan = self._as_it_went(recorded)
        before = msgspec.structs.replace(plan, decode=(), prefill=(), after=())
        self._runner.execute(before)
        if self._cold:
            yield from self._check_hits(plan)
        result = self._runner.execute(msgspec.structs.replace(plan, before=()), self._sampling(plan))
        self.report.steps += 1
        self.report.rows += len(plan.rows)
        if self._real:
            yield from self._compare(plan, result, {row.request_id: row for row in recorded.yielded})
        for row in recorded.yielded:
            if row.request_id in self._contexts:
                self._contexts[row.request_id].extend(row.tokens)

    def _as_it_went(self, recorded: RecordedStep) -> StepPlan:
        """The plan, with rows as far as they came: what is drafted is kept or not by what was chosen then. A step that
        ran ahead would go on with this run's tokens; stand-ins choose nothing."""
        plan, kept = recorded.plan, {row.request_id: len(row.tokens) for row in recorded.yielded}
        for row in plan.rows:
            if not (0 <= row.slot < self._plan.slots and row.tokens and row.start >= 0):
                raise IndexError(f"{row.request_id} lies in slot {row.slot}, at {row.start}")
            if any(not 0 <= page < self._plan.pages for page in row.new_pages):
                raise IndexError(f"{row.request_id} has pages that there are not")
            if any(not 0 <= token < self._plan.spec.vocab for token in row.tokens):
                raise IndexError(f"{row.request_id} has tokens that there are not")
        plan = msgspec.structs.replace(plan, decode=rows_kept(plan.decode, kept), may_follow=())
        if self._real:
            return plan
        decode, prefill = (tuple(_unsampled(row) for row in rows) for rows in (plan.decode, plan.prefill))
        return msgspec.structs.replace(plan, decode=decode, prefill=prefill)

    def _sampling(self, plan: StepPlan) -> Mapping[str, SamplingInput]:
        wanted = [row.request_id for row in plan.rows if row.sampled or row.scored]
        return {
            name: SamplingInput(name, given.sampling, self._contexts[name], given.prompt_tokens)
            for name in wanted
            if (given := self._inputs.get(name)) is not None
        }

    def _compare(self, plan: StepPlan, result: StepResult, then: Mapping[str, Yielded]) -> Iterator[Difference]:
        hashes = dict(zip((row.request_id for row in plan.rows), prints(self._runner, plan.rows), strict=False))
        for row in result.rows:
            old = then.get(row.request_id) or Yielded(row.request_id, (), "nothing")
            self.report.tokens += len(old.tokens)
            if (row.tokens, row.error) != (old.tokens, old.error):
                detail = f"{row.tokens} {row.error} where the recording has {old.tokens} {old.error}"
                yield Difference(plan.step, row.request_id, "tokens", detail)
            half = len(old.prints) // 2
            new = hashes.get(row.request_id, b"")
            if new and old.prints and new[:half] != old.prints[:half]:
                yield Difference(plan.step, row.request_id, "state", "another recurrent state than recorded")
            if new and old.prints and new[half:] != old.prints[half:]:
                yield Difference(plan.step, row.request_id, "pages", "other contents of the pages it completed")

    def _check_hits(self, plan: StepPlan) -> Iterator[Difference]:
        for action in plan.before:
            if isinstance(action, ResetSlot):
                self._restored.pop(action.slot, None)
            elif isinstance(action, RestoreCheckpoint):
                self._restored[action.slot] = action
        for row in plan.rows:
            if row.slot not in self._restored:
                continue
            restored = self._restored.pop(row.slot)
            context = self._contexts.get(row.request_id, array("i"))
            if len(context) < restored.position or row.positions:  # text alone is computed cold
                self.report.hits_unknown += 1
                continue
            self.report.hits += 1
            found = _held(self._runner, row.slot, restored.position, row.new_pages[: restored.position // PAGE])
            cold = cold_prefix(self._runner, self._plan, context[: restored.position])
            exact = self._exact and not self._generated(context, restored.position)
            for name, one in found.items():
                if (detail := _gap(one, cold[name], exact)) is not None:
                    yield Difference(plan.step, row.request_id, f"hit of {restored.position} tokens: {name}", detail)

    def _generated(self, context: array[int], position: int) -> bool:
        """Whether a request has generated a part of this prefix: what decode rows write differs by rounding."""
        for name, given in self._inputs.items():
            told, prompt = self._contexts[name], given.prompt_tokens
            if prompt < min(position, len(told)) and told[: prompt + 1] == context[: prompt + 1]:
                return True
        return False


def cold_prefix(like: TorchRunner, plan: Plan, tokens: Sequence[int]) -> dict[str, Tensor]:
    """What a slot and its pages hold behind `tokens`, whose number is a multiple of PAGE, computed from the first one
    by the model of `like`, in its chunks, with nothing cached."""
    pages = pages_for(len(tokens)) + 1
    device, dtype = like.device, like.model.weights.embedding.dtype
    rotation = Rotation.load(Path(plan.rotation), plan.spec) if plan.rotation else None
    kv = KVCache(plan.spec, plan.kv, pages, 1, rotation, device, plan.chunk, dtype)
    states = StatePool(plan.spec, 1, device, dtype)
    record = checkpoint_record(plan.spec, plan.kv.checkpoint_pages, Dtypes(plan.state_dtype, activation_of(dtype)))
    store = HostStore(CheckpointShape(record, device), kv.store, states)
    tables = PageTables(1, pages, device)
    drafts = DraftLayer(like.model, kv.backend, states, tables) if plan.spec.drafting else None
    runner = TorchRunner(like.model, kv, states, store, tables, like.chooser, drafts=drafts)
    for start in range(0, len(tokens), plan.chunk):
        piece = tuple(tokens[start : start + plan.chunk])
        known, end = pages_for(start), pages_for(start + len(piece))
        row = Segment("cold", 0, piece, start, known, tuple(range(known, end)))
        runner.execute(StepPlan(0, (ResetSlot(0),) if start == 0 else (), prefill=(row,)))
    return _held(runner, 0, len(tokens), range(len(tokens) // PAGE))


def _held(runner: TorchRunner, slot: int, position: int, pages: Sequence[int]) -> dict[str, Tensor]:
    """By name: what a sequence of `position` tokens goes on from."""
    record = runner.store.new_checkpoint(position)
    runner.states.save(slot, record)
    runner.kv.store.save_window(slot, record)
    parts = {name: value.clone() for name, value in record.parts.items() if name != "hidden"}
    stored = runner.kv.store.read_pages(torch.tensor(pages, dtype=torch.int64, device=runner.device))
    parts |= {f"pages ({i})": tensor for i, tensor in enumerate(stored)}
    return {**parts, "sink": runner.kv.store.save_sink(slot)}


def _gap(one: Tensor, other: Tensor, exact: bool) -> str | None:
    """In words, if the two differ: by a bit where they must not, else by more than the tolerance."""
    if torch.equal(one, other):
        return None
    if not one.is_floating_point():
        share = float((one != other).float().mean())
        return None if not exact and share < TOLERANCE else f"{share:.2%} of its bytes differ"
    gap = float((one.float() - other.float()).abs().max() / other.float().abs().max().clamp(min=1e-30))
    step = torch.finfo(one.dtype).eps  # the last bit of a value may fall the other way
    return None if not exact and gap < max(TOLERANCE, step) else f"differs by {gap:.2e} of its largest value"


def _unsampled(row: Segment) -> Segment:
    return msgspec.structs.replace(row, sampled=0, scored=0)


def _damaged(what: str) -> UsageError:
    return UsageError(f"the recording is damaged, or of another model: {what}")
