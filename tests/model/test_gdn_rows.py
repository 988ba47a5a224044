"""Rows of several tokens through the kernels' route: states, columns and outputs are those of one token at a time, and
so is what is saved, wherever in a row. `gdn_step_reference` stands in for the launch where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from kakera.arch.blocks import GdnSpec
from kakera.kv.batch import Batch, CheckpointTensors, Save, Span
from kakera.model.mixers import gdn_kernels
from kakera.model.mixers.gdn import core_for
from kakera.model.mixers.gdn_kernels import KernelCore
from kakera.model.mixers.gdn_plain import PlainCore
from kakera.model.state import StatePool
from kakera.model.weights import GdnWeights
from kakera.ops.gdn_step import StepRows, gdn_step, gdn_step_reference
from kakera.target.target import CPU, CUDA, Target

EPS, LAYERS, SLOTS, START = 1e-6, 2, 9, 61
ALL = tuple(range(1, 9))


@dataclass(frozen=True)
class Row:
    """`saves`: behind how many of its tokens."""

    tokens: int
    saves: tuple[int, ...] = ()


@dataclass
class World:
    """Layers of random weights and the states of SLOTS sequences; `step` is the launch or what stands in for it."""

    spec: GdnSpec
    step: Callable[..., Tensor]
    device: torch.device
    dtype: torch.dtype
    tolerance: float

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.weights = [self._weights() for _ in range(LAYERS)]
        self.states = self._states()
        self.states.state_LSVKD.normal_().mul_(0.1)
        self.states.conv_LSWC.normal_()

    def _weights(self) -> GdnWeights:
        V, D = self.spec.v_heads, self.spec.v_dim
        make = lambda *shape: torch.randn(*shape, device=self.device)  # noqa: E731
        return GdnWeights(None, None, make(4, self.spec.conv_channels) / 2, -make(V).exp(), make(V), make(D))

    def _states(self) -> StatePool:
        spec = SimpleNamespace(states=dict.fromkeys(self.spec.states(), LAYERS), drafting=False)
        return StatePool(spec, SLOTS, self.device, self.dtype)  # type: ignore[arg-type]

    def copy(self) -> StatePool:
        copied = self._states()
        copied.state_LSVKD.copy_(self.states.state_LSVKD)
        copied.conv_LSWC.copy_(self.states.conv_LSWC)
        return copied

    def mixed(self, tokens: int) -> Tensor:
        width = self.spec.conv_channels + self.spec.v_heads * (self.spec.v_dim + 2)
        return (torch.randn(LAYERS, tokens, width + 24, device=self.device) * 2).to(self.dtype)[..., :width]

    def checkpoint(self, position: int) -> CheckpointTensors:
        parts = {name: torch.full_like(x[:, 0], float("nan")) for name, x in self.states.parts.items()}
        return CheckpointTensors(position, parts)

    def one_token(self, states: StatePool, slot: int, mixed_LX: Tensor) -> Tensor:
        """A token through all layers of one slot, [LAYERS, V D]."""
        slots_R, ones_R, offsets = (
            torch.tensor(x, dtype=torch.int32, device=self.device) for x in ([slot], [1], [0, 1])
        )
        arrived = torch.zeros(1, self.spec.k_heads, dtype=torch.int32, device=self.device)
        rows = StepRows(offsets, slots_R, ones_R, arrived)
        live = zip(self.weights, mixed_LX, states.state_LSVKD, states.conv_LSWC, strict=True)
        return torch.cat([self.step(x_X[None], w, self.spec, EPS, rows, *parts) for w, x_X, *parts in live])

    def close(self, mine: Tensor, expected: Tensor) -> None:
        torch.testing.assert_close(mine, expected, rtol=0, atol=self.tolerance)


@pytest.fixture(
    params=[
        "reference",
        pytest.param(
            "kernel",
            marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")],
        ),
    ]
)
def world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> World:
    if request.param == "kernel":  # the same bits however tokens are handed in
        return World(GdnSpec(4, 12, 128, 128, 4), gdn_step, torch.device("cuda", 0), torch.bfloat16, 0.0)
    monkeypatch.setattr(gdn_kernels, "gdn_step", gdn_step_reference)
    return World(GdnSpec(2, 6, 16, 16, 4), gdn_step_reference, torch.device("cpu"), torch.float32, 1e-5)


def check(world: World, rows: Sequence[Row]) -> None:
    """Row i lives in slot 8 - i and starts at START + i."""
    spans: list[Span] = []
    offset = 0
    for i, row in enumerate(rows):
        saves = tuple(Save(world.checkpoint(START + i + count)) for count in row.saves)
        spans.append(Span(offset, row.tokens, START + i, SLOTS - 1 - i, torch.empty(0), saves))
        offset += row.tokens
    tokens_T = torch.zeros(offset, dtype=torch.int64, device=world.device)
    batch = Batch(tokens_T, tokens_T, tuple(spans), (), tokens_T)
    mixed_LTX, expected, found = world.mixed(offset), world.copy(), world.copy()
    made = KernelCore(world.spec, EPS).plan(batch, found)
    y_LTI = torch.stack([made.run(i, w, mixed_LTX[i]) for i, w in enumerate(world.weights)])
    for span in spans:
        wanted = {save.position: save.into for save in span.saves}
        for n in range(span.count):
            output = world.one_token(expected, span.slot, mixed_LTX[:, span.offset + n])
            world.close(y_LTI[:, span.offset + n], output)
            if (save := wanted.pop(span.start + n + 1, None)) is not None:
                world.close(save.state_LVKD, expected.state_LSVKD[:, span.slot])
                assert torch.equal(save.conv_LCW, expected.conv_LSWC[:, span.slot])
        assert not wanted
    world.close(found.state_LSVKD, expected.state_LSVKD)
    assert torch.equal(found.conv_LSWC, expected.conv_LSWC)


@pytest.mark.parametrize("tokens", ALL)
def test_a_save_at_any_place_of_a_row(world: World, tokens: int):
    for place in range(1, tokens + 1):
        check(world, [Row(tokens, (place,))])


@pytest.mark.parametrize("tokens", ALL)
def test_saves_at_all_places_of_a_row(world: World, tokens: int):
    check(world, [Row(tokens, tuple(range(1, tokens + 1)))])


@pytest.mark.parametrize("place", ALL)
def test_rows_of_all_lengths_side_by_side(world: World, place: int):
    check(world, [Row(tokens, (min(place, tokens),)) for tokens in ALL])


def test_rows_with_and_without_saves(world: World):
    check(world, [Row(8, (7, 2, 5)), Row(1), Row(3), Row(5, (5,)), Row(1, (1,)), Row(4, (1, 4)), Row(8), Row(2, (1,))])


@pytest.mark.parametrize(
    ("target", "dtype", "k_dim", "core"),
    [
        (CUDA, torch.bfloat16, 128, KernelCore),
        (CUDA, torch.float16, 128, KernelCore),
        (CUDA, torch.float32, 128, PlainCore),
        (CUDA, torch.bfloat16, 64, PlainCore),
        (CPU, torch.bfloat16, 128, PlainCore),
    ],
)
def test_who_computes_is_known_from_shapes_dtype_and_target(target: Target, dtype: torch.dtype, k_dim: int, core: type):
    chosen = core_for(GdnSpec(4, 12, k_dim, 128, 4), EPS, target, dtype)
    assert type(chosen) is core and chosen.capturable == (core is KernelCore)


def test_rows_without_saves_are_one_launch(world: World, monkeypatch: pytest.MonkeyPatch):
    launched = []
    step = gdn_kernels.gdn_step
    monkeypatch.setattr(gdn_kernels, "gdn_step", lambda *args: launched.append(len(args[0])) or step(*args))
    check(world, [Row(3), Row(1), Row(8)])
    assert launched == [12] * LAYERS
    launched.clear()
    check(world, [Row(3, (3,)), Row(8, (3,))])  # only what is cut costs a launch
    assert launched == [11, 5] * LAYERS
