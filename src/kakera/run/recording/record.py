"""RecordingRunner: a runner whose steps go to a file as well. What can not be written ends the recording only."""

from __future__ import annotations

import hashlib
import logging
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import replace

import msgspec
import torch
from torch import Tensor

from kakera.contract.events import RegionRead
from kakera.contract.grid import PAGE
from kakera.contract.recording import Recorder
from kakera.contract.step import SamplingInput, Segment, StepPlan, StepResult
from kakera.run.interface import NOTHING_SAMPLED, Runner
from kakera.run.step.runner import TorchRunner
from kakera.target.as_torch import target_of

log = logging.getLogger(__name__)
HASH_BYTES = 8


class RecordingRunner:
    """Executes by `runner`. On a CPU, where the same step gives the same bits, rows leave hashes of it; not of a rank
    among several, since no other number of ranks has its bits."""

    def __init__(self, runner: Runner, recorder: Recorder):
        self.runner = runner
        self._recorder: Recorder | None = recorder

    def sweep(self) -> list[RegionRead]:
        return self.runner.sweep()

    def execute(self, plan: StepPlan, sampling: Mapping[str, SamplingInput] = NOTHING_SAMPLED) -> StepResult:
        if self._recorder is None:
            return self.runner.execute(plan, sampling)
        before = {name: replace(given, context=array("i", given.context)) for name, given in sampling.items()}
        result = self.runner.execute(plan, sampling)
        try:
            kept = {row.request_id: len(row.tokens) for row in result.rows}
            rows = rows_kept(plan.decode, kept) + plan.prefill
            hashes = prints(self.runner, rows) if isinstance(self.runner, TorchRunner) else ()
            self._recorder.add(plan, before, result, hashes)
            if self._recorder.full:
                log.warning("the recording has its full size and ends at step %d", plan.step)
                self._recorder = None
        except Exception as error:  # whatever it is: it is not the request's fault
            said = error.strerror if isinstance(error, OSError) else repr(error)
            log.warning("the recording ends at step %d: %s", plan.step, said)
            self._recorder = None
        return result


def prints(runner: TorchRunner, rows: Iterable[Segment]) -> list[bytes]:
    """Of each row: hashes of its slot's recurrent state and of the pages it completed. None on a GPU, whose bits are
    not the same twice."""
    if target_of(runner.device).has_cards:
        return []
    return [_hash(runner.states.of(row.slot)) + _hash(complete_pages(runner, row)) for row in rows]


def rows_kept(rows: Iterable[Segment], kept: Mapping[str, int]) -> tuple[Segment, ...]:
    """Decode rows without the drafts that were not chosen. `kept`: by request, how many tokens each has yielded."""
    return tuple(_cut(row, kept.get(row.request_id, 0)) for row in rows)


def _cut(row: Segment, kept: int) -> Segment:
    if not 0 < kept < len(row.tokens):
        return row
    gone = len(row.tokens) - kept
    saves = tuple(save for save in row.saves if save.position <= row.end - gone)
    return msgspec.structs.replace(row.cut(kept), sampled=row.sampled - gone, saves=saves)


def complete_pages(runner: TorchRunner, row: Segment) -> tuple[Tensor, ...]:
    """The pages that end within the row: behind the last token of another lies whatever was there."""
    return runner.kv.store.read_pages(runner.tables.of(row)[row.start // PAGE : row.end // PAGE])


def _hash(tensors: Iterable[Tensor]) -> bytes:
    found = hashlib.blake2b(digest_size=HASH_BYTES)
    for tensor in tensors:
        found.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return found.digest()
