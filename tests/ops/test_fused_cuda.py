"""Fused pointwise kernels: equal to the plain operations within the last bit of 16-bit results."""

import pytest
import torch

from kakera.ops import activation
from kakera.ops.fused import add_rms_norm, add_rms_norm_reference, swiglu

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
SHAPES = [(1, 5120), (33, 512), (2, 8192), (3, 1000), (2, 9000), (700, 5120)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_sum_and_its_norm(shape, dtype):
    torch.manual_seed(0)
    x, delta = torch.randn(2, *shape, device="cuda").to(dtype) * 3
    scale = torch.rand(shape[1], device="cuda") + 0.5
    total, normed = add_rms_norm(x, delta, scale, 1e-6)
    expected, expected_normed = add_rms_norm_reference(x, delta, scale, 1e-6)
    assert torch.equal(total, expected)
    torch.testing.assert_close(normed, expected_normed)
    if dtype == torch.float32:
        return  # the plain operations
    # a row does not depend on its batch
    alone, alone_normed = add_rms_norm(x[-1:], delta[-1:], scale, 1e-6)
    assert torch.equal(alone, total[-1:]) and torch.equal(alone_normed, normed[-1:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_swiglu_of_rows_with_any_stride(shape, dtype):
    torch.manual_seed(0)
    rows, channels = shape
    wide = torch.randn(rows, 2 * channels + 8, device="cuda").to(dtype) * 4
    for x in (wide[:, : 2 * channels], wide[:, 1 : 2 * channels + 1]):
        torch.testing.assert_close(swiglu(x), activation.swiglu(x))
