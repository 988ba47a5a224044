"""Sleeper: gives a device's memory back while the engine lives on, and takes it again.

Pages and states are given back as they are: what they held is in the host store by then (`Scheduler.suspend`). The rest
is copied to the host: windows, scratch with its counters, tables, places, a vision tower, and at level 1 the weights.
Level 2 drops the model and reads it again. Storages of tensors are emptied and filled again, so every view of them
stays what it was. Their addresses change: graphs are captured again, and nothing else keeps an address from one call to
the next.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

import torch

from kakera.contract.events import SleepState
from kakera.errors import KakeraError, RequestRefused
from kakera.model.load import Progress
from kakera.model.qwen3_5 import HybridModel
from kakera.run.host_copy import HostCopy, bytes_of
from kakera.run.regions import KV, PAGES, SCRATCH, STAGING, STATES, WEIGHTS, Region, regions
from kakera.run.step.runner import TorchRunner
from kakera.target.as_torch import target_of
from kakera.target.devices import host_memory

log = logging.getLogger(__name__)
Files = tuple[tuple[str, int, int], ...]


class Sleeper:
    """Of one runner, which must have nothing to compute and nothing on the device that it needs."""

    def __init__(self, runner: TorchRunner, directory: Path, load: Callable[[Progress], HybridModel]):
        """`load` reads the model from `directory`, as it was read at the start."""
        self._runner, self._directory, self._load = runner, directory, load
        self._files = files_of(directory)
        self._cards = target_of(runner.device).has_cards
        self._level = 0
        self._given: list[tuple[torch.UntypedStorage, int]] = []  # pages and states, with their sizes
        self._weights, self._rest = HostCopy(()), HostCopy(())
        self._reserved = 0  # by torch, before the sleep: what it takes again when it wakes
        self._pages = self._mapped = 0  # and beside it: pages that had memory of their own, and its bytes

    def sleep(self, level: int) -> SleepState:
        """Raises RequestRefused (503) if the host has no room for what level 1 keeps; the engine is as before then."""
        began = time.monotonic()
        if level > self._level:
            if self._level == 0:
                self._fall(level)
            if level > 1:
                self._runner.put_model(None)
                self._weights = HostCopy(())
            self._level = level
            self._give_back()
        return self._state(began)

    def wake_up(self, progress: Progress) -> SleepState:
        """`progress` of reading, at level 2. Raises RequestRefused (503) if the device has no room, or the model can
        not be read as it was: it sleeps on then, and may be woken again."""
        began = time.monotonic()
        if self._level:
            self._check_device()
            try:
                self._take_again(progress)
            except (KakeraError, RuntimeError, OSError) as error:
                self._empty()
                said = str(error).partition("\n")[0]  # what follows is about debugging kernels
                raise RequestRefused(f"the engine sleeps on: {said}", status=503, code="can_not_wake") from error
            self._weights, self._rest, self._given, self._level = HostCopy(()), HostCopy(()), [], 0
        return self._state(began)

    def _fall(self, level: int) -> None:
        self._runner.forget_slots()
        found = self._regions(None)
        if self._cards:  # else all that would be kept is in the host's memory already
            torch.cuda.synchronize()  # what goes to the host store has arrived
            self._reserved = torch.cuda.memory_reserved()
            kept = (*found[KV], *found[SCRATCH], *found[STAGING], *found[WEIGHTS])  # of these a vision tower
            weights = self._of_model(found) if level == 1 else ()
            self._rest, self._weights = _to_host(kept), _to_host(weights)
        pool = self._runner.kv.store.pool
        self._pages, self._mapped = pool.held, pool.mapped_bytes
        given = (*found[PAGES], *found[STATES])
        self._given = [(storage, storage.nbytes()) for storage in given]
        self._empty()

    def _regions(self, model: HybridModel | None) -> dict[str, Region]:
        """Of what lasts; without the graphs, which go with all that they hold."""
        runner = self._runner
        tower = None if runner.images is None else runner.images.tower
        found = regions(model, tower, runner.kv, runner.states, runner.store, (runner.tables, runner.chooser))
        return {name: tuple(each for each in region if each.resizable()) for name, region in found.items()}

    def _of_model(self, others: dict[str, Region]) -> Region:
        """Weights, and scratch that hangs at them."""
        known = {storage.data_ptr() for region in others.values() for storage in region}
        everything = (storage for region in self._regions(self._runner.model).values() for storage in region)
        return tuple(storage for storage in everything if storage.data_ptr() not in known)

    def _empty(self) -> None:
        """Also what a waking that failed has taken."""
        if self._level > 1:
            self._runner.put_model(None)
        if self._runner.graphs is not None:
            self._runner.graphs.release()
        for storage, _ in self._given:
            storage.resize_(0)
        self._runner.kv.store.pool.hold(0)
        self._rest.empty()
        self._weights.empty()
        self._give_back()

    def _take_again(self, progress: Progress) -> None:
        """In the order of a start: reading needs room beside the weights."""
        runner = self._runner
        if self._level > 1:
            if files_of(self._directory) != self._files:
                raise KakeraError(
                    f"files in {self._directory} have changed since the start, and what the prefix cache holds is of "
                    "the model as it was: restart the server"
                )
            runner.put_model(self._load(progress))
        for storage, size in self._given:
            storage.resize_(size)
            bytes_of(storage).zero_()  # what held weights may read as NaN, and kernels may multiply what they mask
        if runner.kv.store.pool.hold(self._pages) < self._pages:
            raise KakeraError("the card has no room for the KV pages")
        self._rest.bring_back()
        self._weights.bring_back()
        if runner.graphs is not None:
            runner.graphs.capture(runner.model)
        if self._cards:  # what steps take beside what lasts: if it is gone, it is better known now
            torch.empty(max(0, self._reserved - torch.cuda.memory_reserved()), dtype=torch.uint8, device=runner.device)
            torch.cuda.synchronize()

    def _check_device(self) -> None:
        if not self._cards:
            return
        needed, free = self._reserved - torch.cuda.memory_reserved() + self._mapped, torch.cuda.mem_get_info()[0]
        if free < needed:
            raise RequestRefused(
                f"the engine sleeps on: to wake it needs {needed / 1e9:.2f} GB of the card and {free / 1e9:.2f} GB are "
                "free; close what else uses the card and wake it again",
                status=503,
                code="no_device_memory",
            )

    def _give_back(self) -> None:
        if self._cards:
            getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)()  # a private name: 32 MB a stream
            torch.cuda.empty_cache()

    def _state(self, began: float) -> SleepState:
        used = 0
        if self._cards:
            free, total = torch.cuda.mem_get_info()
            used = total - free
        return SleepState(self._level, time.monotonic() - began, used, self._weights.bytes + self._rest.bytes)


def files_of(directory: Path) -> Files:
    """Names, sizes and times of what a model is read from."""
    paths = sorted([*directory.glob("*.json"), *directory.glob("*.safetensors")])
    return tuple((path.name, (status := path.stat()).st_size, status.st_mtime_ns) for path in paths)


def _to_host(storages: Region) -> HostCopy:
    needed, (total, used) = sum(storage.nbytes() for storage in storages), host_memory()
    try:
        if needed > total - used:
            raise MemoryError
        return HostCopy(storages)
    except (OSError, MemoryError):
        raise RequestRefused(
            f"level 1 takes {needed / 1e9:.2f} GB of host memory and {(total - used) / 1e9:.2f} GB are free; level 2 "
            "keeps no weights and reads them again",
            status=503,
            code="no_host_memory",
        ) from None
