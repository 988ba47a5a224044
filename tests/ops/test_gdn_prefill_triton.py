"""Gated DeltaNet's prefill kernels on tiny shapes, in Triton's interpreter where there is no GPU.

Held against the plain path in float32: convolution, recurrence token by token, gated norm.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton (Linux)")

from gdn_prefill_world import TINY, World, check, relative

from kakera.arch.blocks import GdnSpec
from kakera.ops import gdn_prefill as gdn
from kakera.ops.gdn_prefill import StateSave, gdn_prefill, segments
from kakera.plan import gdn_plan
from kakera.plan.gdn_plan import scratch_bytes

pytestmark = pytest.mark.slow  # the interpreter takes seconds a case
TOKENS = 130
SAVES = [(TOKENS, torch.float32), (64, torch.float16), (128, torch.float32), (64, torch.float32)]


@pytest.fixture(scope="module")
def world():
    return World(TINY, TOKENS)


@pytest.fixture(scope="module")
def whole(world):
    return world.run()


@pytest.mark.parametrize("tokens", [1, 64])
def test_lengths(tokens):
    check(World(TINY, tokens, torch.float16))


@pytest.mark.parametrize(
    "spec", [GdnSpec(2, 2, 16, 16, 2), GdnSpec(1, 3, 32, 16, 4), GdnSpec(1, 1, 16, 128, 4)], ids=str
)
def test_shapes(spec):
    check(World(spec, 65, torch.float16))


def test_saves_inside_and_at_the_end_change_no_bit(world, whole):
    saves = [world.save(tokens, dtype) for tokens, dtype in SAVES]
    y, state, columns = check(world, saves)
    assert all(torch.equal(a, b) for a, b in zip((y, state, columns), whole, strict=True))
    assert torch.equal(saves[0].state_VKD, state) and torch.equal(saves[0].conv_WC, columns)
    assert torch.equal(saves[1].state_VKD, saves[3].state_VKD.half())


def test_cuts_on_the_grid_and_ranges_change_no_bit(world, whole, monkeypatch):
    assert all(torch.equal(a, b) for a, b in zip(world.run(cuts=[64]), whole, strict=True))
    monkeypatch.setattr(gdn_plan, "RANGE", 64)
    save = world.save(128)
    assert all(torch.equal(a, b) for a, b in zip(world.run([save]), whole, strict=True))
    assert torch.equal(save.conv_WC, world.mixed[125:128, : TINY.conv_channels])


@pytest.mark.parametrize("rate", [0.0, -30.0])
def test_states_that_never_and_that_always_forget(rate):
    world = World(TINY, 65, torch.float16)
    world.rate_V = torch.full_like(world.rate_V, rate)
    check(world)


def test_the_same_key_again_and_again_written_in_full():
    """The inverse has its largest entries where keys are equal, nothing is forgotten and beta is 1.

    An output is a sum of 64 corrections of opposite signs then, and has the rounding of each: 3e-3.
    """
    world = World(TINY, 65, torch.float16)
    keys = slice(TINY.k_heads * TINY.k_dim, 2 * TINY.k_heads * TINY.k_dim)
    world.mixed[:, keys] = world.mixed[0, keys]
    world.columns[:, keys] = world.mixed[0, keys]
    gates = TINY.conv_channels + TINY.v_heads * TINY.v_dim
    world.mixed[:, gates : gates + TINY.v_heads] = 30.0
    world.rate_V = torch.zeros_like(world.rate_V)
    check(world, bound=5e-3)


def test_values_beyond_fp16_are_clamped_and_pass():
    world = World(TINY, 64, torch.float16)
    world.mixed[5, : TINY.conv_channels] = 1e30
    world.state[0, 0, 0] = 1e30
    y, *_ = world.run()
    assert y.isfinite().all()


def test_parts_of_a_span():
    def cut(*tokens):
        none = torch.empty(0)
        parts = segments(64, 300, [StateSave(n, none, none) for n in tokens])
        return [(begin, stop, [save.tokens for save in saves]) for begin, stop, saves in parts]

    assert cut() == [(64, 300, [])]
    assert cut(300, 128, 64, 400, 128) == [(64, 128, [128, 128]), (128, 300, [300])]


def test_scratch_is_what_the_plan_says():
    world = World(TINY, 150)
    held = vars(gdn._Span(world.mixed, world, TINY, 1e-6, world.state, world.columns, world.mixed))
    names = ("_qk", "_v", "_o", "_inverse", "_scores", "_overlap", "_decays")
    assert sum(held[name].untyped_storage().nbytes() for name in names) == scratch_bytes(TINY, 150)
    large = GdnSpec(16, 48, 128, 128, 4)
    assert scratch_bytes(large, 100_000) == scratch_bytes(large, 8192) < 420e6


def test_what_the_kernels_do_not_have_is_refused():
    world = World(TINY, 100)
    for tokens in (0, 65, 101, 128):
        with pytest.raises(ValueError, match="multiple of 64 or the end"):
            world.run([world.save(tokens)])
    for spec in (GdnSpec(1, 1, 24, 16, 4), GdnSpec(1, 1, 16, 8, 4), GdnSpec(1, 1, 16, 16, 3)):
        with pytest.raises(ValueError, match="powers of two"):
            World(spec, 3).run()
    with pytest.raises(ValueError, match="contiguous"):
        gdn_prefill(world.mixed, world, TINY, 1e-6, world.state.transpose(1, 2), world.columns)
    with pytest.raises(ValueError, match="next to each other"):
        gdn_prefill(world.mixed[:, :50], world, TINY, 1e-6, world.state, world.columns)
    with pytest.raises(ValueError, match="float32"):
        gdn_prefill(world.mixed, world, TINY, 1e-6, world.state.half(), world.columns)


def test_the_check_of_errors_sees_a_wrong_token(whole):
    y = whole[0]
    wrong = y.clone()
    wrong[64] = y[63]
    assert relative(wrong, y) > 1e-2
