"""Records of a sequence as named shapes: what a running request, a checkpoint, a sink and a page hold. No torch.

A plan sums their bytes, allocators take their shapes, stores copy part by part: a state that a block declares is in all
of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from kakera.arch.spec import ModelSpec
from kakera.arch.tensors import Precision, State
from kakera.contract.grid import PAGE

Dtype = Literal["fp32", "fp16", "bf16", "uint8"]
DTYPE_BYTES: dict[Dtype, int] = {"fp32": 4, "fp16": 2, "bf16": 2, "uint8": 1}
WINDOW_DTYPE: Dtype = "bf16"  # of sink and window of a lossy KV codec


@dataclass(frozen=True)
class Part:
    """One tensor of a record. A state's first axis counts the layers that have it."""

    name: str
    shape: tuple[int, ...]
    dtype: Dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


Record = tuple[Part, ...]


@dataclass(frozen=True)
class Dtypes:
    """Of recurrent states, and of activations."""

    state: Dtype
    activation: Dtype

    def of(self, precision: Precision) -> Dtype:
        if precision == "state":
            return self.state
        if precision == "activation":
            return self.activation
        if precision == "bf16":
            return "bf16"
        raise ValueError("keys and values have the dtypes of their codec")


def record_bytes(record: Record) -> int:
    return sum(part.bytes for part in record)


def slot_record(spec: ModelSpec, activation: Dtype) -> Record:
    """The live states of one running request; float32 where the cold path must not round."""
    dtypes = Dtypes("fp32", activation)
    return tuple(_part(state, layers, dtypes) for state, layers in spec.states.items() if state.lifetime == "slot")


def checkpoint_record(spec: ModelSpec, window_pages: int, dtypes: Dtypes) -> Record:
    """What a resumed request needs beside its pages and its sink: the states, `window_pages` pages of 16-bit keys and
    values, and what a draft layer takes of the last token."""
    states = spec.states.items()
    kept = tuple(_part(state, n, dtypes) for state, n in states if state.lifetime != "page" and state.kept)
    window = tuple(
        Part(f"window_{state.name}", (n, window_pages, state.shape[0], PAGE, *state.shape[1:]), WINDOW_DTYPE)
        for state, n in states
        if state.dtype == "codec" and window_pages
    )
    width = spec.hidden if spec.draft is None else spec.draft.width
    return (*kept, *window, Part("hidden", (width,), dtypes.activation))


def sink_record(spec: ModelSpec) -> Record:
    """One 16-bit page of all layers: keys, then values."""
    held = [(state, n) for state, n in spec.states.items() if state.dtype == "codec"]
    if not held:
        return ()
    state, layers = held[0]
    return (Part("sink", (layers, len(held), state.shape[0], PAGE, *state.shape[1:]), WINDOW_DTYPE),)


def page_record(spec: ModelSpec, vector_bytes: Callable[[int], int]) -> Record:
    """One page of all layers. `vector_bytes`: of a coded vector of so many channels."""
    found = []
    for state, layers in spec.states.items():
        entries = PAGE // state.tokens_per_entry
        if state.dtype == "codec":
            heads, width = state.shape
            found.append(Part(state.name, (layers, heads, entries, vector_bytes(width)), "uint8"))
        elif state.lifetime == "page":
            found.append(Part(state.name, (layers, entries, *state.shape), Dtypes("fp32", "bf16").of(state.dtype)))
    return tuple(found)


def _part(state: State, layers: int, dtypes: Dtypes) -> Part:
    return Part(state.name, (layers, *state.shape), dtypes.of(state.dtype))
