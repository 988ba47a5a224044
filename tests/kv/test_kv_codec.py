"""The 2-bit codec: packing, fit, rounding and the rows that break quantisers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_world import reference_int2

from kakera.kv import codec
from kakera.plan.kv_format import KvFormat


def round_trip(x: torch.Tensor, group: int) -> torch.Tensor:
    return codec.decode(codec.encode(x, group))


def gaussian(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).bfloat16().float()


def share(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a . b as a share of b . b, row by row."""
    return (a * b).sum(-1) / b.square().sum(-1)


@settings(max_examples=30)
@given(st.sampled_from([32, 64, 128, 256]), st.integers(0, 3), st.integers(0, 2**31))
def test_unpack_undoes_pack(dim: int, rows: int, seed: int) -> None:
    levels = torch.randint(0, 4, (rows, dim), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    assert torch.equal(codec.unpack(codec.pack(levels)), levels)
    assert torch.equal(codec.pack(levels.float()), codec.pack(levels))


def test_bytes_are_planar_quarters() -> None:
    levels = torch.randint(0, 4, (32,), dtype=torch.uint8)
    codes = codec.pack(levels)
    for i in range(8):
        fields = [levels[i + 8 * quarter].item() << 2 * quarter for quarter in range(4)]
        assert codes[i].item() == sum(fields)


def test_masked_fields_times_weights_are_the_levels() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(4, 64)
    masked = (codes.unsqueeze(-2) & codec.field_masks(codes.device)[:, :1]).flatten(-2).float()
    assert torch.equal(masked * codec.field_weights(256, codes.device), codec.unpack(codes).float())


@pytest.mark.parametrize("group", [32, 64, 128, 256])
def test_codes_and_grid_follow_the_definition(group: int) -> None:
    x = gaussian(200, 256)
    coded = codec.encode(x, group)
    assert coded.scale.dtype == coded.minimum.dtype == torch.float16
    assert torch.allclose(codec.decode(coded).double(), reference_int2(x.double(), group), rtol=0, atol=1e-6)


def test_a_value_between_two_levels_goes_up() -> None:
    x, one, zero = torch.tensor([-9.0, 0.5, 1.5, 2.5, 2.499, 9.0]), torch.ones(1), torch.zeros(1)
    levels, scale, minimum = codec._round(x, one, zero)
    assert levels.tolist() == [0, 1, 2, 3, 2, 3] and (scale, minimum) == (one, zero)


@pytest.mark.parametrize(("group", "low", "high"), [(256, 0.130, 0.134), (128, 0.127, 0.131), (32, 0.110, 0.115)])
def test_relative_error_of_gaussian_rows(group: int, low: float, high: float) -> None:
    """The best equidistant levels for a Gaussian leave .119 and shorten a row to .881; at full length .119 / .881."""
    x = gaussian(2000, 256)
    error = (round_trip(x, group) - x).square().mean() / x.square().mean()
    assert low < error < high


@pytest.mark.parametrize("group", [128, 256])
def test_a_decoded_row_is_as_long_along_the_row_as_the_row(group: int) -> None:
    """Logits and outputs of coded rows are right on average; without the stretch they are 12 % too small."""
    x = gaussian(300, 256) + 0.25
    assert (share(round_trip(x, group), x) - 1).abs().max() < 1e-3


def test_rows_on_a_grid_come_back() -> None:
    """Also uneven ones: two values, and a level that only one dim takes."""
    for levels in ([0, 1, 2, 3], [0, 3], [0, 0, 0, 0, 0, 0, 0, 1], [1, 2]):
        x = torch.tensor(levels * (64 // len(levels))).float() * 0.5 - 0.25
        assert torch.allclose(round_trip(x, 64), x, rtol=0, atol=1e-3), levels


def test_order_and_layout_of_a_row_do_not_change_its_grid() -> None:
    """Sums are exact for bf16 values: the reason why a token has the same code from every path and every device."""
    x = gaussian(50, 256)
    order = torch.randperm(256, generator=torch.Generator().manual_seed(1))
    plain, mixed, strided = (codec.encode(rows, 256) for rows in (x, x[:, order], x.T.contiguous().T))
    assert torch.equal(plain.scale, mixed.scale) and torch.equal(plain.minimum, mixed.minimum)
    assert torch.equal(codec.unpack(plain.codes)[:, order], codec.unpack(mixed.codes))
    assert all(torch.equal(a, b) for a, b in zip(plain, strided, strict=True))


@pytest.mark.parametrize("value", [0.0, 1.0, -3.25, 1e-7, 1e-30, 1234.5, -65504.0])
def test_constant_rows_come_back(value: float) -> None:
    back = round_trip(torch.full((2, 64), value), 32)
    assert torch.allclose(back, torch.full((2, 64), value), rtol=1e-3, atol=2.0**-22)


@pytest.mark.parametrize("outlier", [7e4, 1e30, float("inf")])
def test_outliers_never_become_inf_or_nan(outlier: float) -> None:
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(0))
    x[0, 3], x[1, :] = outlier, -outlier
    x[2, ::2], x[2, 1::2] = outlier, -outlier
    back = round_trip(x, 256)
    assert back.isfinite().all()
    assert back[1].eq(-codec.FP16_MAX).all()
    others = torch.arange(256) != 3  # they share a level; fp16 steps are 32 at the outlier
    assert abs(back[0, 3] - codec.FP16_MAX) < 64 and (back[0] - x[0])[others].abs().max() < 64


def test_one_row_does_not_depend_on_the_others() -> None:
    x = torch.randn(9, 2, 64)
    whole, alone = (codec.encode(rows, 32) for rows in (x, x[4:5]))
    for a, b in zip(whole, alone, strict=True):
        assert torch.equal(a[4:5], b)


def test_a_vector_takes_the_bytes_that_the_format_says() -> None:
    for dim, group in ((256, 256), (256, 32), (128, 64)):
        x = torch.randn(1, dim)
        coded = codec.encode(x, group)
        taken = sum(tensor.numel() * tensor.element_size() for tensor in coded)
        assert taken == KvFormat("int2", group).vector_bytes(dim)
    assert KvFormat("int2", 256).vector_bytes(256) <= 0.15 * KvFormat("bf16").vector_bytes(256)
