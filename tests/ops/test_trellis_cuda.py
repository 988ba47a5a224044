"""Trellis-coded and int8 linears on a GPU against the decoded weight in float32. Skipped where there is no GPU."""

from __future__ import annotations

import pytest
import torch

from kakera.ops.codec.coded import CodedLinear
from kakera.ops.int8 import int8_linear, int8_weight
from kakera.ops.trellis import TrellisLinear, TrellisScratch, decode_weight

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
BOUND = {torch.float16: 1e-3, torch.bfloat16: 4e-3}  # bf16 keeps 8 bits: rounding y alone costs 1.7e-3
ROWS = (*range(1, 34), 64, 100, 4096)


def coded(inputs: int, outputs: int, bits: float, codebook: str = "mcg", seed: int = 0) -> CodedLinear:
    made = torch.Generator("cuda").manual_seed(seed)
    shape = (inputs // 16, outputs // 16, round(16 * bits))
    code = torch.randint(-(1 << 15), 1 << 15, shape, dtype=torch.int16, device="cuda", generator=made)
    sign = torch.randint(0, 2, (inputs + outputs,), device="cuda", generator=made) * 2.0 - 1
    scale = sign * (0.5 + torch.rand(inputs + outputs, device="cuda", generator=made))
    return CodedLinear(code, scale[:inputs] * 0.02, scale[inputs:].contiguous(), codebook)


def scratch_of(linear: TrellisLinear) -> TrellisScratch:
    shapes = [(part.out_channels, part.in_channels) for part in linear.parts]
    return TrellisScratch.allocate(shapes, 32 << 20, torch.device("cuda", 0))  # several pieces for wide ones


def error(y: torch.Tensor, reference: torch.Tensor) -> float:
    return ((y.double() - reference).norm() / reference.norm()).item()


def check(linear: TrellisLinear, rows: int, dtype: torch.dtype = torch.float16, path: str | None = None) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    scratch = scratch_of(linear)
    scratch.partial.fill_(float("nan"))
    scratch.rotated.fill_(float("nan"))
    scratch.weight.fill_(0xFF)
    x = torch.randn(rows, linear.in_channels, device="cuda").to(dtype)
    reference = [x.double() @ part.weight(torch.float32).double().T for part in linear.parts]
    for _ in range(2):  # the second finds the counters as the first left them
        if path is None:
            y = linear(x, scratch)
        else:
            y = tuple(x.new_full((rows, part.out_channels), float("nan")) for part in linear.parts)
            getattr(linear, path)(x, y, scratch)
        for part, expected in zip(y, reference, strict=True):
            assert error(part, expected) <= BOUND[dtype]
    assert not scratch.arrived.any()


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("codebook", ["mcg", "3inst", "mul1"])
def test_every_rate_and_codebook(bits, codebook):
    linear = TrellisLinear((coded(384, 640, bits, codebook),))
    for rows, path in ((1, "few"), (13, "few"), (30, "few"), (100, "many")):
        check(linear, rows, path=path)


def test_rates_with_a_half_beside_whole_ones():
    bits = {1280: 1.5, 384: 2, 640: 2.5, 128: 3.5}
    linear = TrellisLinear(tuple(coded(1408, o, b, "mul1", seed=o) for o, b in bits.items()))
    for rows in (1, 13, 30, 100):
        check(linear, rows)
        check(TrellisLinear(linear.parts[2:3]), rows, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", ROWS)
def test_every_row_count(rows, dtype):
    check(TrellisLinear((coded(1408, 1152, 2), coded(1408, 128, 3, seed=1), coded(1408, 128, 4, seed=2))), rows, dtype)


@pytest.mark.parametrize(("inputs", "outputs"), [(128, 128), (128, 3200), (3200, 128), (2176, 1664), (896, 5120)])
def test_odd_multiples_of_a_block(inputs, outputs):
    linear = TrellisLinear((coded(inputs, outputs, 2), coded(inputs, outputs, 3, seed=1)))
    for rows, path in ((1, "few"), (9, "few"), (32, "few"), (130, "many")):
        check(linear, rows, path=path)


def shapes_27b(ranks: int) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    return [
        (5120, (10240 // ranks, 6144 // ranks), (2, 2)),
        (5120, (12288 // ranks, 1024 // ranks, 1024 // ranks), (2, 2, 2)),
        (6144 // ranks, (5120,), (2,)),
        (5120, (17408 // ranks, 17408 // ranks), (2, 3)),
        (17408 // ranks, (5120,), (3,)),
    ]


OTHERS = [  # Qwen3.5-0.8B .. 9B and the 35B-A3B's experts: inputs, outputs
    (1024, (6144, 2048), (2, 2)),
    (1024, (3584, 3584), (2, 3)),
    (3584, (1024,), (3,)),
    (2048, (6144, 6144), (2, 3)),
    (2560, (9216, 9216), (2, 3)),
    (9216, (2560,), (3,)),
    (4096, (12288, 12288), (2, 3)),
    (12288, (4096,), (3,)),
    (2048, (1024,), (2,)),
    (512, (2048,), (3,)),
]


@pytest.mark.parametrize(("inputs", "outputs", "bits"), [*shapes_27b(1), *shapes_27b(2), *OTHERS])
def test_shapes_of_real_models(inputs, outputs, bits):
    parts = [coded(inputs, o, b, seed=i) for i, (o, b) in enumerate(zip(outputs, bits, strict=True))]
    for rows in (1, 8, 32, 4096):
        check(TrellisLinear(tuple(parts)), rows)


def test_few_rows_have_the_same_bits_every_time():
    linear = TrellisLinear((coded(5120, 5120, 2),))
    scratch = scratch_of(linear)
    x = torch.randn(5, 5120, device="cuda").half()
    (first,) = linear(x, scratch)
    assert all(torch.equal(linear(x, scratch)[0], first) for _ in range(50))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_decoded_weight_is_the_reference(dtype):
    part = coded(640, 896, 3)
    weight = torch.full((640, 256), float("nan"), device="cuda", dtype=dtype)
    decode_weight(part, 384, weight)
    assert error(weight, part.weight(torch.float32).T[:, 384:640].double()) <= BOUND[dtype]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 8, 9, 32, 33, 128])
def test_int8_rows(rows, dtype):
    q = torch.randint(-127, 128, (1072, 704), device="cuda").to(torch.int8)
    scale = (torch.rand(1072, device="cuda") * 0.01 + 1e-4).half()
    x = torch.randn(rows, 704, device="cuda").to(dtype)
    reference = x.double() @ int8_weight(q, scale, torch.float32).double().T
    assert error(int8_linear(x, q, scale), reference) <= BOUND[dtype]
