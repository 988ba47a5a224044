"""The kernel for few rows and channels of plain 16-bit weights: equal to the products that it stands for, and a row has
the same bits in any company."""

import pytest
import torch

from kakera.ops.dense import has_kernel, linear_into

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(96, 5120), (1, 8), (8, 1000), (256, 8192), (32, 1032)], ids=str)
def test_rows_are_those_of_the_product_into_a_part_of_longer_ones(shape, dtype):
    torch.manual_seed(0)
    weight = torch.randn(*shape, device="cuda").to(dtype)
    wide = torch.randn(32, shape[1] + 8, device="cuda").to(dtype)
    x = wide[:, : shape[1]]
    exact = x.double() @ weight.double().t()
    alone = torch.empty(1, shape[0], device="cuda", dtype=dtype)
    linear_into(x[:1], weight, alone)
    for rows in (1, 2, 8, 9, 32):
        assert has_kernel(x[:rows], weight)
        target = torch.full((rows, shape[0] + 3), 7.0, device="cuda", dtype=dtype)
        linear_into(x[:rows], weight, target[:, 2:-1])
        torch.testing.assert_close(target[:, 2:-1].double(), exact[:rows], rtol=2**-8, atol=2**-8 * shape[1] ** 0.5)
        assert (target[:, :2] == 7).all() and (target[:, -1] == 7).all()
        assert torch.equal(target[:1, 2:-1], alone)


@pytest.mark.parametrize(("rows", "shape"), [(33, (96, 512)), (2, (257, 512)), (2, (96, 516)), (2, (96, 8200))])
def test_what_has_no_kernel_goes_by_the_library(rows, shape):
    weight, x = (torch.randn(n, shape[1], device="cuda").bfloat16() for n in (shape[0], rows))
    target = torch.empty(rows, shape[0], device="cuda", dtype=torch.bfloat16)
    assert not has_kernel(x, weight)
    linear_into(x, weight, target)
    torch.testing.assert_close(target, x @ weight.t(), rtol=2**-7, atol=2**-7 * shape[1] ** 0.5)
