"""Norms, activations, rotation and convolution equal their references; a row has the same bits in any batch."""

import pytest
import torch
import torch.nn.functional as F

from kakera.ops.activation import sigmoid, silu, softplus, swiglu
from kakera.ops.conv import causal_conv, causal_conv_reference, causal_conv_step, conv_tail
from kakera.ops.norm import l2_norm, rms_norm, rms_norm_gated, rms_norm_reference
from kakera.ops.rotary import Rotary, frequencies, rotate, rotate_reference


@pytest.mark.parametrize(("ours", "theirs"), [(sigmoid, torch.sigmoid), (silu, F.silu), (softplus, F.softplus)])
def test_activations_equal_torch(ours, theirs):
    x = torch.cat([torch.linspace(-110, 110, 999), torch.tensor([0.0, 20.0])])
    torch.testing.assert_close(ours(x), theirs(x), rtol=2e-6, atol=1e-7)
    assert ours(x.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("width", [9, 12, 96])
@pytest.mark.parametrize("op", [sigmoid, silu, softplus, l2_norm, lambda x: rms_norm(x, torch.ones(x.shape[-1]), 1e-6)])
def test_a_row_has_the_same_bits_in_any_batch(op, width: int):
    x = torch.randn(257, width) * 3
    whole = op(x)
    for begin, end in [(0, 1), (3, 8), (64, 129), (100, 257)]:
        assert torch.equal(op(x[begin:end].clone()), whole[begin:end])


def test_swiglu_halves():
    x = torch.randn(5, 14)
    torch.testing.assert_close(swiglu(x), F.silu(x[:, :7]) * x[:, 7:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm(dtype: torch.dtype):
    x, scale = torch.randn(7, 96).to(dtype), torch.randn(96)
    torch.testing.assert_close(rms_norm(x, scale, 1e-6), rms_norm_reference(x, scale, 1e-6))


def test_gated_norm_has_a_plain_scale_and_a_silu_gate():
    x, gate, scale = torch.randn(4, 3, 32), torch.randn(4, 3, 32), torch.randn(32)
    expected = rms_norm_reference(x.view(12, 32), scale, 1e-6).view(4, 3, 32) * F.silu(gate)
    torch.testing.assert_close(rms_norm_gated(x, gate, scale, 1e-6), expected)


def test_l2_norm_adds_its_eps_to_the_sum():
    x = torch.tensor([[3e-4, 4e-4]])
    torch.testing.assert_close(l2_norm(x), x / (25e-8 + 1e-6) ** 0.5)


@pytest.mark.parametrize("rotary_dim", [8, 32])
def test_rotation_of_part_or_all_of_a_head(rotary_dim: int):
    positions = [0, 1, 5, 700]
    x = torch.randn(4, 3, 32)
    rotary = Rotary.at(torch.tensor(positions), frequencies(rotary_dim, 1e4))
    torch.testing.assert_close(rotate(x, rotary), rotate_reference(x, positions, rotary_dim, 1e4), rtol=0, atol=2e-4)
    assert torch.equal(rotate(x, rotary)[..., rotary_dim:], x[..., rotary_dim:])


@pytest.mark.parametrize("taps", [2, 3, 4])
def test_convolution_in_any_cut(taps: int):
    x, before, weight = torch.randn(20, 24), torch.randn(taps - 1, 24), torch.randn(taps, 24)
    whole = causal_conv(x, before, weight)
    torch.testing.assert_close(whole, causal_conv_reference(x, before, weight))
    for cut in (1, 2, 13):
        first = causal_conv(x[:cut], before, weight)
        second = causal_conv(x[cut:], conv_tail(x[:cut], before), weight)
        assert torch.equal(torch.cat([first, second]), whole)


def test_convolution_step_is_one_token_of_each_sequence():
    x, before, weight = torch.randn(3, 24), torch.randn(3, 3, 24), torch.randn(4, 24)
    expected = torch.cat([causal_conv(x[b : b + 1], before[b], weight) for b in range(3)])
    torch.testing.assert_close(causal_conv_step(x, before, weight), expected)
