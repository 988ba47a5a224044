"""The memory of a device that an engine holds for good, by purpose: what a plan counts, and what a sweep reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from kakera.kv.cache import KVCache
from kakera.model.qwen3_5 import HybridModel
from kakera.model.state import StatePool
from kakera.model.tower import Tower
from kakera.run.store.host import Store

Region = tuple[torch.UntypedStorage, ...]
PAGES, KV, STATES, SCRATCH, WEIGHTS, STAGING = (
    *("KV pages", "windows and scratch of attention", "recurrent states", "scratch"),
    *("weights", "checkpoint staging"),
)


def regions(
    model: HybridModel | None, tower: Tower | None, kv: KVCache, states: StatePool, store: Store, runner: object
) -> dict[str, Region]:
    """Storages on the device of all tensors that a runner's objects hold, each in the first region that has it.

    What classes named ...Scratch hold is scratch wherever it hangs, and so is all that the runner has beside the model,
    the cache, the states and the store. Opaque weights, which a CPU's library packs, are not seen.
    """
    seen: set[int] = set()
    parts: tuple[tuple[str, Any, str], ...] = (
        (PAGES, kv.store.page_tensors(), ""),
        (KV, kv, ""),
        (STATES, states, ""),
        (SCRATCH, model, "Scratch"),
        (WEIGHTS, (model, tower), ""),
        (STAGING, store, ""),
        (SCRATCH, runner, ""),
    )
    found: dict[str, Region] = {}
    for name, root, within in parts:
        new = tuple(_storages(_tensors(root, within), states.device.type, seen))
        found[name] = found.get(name, ()) + new
    return found


def _storages(tensors: Iterable[Tensor], device: str, seen: set[int]) -> Iterator[torch.UntypedStorage]:
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if tensor.device.type == device and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            yield storage


def _tensors(root: Any, within: str) -> Iterator[Tensor]:
    """Tensors reachable through containers and through attributes of this package's objects; `within`: only those in
    objects whose class is called so at its end."""
    open_, visited = [(root, not within)], set()
    while open_:
        item, wanted = open_.pop()
        if isinstance(item, Tensor):
            if wanted:
                yield item
            continue
        if id(item) in visited:
            continue
        visited.add(id(item))
        wanted = wanted or type(item).__name__.endswith(within)
        open_ += [(child, wanted) for child in _children(item)]


def _children(item: Any) -> Iterable[Any]:
    if isinstance(item, dict):
        return list(item.values())  # a thread may be putting something in
    if isinstance(item, list | tuple | set | frozenset):
        return item
    if type(item).__module__.startswith("kakera."):
        return vars(item).values() if hasattr(item, "__dict__") else ()
    return ()
