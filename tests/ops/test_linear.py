"""The linear equals its reference; but for the fast rows, a row has the same bits in any batch."""

from collections.abc import Callable, Iterator

import pytest
import torch

from kakera.ops.dense import linear_into
from kakera.ops.linear import linear, linear_reference, pack


@pytest.fixture(params=[1, 2, 3], ids="{}threads".format)
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(params=[lambda w: w, pack], ids=["plain", "packed"])
def stored(request: pytest.FixtureRequest) -> Callable[[torch.Tensor], torch.Tensor]:
    return request.param


@pytest.mark.parametrize(("rows", "fast"), [(1, 1), (1, 0), (3, 2), (8, 8), (9, 9), (33, 0), (130, 5)])
def test_equals_one_row_at_a_time(rows: int, fast: int, stored: Callable[[torch.Tensor], torch.Tensor]):
    x, w = torch.randn(rows, 96), torch.randn(40, 96).half().float()
    torch.testing.assert_close(linear(x, stored(w), fast), linear_reference(x, w), rtol=1e-5, atol=1e-4)


def test_rows_may_be_strided():
    x, w = torch.randn(70, 192), torch.randn(40, 96).half().float()
    torch.testing.assert_close(linear(x[:, ::2], pack(w), 3), linear_reference(x[:, ::2], w), rtol=1e-5, atol=1e-4)


def test_packing_rounds_to_fp16_once():
    x, w = torch.randn(5, 512), torch.randn(40, 512) * 10.0 ** torch.arange(-38, 2).unsqueeze(1)
    torch.testing.assert_close(linear(x, pack(w), 5), linear_reference(x, w.half().float()), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("w", [torch.randn(4, 8).bfloat16(), torch.full((4, 8), 65536.0)], ids=["bf16", "beyond fp16"])
def test_packing_leaves_other_weights_alone(w: torch.Tensor):
    assert pack(w) is w


@pytest.mark.parametrize(("out_channels", "in_channels"), [(24, 512), (512, 1536), (512, 3072), (300, 96), (2560, 512)])
def test_a_row_has_the_same_bits_in_any_batch(
    out_channels: int, in_channels: int, threads: int, stored: Callable[[torch.Tensor], torch.Tensor]
):
    x, w = torch.randn(304, in_channels), stored(torch.randn(out_channels, in_channels))
    whole = linear(x, w)
    for begin, end in [(0, 1), (64, 69), (64, 128), (128, 303), (3, 36), (13, 200), (63, 64)]:
        assert torch.equal(linear(x[begin:end], w), whole[begin:end]), (begin, end)
    for fast in (1, 7, 40):
        mixed = linear(torch.cat([torch.randn(fast, in_channels), x[:100]]), w, fast)
        assert torch.equal(mixed[fast:], whole[:100]), fast


def test_a_product_into_a_part_of_longer_rows_leaves_the_rest_alone():
    w, x, y = torch.randn(3, 8), torch.randn(2, 8), torch.full((2, 6), 7.0)
    linear_into(x, w, y[:, 2:5])
    assert torch.allclose(y[:, 2:5], x @ w.t()) and (y[:, [0, 1, 5]] == 7).all()
