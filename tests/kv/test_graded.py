"""Graded rotations: digits, calibration from moments, and a cache that codes with them."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_world import decode_from, make_spec, make_stream, prefill

from kakera.arch.spec import ModelSpec
from kakera.errors import CheckpointError, UsageError
from kakera.kv import codec
from kakera.kv.cache import KVCache
from kakera.kv.rotation import Rotation
from kakera.plan.kv_format import KvFormat
from kakera.quantize.kv_calibration import Moments, grades, principal_axes


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def round_trip(x: torch.Tensor) -> torch.Tensor:
    return codec.from_digits(codec.decode(codec.encode_graded(x)))


def skewed(spec: ModelSpec, tokens: int, seed: int = 0) -> torch.Tensor:
    """Keys and values [T, 2, K, D] with variances that fall over random axes, as those of a model do, off zero."""
    dim, heads = spec.head_dim, spec.kv_heads
    axes = torch.linalg.qr(gaussian(2, heads, dim, dim, seed=7)).Q
    spread = 4 * 0.93 ** torch.arange(dim)
    return torch.einsum("tkhd,khde->tkhe", gaussian(tokens, 2, heads, dim, seed=seed) * spread, axes) + 0.3


def calibrated(spec: ModelSpec) -> Rotation:
    moments = Moments(spec)
    for layer in range(len(spec.full_layers)):
        moments.add(layer, skewed(spec, 4096, layer))
    return moments.rotation()


def test_error_follows_the_grades() -> None:
    x = gaussian(500, 256)
    error = (round_trip(x) - x).square().mean(0)
    assert error[:64].mean() < 0.015 and 0.11 < error[64:192].mean() < 0.14
    assert torch.equal(round_trip(x)[:, 192:], torch.zeros(500, 64))


def test_graded_rows_take_the_bytes_of_two_groups() -> None:
    x = gaussian(3, 128)
    for graded, even in zip(codec.encode_graded(x), codec.encode(x, 64), strict=True):
        assert graded.shape == even.shape and graded.dtype == even.dtype


@settings(max_examples=20)
@given(st.integers(0, 2**31), st.sampled_from([64, 128, 256]), st.sampled_from([1e-3, 1.0, 1e3]))
def test_two_digits_are_sixteen_equidistant_levels(seed: int, dim: int, size: float) -> None:
    first = round_trip(gaussian(1, dim, seed=seed) * size)[0, : dim // 4].double()
    found = torch.cat((first, first[:1])).sort().values
    steps = (found - found[0]) / float(codec.encode_graded(gaussian(1, dim, seed=seed) * size).scale[0, 0]) * 4
    assert (steps - steps.round()).abs().max() < 2e-3 and steps.max() < 15.5


@pytest.mark.parametrize("fill", [0.0, 5.0, -65504.0, 1e38])
def test_rows_of_equal_values_come_back(fill: float) -> None:
    x = torch.full((1, 64), fill)
    y = round_trip(x)
    assert y.isfinite().all()
    assert torch.allclose(y[:, :48], x[:, :48].clamp(-65504, 65504), rtol=1e-3, atol=1e-6)


def test_queries_meet_digits_by_the_transpose() -> None:
    digits, q = gaussian(20, 64), gaussian(5, 64, seed=1)
    assert torch.allclose(codec.to_digits(q) @ digits.T, q @ codec.from_digits(digits).T, atol=1e-5)


def test_calibration_orders_dims_by_variance_and_takes_the_mean_out() -> None:
    spec = make_spec(full=1)
    rotation = calibrated(spec)
    x_2KTD = skewed(spec, 4096).permute(1, 2, 0, 3)
    for frame, x_KTD in zip((rotation.k, rotation.v), x_2KTD, strict=True):
        turned = frame.turn(0, x_KTD - frame.centre_LKD[0].unsqueeze(1))
        assert turned.mean(1).abs().max() < 0.02
        first, middle, last = turned.square().mean((0, 1)).split((16, 32, 16))
        assert first.min() > middle.max() > middle.min() > last.max()
        assert first.max() < 1.2 * first.min()  # a Hadamard matrix makes the dims of a grade alike


def test_graded_codes_beat_even_ones_where_variances_differ() -> None:
    spec = make_spec(full=1)
    x_KTD = skewed(spec, 512, seed=3)[:, 1].transpose(0, 1)
    frame, hadamard = calibrated(spec).v, Rotation.hadamard(spec).v
    centred = x_KTD - frame.centre_LKD[0].unsqueeze(1)
    graded = frame.turn_back(0, round_trip(frame.turn(0, centred))) - centred
    even = hadamard.turn_back(0, codec.decode(codec.encode(hadamard.turn(0, x_KTD), 32))) - x_KTD
    assert graded.square().mean() < 0.6 * even.square().mean()


def test_axes_are_orthogonal_and_do_not_depend_on_signs() -> None:
    a = gaussian(200, 32)
    axes = principal_axes((a.T @ a).double())
    assert torch.allclose(axes.T @ axes, torch.eye(32).double(), atol=1e-9)
    assert (axes.gather(0, axes.abs().argmax(0, keepdim=True)) > 0).all()
    assert torch.allclose(grades(32).T @ grades(32), torch.eye(32), atol=1e-6)


def test_too_few_tokens_are_refused() -> None:
    moments = Moments(make_spec(full=1))
    moments.add(0, gaussian(100, 2, 2, 64))
    with pytest.raises(UsageError, match="100 tokens"):
        moments.rotation()


def test_files_remember_the_grades(tmp_path: Path) -> None:
    spec = make_spec()
    rotation = calibrated(spec)
    rotation.save(tmp_path, spec, "test")
    back = Rotation.load(tmp_path, spec)
    assert back.graded and back.hash == rotation.hash != Rotation(rotation.k, rotation.v).hash


def test_a_pair_of_which_one_is_graded_is_refused(tmp_path: Path) -> None:
    spec = make_spec()
    rotation = calibrated(spec)
    rotation.save(tmp_path, spec, "test")
    kept = (tmp_path / "k_rotation.pt").read_bytes()
    Rotation(rotation.k, rotation.v).save(tmp_path, spec, "test")
    (tmp_path / "k_rotation.pt").write_bytes(kept)
    with pytest.raises(CheckpointError, match="one of the two"):
        Rotation.load(tmp_path, spec)


def graded_cache(spec: ModelSpec, rotation: Rotation) -> KVCache:
    return KVCache(spec, KvFormat("int2", group=spec.head_dim // 2, window_pages=1), 16, 1, rotation)


def test_another_group_is_refused() -> None:
    spec = make_spec()
    with pytest.raises(UsageError, match="--kv-group 32"):
        KVCache(spec, KvFormat("int2", group=64), 4, 1, calibrated(spec))


def test_cuts_do_not_change_a_bit_and_decode_agrees() -> None:
    spec = make_spec()
    rotation, stream = calibrated(spec), make_stream(spec, 500, 0, range(8))
    whole = prefill(graded_cache(spec, rotation), stream, [500])
    assert torch.equal(whole, prefill(graded_cache(spec, rotation), stream, [64, 320, 500]))
    cache = graded_cache(spec, rotation)
    prefill(cache, stream, [448])
    assert torch.allclose(decode_from(cache, stream, 448), whole[:, 448:], atol=1e-4)


def test_output_is_that_of_coded_keys_and_values() -> None:
    """Against plain attention over rows that were coded and turned back, in float64."""
    spec = make_spec(full=1)
    rotation, stream = calibrated(spec), make_stream(spec, 400, 0, range(7))
    out = prefill(graded_cache(spec, rotation), stream, [400])[0, 399].double()
    coded = []
    for frame, x_TKD in ((rotation.k, stream.k[0]), (rotation.v, stream.v[0])):
        centre_K1D = frame.centre_LKD[0].unsqueeze(1)
        turned = frame.turn(0, x_TKD.transpose(0, 1) - centre_K1D).bfloat16().float()
        rows = turned.clone()
        rows[:, 64:320] = round_trip(turned[:, 64:320])  # page 0 is the sink, pages 5 and 6 the window
        coded.append((frame.turn_back(0, rows) + centre_K1D).double())
    q_KGD = stream.q[0, 399].double().unflatten(0, (spec.kv_heads, -1)) * spec.head_dim**-0.5
    expected = torch.softmax(q_KGD @ coded[0].mT, -1) @ coded[1]
    assert torch.allclose(out, expected.flatten(0, 1), atol=1e-4)
