"""Prefill and decode against the float64 oracle, for every head grouping, codec, group and awkward length."""

import pytest
import torch
from kv_world import Part, decode_from, make_spec, make_stream, oracle, prefill, run
from test_kv_rotation import random_rotation

from kakera.kv.cache import KVCache
from kakera.kv.rotation import Frame, Rotation
from kakera.plan.kv_format import KvFormat

TOLERANCE = 2e-5  # float32 against float64, with equal codes; a key read in the wrong precision moves an output by 1e-2


def pages(count: int, seed: int = 0) -> list[int]:
    """A shuffled page table: neighbours in a sequence are not neighbours in the pool."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()


def worst(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a.double() - b).abs().max().item()


def root_mean_square(error: torch.Tensor) -> float:
    return error.square().mean().sqrt().item()


@pytest.mark.parametrize("group", [1, 2, 3, 5, 6, 8, 12, 16])
def test_query_head_j_reads_kv_head_j_over_g(group: int) -> None:
    spec, fmt = make_spec(heads=2 * group, kv_heads=2, full=1), KvFormat("int2", 32, 1)
    stream = make_stream(spec, 290, group, pages(8))
    wanted = oracle(spec, fmt, stream)
    cache = KVCache(spec, fmt, 8, 1)
    assert worst(prefill(cache, stream, [290]), wanted) < TOLERANCE
    run(cache, [Part(stream, 0, 256)])
    assert worst(decode_from(cache, stream, 256), wanted[:, 256:]) < TOLERANCE


@pytest.mark.parametrize(
    "fmt",
    [KvFormat("fp32"), KvFormat("bf16"), *(KvFormat("int2", group, 2) for group in (32, 64, 128, 256))],
    ids=lambda fmt: f"{fmt.codec}-{fmt.group}",
)
def test_every_codec_and_group_size(fmt: KvFormat) -> None:
    spec = make_spec(heads=6, kv_heads=2, head_dim=256, full=1)
    stream = make_stream(spec, 400, 1, pages(9))
    wanted = oracle(spec, fmt, stream)
    cache = KVCache(spec, fmt, 9, 1)
    assert worst(prefill(cache, stream, [400]), wanted) < TOLERANCE
    run(cache, [Part(stream, 0, 384)])
    assert worst(decode_from(cache, stream, 384), wanted[:, 384:]) < TOLERANCE


@pytest.mark.parametrize("head_dim", [24, 80])
def test_dense_codecs_take_any_head_size(head_dim: int) -> None:
    spec = make_spec(head_dim=head_dim, full=1)
    stream = make_stream(spec, 150, 2, pages(3))
    cache = KVCache(spec, KvFormat("fp32"), 3, 1)
    assert worst(prefill(cache, stream, [150]), oracle(spec, KvFormat("fp32"), stream)) < TOLERANCE


@pytest.mark.parametrize("codec", ["int2", "bf16"])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 127, 128, 129, 193])
def test_lengths_around_page_borders(codec: str, length: int) -> None:
    spec, fmt = make_spec(full=1), KvFormat(codec, 32, 1)  # type: ignore[arg-type]
    stream = make_stream(spec, length, length, [5, 0, 7, 2])  # the first and the last page of the pool
    wanted = oracle(spec, fmt, stream)
    cache = KVCache(spec, fmt, 8, 2)
    assert worst(prefill(cache, stream, [length]), wanted) < TOLERANCE
    fresh = KVCache(spec, fmt, 8, 2)
    assert worst(decode_from(fresh, stream, 0), wanted) < TOLERANCE


def test_long_history_in_several_pieces() -> None:
    """2,300 tokens: five prefill pieces and two decode pieces of history."""
    spec, fmt = make_spec(heads=3, kv_heads=1, full=1), KvFormat("int2", 64, 1)
    stream = make_stream(spec, 2300, 3, pages(36))
    wanted = oracle(spec, fmt, stream)
    cache = KVCache(spec, fmt, 36, 1)
    assert worst(prefill(cache, stream, [1280, 2300]), wanted) < TOLERANCE
    assert worst(decode_from(cache, stream, 2290), wanted[:, 2290:]) < TOLERANCE


def test_rotations_and_centres_of_each_head() -> None:
    """A dense rotation rounds differently in float64, so that some codes flip: the mean bounds them, not the worst."""
    spec, fmt = make_spec(), KvFormat("int2", 32, 1)
    rotation = random_rotation(2, 2, 64)
    stream = make_stream(spec, 280, 4, pages(5))
    wanted = oracle(spec, fmt, stream, rotation)
    cache = KVCache(spec, fmt, 5, 1, rotation)
    assert root_mean_square(prefill(cache, stream, [128, 280]) - wanted) < 1e-4
    run(cache, [Part(stream, 0, 256)])
    assert root_mean_square(decode_from(cache, stream, 256) - wanted[:, 256:]) < 1e-4


def test_a_rotation_changes_nothing_but_rounding() -> None:
    """Inside the window, where nothing is coded, any rotation and centre give the answer of the exact cache."""
    spec = make_spec()
    stream = make_stream(spec, 300, 5, pages(5))
    exact = prefill(KVCache(spec, KvFormat("fp32"), 5, 1), stream, [300])
    plain = Rotation(*(Frame(torch.eye(64).expand(2, 2, -1, -1), torch.zeros(2, 2, 64)) for _ in range(2)))
    for rotation in (plain, Rotation.hadamard(spec), random_rotation(2, 2, 64)):
        cache = KVCache(spec, KvFormat("int2", 32, 4), 5, 1, rotation)
        assert worst(prefill(cache, stream, [300]), exact) < 0.03  # bf16 keys


def test_a_key_offset_costs_nothing_once_it_is_centred() -> None:
    spec, fmt = make_spec(full=1), KvFormat("int2", 32, 1)
    stream = make_stream(spec, 400, 6, pages(7))
    offset_LKD = torch.randn(1, 2, 64, generator=torch.Generator().manual_seed(0)) * 8
    stream.k += offset_LKD.unsqueeze(1)
    exact = prefill(KVCache(spec, KvFormat("fp32"), 7, 1), stream, [400])
    error = {}
    for name, centre in (("none", torch.zeros(1, 2, 64)), ("key mean", offset_LKD)):
        rotation = Rotation(Frame(None, centre), Frame(None, torch.zeros(1, 2, 64)))
        got = prefill(KVCache(spec, fmt, 7, 1, rotation), stream, [400])
        error[name] = (got - exact)[:, 192:].square().mean().item()
    assert error["key mean"] < 0.5 * error["none"]


@pytest.mark.parametrize("codec", ["int2", "fp32"])
def test_constant_rows_and_huge_outliers_stay_finite(codec: str) -> None:
    spec, fmt = make_spec(full=1), KvFormat(codec, 32, 1)  # type: ignore[arg-type]
    stream = make_stream(spec, 330, 7, pages(6))
    stream.k[:, :100] = 0
    stream.v[:, :100] = 2.5
    stream.k[:, 100, 0, 3] = 1e6
    stream.v[:, 101] = -3e5
    cache = KVCache(spec, fmt, 6, 1)
    assert prefill(cache, stream, [320, 330]).isfinite().all()
    assert decode_from(cache, stream, 320).isfinite().all()


def test_bf16_inputs_give_bf16_outputs() -> None:
    spec, fmt = make_spec(full=1), KvFormat("int2", 32, 1)
    stream = make_stream(spec, 200, 8, pages(4))
    stream.q, stream.k, stream.v = stream.q.bfloat16(), stream.k.bfloat16(), stream.v.bfloat16()
    got = prefill(KVCache(spec, fmt, 4, 1), stream, [200])
    assert got.dtype == torch.bfloat16 and worst(got, oracle(spec, fmt, stream)) < 0.02


def test_spans_that_break_the_contract_are_refused() -> None:
    spec = make_spec(full=1)
    cache, stream = KVCache(spec, KvFormat("int2", 32, 1), 4, 1), make_stream(spec, 200, 9, pages(4))
    with pytest.raises(ValueError, match="starts at 5"):
        run(cache, [Part(stream, 5, 70)])
    with pytest.raises(ValueError, match="65 tokens"):
        run(cache, decode=[Part(stream, 0, 65)])


@pytest.mark.gpu
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_cuda_equals_cpu() -> None:
    spec, fmt = make_spec(heads=12, kv_heads=2, head_dim=256, full=1), KvFormat("int2", 256, 4)
    stream = make_stream(spec, 900, 10, pages(15))
    wanted = oracle(spec, fmt, stream)
    stream.q, stream.k, stream.v, stream.pages = (x.cuda() for x in (stream.q, stream.k, stream.v, stream.pages))
    cache = KVCache(spec, fmt, 15, 1, device="cuda", dtype=torch.float32)
    got = prefill(cache, stream, [640, 832])
    decoded = decode_from(cache, stream, 832)
    assert root_mean_square(torch.cat((got, decoded), 1).cpu() - wanted) < 1e-4
