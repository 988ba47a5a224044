"""The linear equals its reference; padded to whole blocks, a row has the same bits in any batch."""

import pytest
import torch

from kakera.ops.linear import EXACT_ROWS, linear, linear_reference, pad_rows, padded_rows

CPU = torch.device("cpu")


@pytest.mark.parametrize("rows", [1, 3, 4, 8, 9, 33])
def test_equals_one_row_at_a_time(rows: int):
    x, w = torch.randn(rows, 96), torch.randn(40, 96)
    torch.testing.assert_close(linear(x, w), linear_reference(x, w), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(("out_channels", "in_channels"), [(24, 512), (512, 1536), (300, 96), (2560, 512)])
def test_a_row_has_the_same_bits_in_any_padded_batch(out_channels: int, in_channels: int, threads: int):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x, w = torch.randn(304, in_channels), torch.randn(out_channels, in_channels)
        whole = linear(x, w)
        for begin, end in [(0, 1), (64, 69), (64, 128), (128, 303), (0, 33)]:
            rows = padded_rows(end - begin, exact=True, device=CPU)
            part = linear(pad_rows(x[begin:end], rows), w)[: end - begin]
            assert torch.equal(part, whole[begin:end]), (begin, end)
    finally:
        torch.set_num_threads(before)


def test_padded_rows():
    assert [padded_rows(n, exact=False, device=CPU) for n in (1, 4, 5, 8, 9, 17)] == [4, 4, 8, 8, 16, 32]
    assert [padded_rows(n, exact=True, device=CPU) for n in (1, 16, 17, 512, 513)] == [16, 16, 32, 512, 528]
    assert padded_rows(513, exact=True, device=torch.device("cuda")) == 513
    assert EXACT_ROWS == 16


def test_padding_is_zeros_behind():
    x = torch.randn(3, 2, 5)
    padded = pad_rows(x, 8)
    assert torch.equal(padded[:3], x) and not padded[3:].any()
    assert pad_rows(x, 3) is x
