"""The trellis search: optimal, tail-biting, and as good on Gaussian data as trellis codes are known to be."""

import itertools

import pytest
import torch

from kakera.ops.codec import codebook, trellis
from kakera.quantize import tail_biting, viterbi

MCG = codebook.table("mcg", torch.float32)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def all_paths(state_bits: int, bits: int, steps: int) -> torch.Tensor:
    """Every state sequence [paths, steps] of a small trellis."""
    mask = (1 << state_bits) - 1
    paths = []
    for first in range(1 << state_bits):
        for symbols in itertools.product(range(1 << bits), repeat=steps - 1):
            path = [first]
            for symbol in symbols:
                path.append(((path[-1] << bits) | symbol) & mask)
            paths.append(path)
    return torch.tensor(paths)


@pytest.mark.parametrize(("state_bits", "bits", "steps"), [(6, 1, 7), (6, 2, 5), (6, 3, 4)])
def test_the_path_found_is_the_cheapest_of_all(state_bits, bits, steps):
    table = torch.randn(1 << state_bits, generator=generator(1))
    targets = torch.randn(20, steps, generator=generator(2))
    paths = all_paths(state_bits, bits, steps)
    cost = (table[paths][None] - targets[:, None]).square().sum(-1)  # [tiles, paths]

    def found_cost(states):
        return (table[states.long()] - targets).square().sum(-1)

    free = viterbi.search_torch(targets, None, table, bits)
    assert torch.allclose(found_cost(free), cost.min(1).values)

    ends = 1 << (state_bits - bits)
    seam = torch.randint(0, ends, (20,), generator=generator(3))
    allowed = (paths[:, 0] >> bits == seam[:, None]) & (paths[:, -1] % ends == seam[:, None])
    closed = viterbi.search_torch(targets, seam, table, bits)
    assert torch.allclose(found_cost(closed), cost.masked_fill(~allowed, torch.inf).min(1).values)
    assert torch.equal(closed[:, 0] >> bits, seam)
    assert torch.equal(closed[:, -1] % ends, seam)


@pytest.mark.parametrize(("bits", "tiles", "bound"), [(2, 12, 0.070), (3, 12, 0.019)])
def test_gaussian_tiles_are_coded_near_the_rate_distortion_bound(bits, tiles, bound):
    data = torch.randn(tiles, 256, generator=generator(bits))
    scale = codebook.deviation("mcg") * 1.02
    states = tail_biting.encode(data * scale, MCG, bits)
    continued = ((states.roll(1, -1) << bits) & 0xFFFF) | (states & ((1 << bits) - 1))
    assert torch.equal(continued, states), "every state continues the one before it, the first one the last"
    assert torch.equal(trellis.unpack(trellis.pack(states, bits)), states)
    error = (MCG[states.long()] / scale - data).square().mean() / data.square().mean()
    assert 4.0**-bits < error <= bound


def test_batches_do_not_change_the_result(monkeypatch):
    data = torch.randn(3, 256, generator=generator(5))
    together = tail_biting.encode(data, MCG, 4)
    monkeypatch.setattr(viterbi, "_batch_tiles", lambda device, bits: 1)
    assert torch.equal(tail_biting.encode(data, MCG, 4), together)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("bits", range(1, 9))
def test_the_kernel_finds_paths_as_cheap_as_the_reference(bits):
    search_triton = pytest.importorskip("kakera.quantize.viterbi_triton").search_triton
    table, data = MCG.cuda(), (1.25 * torch.randn(40, 256, generator=generator(bits))).cuda()
    seam = torch.randint(0, 1 << (16 - bits), (40,), generator=generator(9)).cuda()
    for ends in (None, seam):
        found = search_triton(data, ends, table, bits)
        known = viterbi.search_torch(data, ends, table, bits)
        cost_found, cost_known = ((table[s.long()] - data).square().sum(1) for s in (found, known))
        assert torch.allclose(cost_found, cost_known, rtol=1e-5)
        if ends is not None:
            assert torch.equal(found[:, 0] >> bits, ends.int())
            assert torch.equal(found[:, -1] & ((1 << (16 - bits)) - 1), ends.int())
