"""Gated DeltaNet's prefill kernels on a GPU at real sizes, and compiled for every promised card without one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton (Linux)")

from gdn_prefill_compile import ARCHITECTURES
from gdn_prefill_world import World, check

from kakera.arch.blocks import GdnSpec
from kakera.ops.gdn_prefill import gdn_prefill
from kakera.plan.gdn_plan import scratch_bytes

SPECS = {
    "27B": GdnSpec(16, 48, 128, 128, 4),
    "9B": GdnSpec(16, 32, 128, 128, 4),
    "reference": GdnSpec(4, 12, 128, 128, 4),
}
SHARED_BYTES = 99 * 1024  # of a block, on every card but those below
SHARED_BYTES_HOPPER = 227 * 1024
SPILLED_BYTES = 64  # of a thread: the state pass keeps 250 registers busy, and addresses of its end spill


@pytest.mark.compile
def test_kernels_compile_for_every_card():
    """In a process of its own: this one may have Triton's interpreter in place of its compiler."""
    from gdn_prefill_compile import __file__ as script

    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    lines = subprocess.run(
        [sys.executable, script, *map(str, ARCHITECTURES)], env=environment, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert len(lines) == 4 * len(ARCHITECTURES), lines
    for line in lines:
        arch, _, shared, _, stack = line.split()
        assert int(shared) <= (SHARED_BYTES_HOPPER if arch == "90" else SHARED_BYTES), line
        assert int(stack) <= SPILLED_BYTES, f"spills: {line}"


@pytest.fixture(autouse=True)
def exact_reference():
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
class TestOnAGpu:
    @pytest.mark.parametrize("tokens", [1, 63, 64, 65, 2048])
    @pytest.mark.parametrize("name", SPECS)
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_plain_path(self, name, tokens, dtype):
        check(World(SPECS[name], tokens, dtype), recurrent=tokens <= 65)

    @pytest.mark.parametrize("tokens", [8192, 9000])
    def test_long_spans_with_saves(self, tokens):
        world = World(SPECS["27B"], tokens)
        saves = [world.save(*at) for at in ((64, torch.float16), (4096, torch.float32), (tokens, torch.float32))]
        check(world, saves, recurrent=False)

    @pytest.mark.parametrize("name", SPECS)
    @pytest.mark.parametrize("cuts", [[64], [128, 1984], [64 * i for i in range(1, 32)]], ids=len)
    def test_cuts_on_the_grid_change_no_bit(self, name, cuts):
        world = World(SPECS[name], 2048)
        saves = [world.save(tokens) for tokens in cuts]
        whole, again = world.run(saves), world.run(cuts=cuts)
        assert all(torch.equal(a, b) for a, b in zip(whole, again, strict=True))
        for save in saves:
            _, state, columns = world.first(save.tokens).run()
            assert torch.equal(save.state_VKD, state) and torch.equal(save.conv_WC, columns)

    def test_repeats_have_the_same_bits(self):
        world = World(SPECS["27B"], 3000)
        first = world.run()
        for _ in range(5):
            assert all(torch.equal(a, b) for a, b in zip(first, world.run(), strict=True))

    @pytest.mark.parametrize("tokens", [64, 2048, 20000])
    def test_scratch_is_what_the_plan_says(self, tokens):
        world, spec = World(SPECS["27B"], tokens), SPECS["27B"]
        world.run()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        y = gdn_prefill(world.mixed, world, spec, 1e-6, world.state, world.columns)
        grown = torch.cuda.max_memory_allocated() - before - y.untyped_storage().nbytes()
        # torch does not split off what is left of a block below 1 MB
        assert 0 <= grown - scratch_bytes(spec, tokens) + 8 * 512 <= 8 * 2**20

    def test_in_a_graph(self):
        world = World(SPECS["27B"], 2048)
        expected = world.run()
        state, columns = world.state.clone(), world.columns.clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = gdn_prefill(world.mixed, world, world.spec, 1e-6, state, columns)
        state.copy_(world.state), columns.copy_(world.columns)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip((y, state, columns), expected, strict=True))
