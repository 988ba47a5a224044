"""Worked examples of the codec (sections 3.2 and 5 of the format notes): exact numbers."""

import numpy as np
import pytest
import torch

from kakera.ops.codec import codebook, trellis
from kakera.ops.codec.coded import RSQRT_BLOCK, CodedLinear
from kakera.ops.codec.hadamard import hadamard, hadamard_matrix

MCG = codebook.table("mcg")


def code_of_words(words: list[int], *shape: int) -> torch.Tensor:
    return torch.from_numpy(np.array(words, dtype="<u4").view("<i2").copy()).view(*shape)


@pytest.mark.parametrize(
    ("state", "value", "bits"),
    [
        (0x0000, 1.84375, 0x3F60),
        (0x0001, 0.134521484375, 0x304E),
        (0x0002, -0.75927734375, 0xBA13),
        (0x1234, 1.5146484375, 0x3E0F),
        (0xFFFF, 0.85009765625, 0x3ACD),
    ],
)
def test_mcg_values(state, value, bits):
    assert MCG[state].item() == value
    assert MCG[state].view(torch.uint16).item() == bits


@pytest.mark.parametrize(
    ("name", "distinct", "deviation"), [("3inst", 10598, 1.24371), ("mcg", 10746, 1.24411), ("mul1", 913, 1.0003)]
)
def test_codebooks_have_the_known_number_of_values_and_spread(name, distinct, deviation):
    assert codebook.table(name).unique().numel() == distinct
    assert codebook.deviation(name) == pytest.approx(deviation, abs=6e-5)


def test_one_tile_of_two_bits():
    code = code_of_words([(0x11111111 * j) & 0xFFFFFFFF for j in range(16)], 1, 1, 32)
    states = trellis.unpack(code)[0, 0]
    assert states[:9].tolist() == [0xFFFC, 0xFFF0, 0xFFC0, 0xFF00, 0xFC00, 0xF000, 0xC000, 0, 0]
    assert states[9:17].eq(0).all()
    assert states[17] == 1
    first = [-1.69140625, 2.36328125, 3.78515625, 1.130859375, 0.7138671875, 1.33203125, 0.2197265625, 1.84375]
    assert MCG[states[:8]].tolist() == first
    tile = trellis.decode(code, MCG.double()).T
    assert tile[0].tolist() == [
        *(-1.69140625, -0.31689453125, 1.1220703125, -1.224609375, 1.671875, 1.1328125, 1.9091796875, 0.3662109375),
        *(0.7138671875, -0.34619140625, -1.0712890625, -2.578125, 0.47705078125, -2.349609375, 1.345703125),
        0.18896484375,
    ]
    assert tile[1, :4].tolist() == [2.36328125, -1.0673828125, -0.7265625, -0.443603515625]
    assert tile.sum().item() == -11.5213623046875
    assert tile.square().sum().item() == pytest.approx(459.68424977362156, rel=1e-15)


def test_one_tile_of_three_bits():
    code = code_of_words([(j * 0x0F1E2D3C) & 0xFFFFFFFF for j in range(24)], 1, 1, 48)
    states = trellis.unpack(code)[0, 0]
    assert states[:5].tolist() == [0x8320, 0x1900, 0xC800, 0x4000, 0]
    assert MCG[states[:4]].tolist() == [1.7275390625, 1.3125, 0.466796875, 2.07421875]
    tile = trellis.decode(code, MCG.double())
    assert tile.sum().item() == 31.857421875
    assert tile.square().sum().item() == pytest.approx(475.9850071668625, rel=1e-15)


def example_linear(bits: int) -> CodedLinear:
    count = 16 * 8 * 8 * bits
    code = code_of_words([(n * 0x9E3779B1 + 0x7F4A7C15) & 0xFFFFFFFF for n in range(count)], 16, 8, 16 * bits)
    i, o = torch.arange(256), torch.arange(128)
    rin = ((1 + (i % 7) / 16) / 64).half() * torch.where(i % 3 == 0, -1, 1)
    rout = (1 + (o % 5) / 8).half() * torch.where(o % 4 == 1, -1, 1)
    s_in, s_out = 1 + ((i % 9) - 4) / 256, 1 + ((o % 11) - 5) / 256
    return CodedLinear(code, rin.float() * s_in, rout.float() * s_out, "mcg")


X = (((37 * torch.arange(256)) % 17) - 8) / 8

LINEAR = {
    2: {
        "states": [0x75D1, 0xD747, 0x5D1F, 0x747F, 0xD1FD, 0x47F4, 0x1FD2, 0x7F4A],
        "row": [0.078125, 0.5244140625, 0.5791015625, -0.89892578125],
        "sums": (26.561767578125, 50574.6885253),
        "fp16": [-0.10205, -0.21838, -0.26001, -0.18933],
        "exact": [-0.1020998, -0.2184165, -0.2600464, -0.1892943],
        "norm": 3.049711,
    },
    3: {
        "states": [0x57E3, 0xBF1F, 0xF8FE, 0xC7F4, 0x3FA5, 0xFD29, 0xE94F, 0x4A7C],
        "row": [0.056884765625, 0.47607421875, 0.005859375, -0.203857421875],
        "sums": (56.587646484375, 50701.5717092),
        "fp16": [0.16235, 0.12231, -0.61035, 0.63135],
        "exact": [0.1623014, 0.1222630, -0.6105180, 0.6312688],
        "norm": 3.187838,
    },
}


@pytest.mark.parametrize("bits", [2, 3])
def test_a_whole_linear(bits):
    linear, known = example_linear(bits), LINEAR[bits]
    assert linear.code.view(-1)[:8].tolist() == [31765, 32586, -2618, 7553, 28535, -17479, -5848, 23024]
    assert trellis.unpack(linear.code)[0, 0, :8].tolist() == known["states"]
    wq_OI = trellis.decode(linear.code, MCG.double())
    assert wq_OI[:4, 0].tolist() == known["row"]
    assert wq_OI.sum().item() == known["sums"][0]
    assert wq_OI.square().sum().item() == pytest.approx(known["sums"][1], abs=1e-7)
    xh = (hadamard(X * linear.in_scale) * RSQRT_BLOCK).half()
    assert xh[:4].tolist() == pytest.approx([0.0041618347, 0.0141296387, -0.0052490234, 0.0031337738], abs=1e-10)
    y = linear.forward(X[None])[0]
    assert y[:4].tolist() == pytest.approx(known["fp16"], abs=5.1e-6)
    scaled = linear.in_scale.double()[:, None] * hadamard(hadamard(wq_OI.T, 0), -1) * linear.out_scale.double() / 128
    exact = X.double() @ scaled
    assert exact[:4].tolist() == pytest.approx(known["exact"], abs=5.1e-8)
    assert exact.norm().item() == pytest.approx(known["norm"], abs=5.1e-7)
    assert ((y.double() - exact).norm() / exact.norm()).item() == pytest.approx(3.1e-4, abs=0.06e-4)
    error = (linear.weight().double() - scaled.T).norm() / scaled.norm()
    assert error < 1e-6


@pytest.mark.parametrize("bits", [*range(1, 9), 1.5, 2.5, 3.5])
def test_packing_and_unpacking_are_inverse(bits):
    code = random_code(3, 2, bits)
    states = trellis.unpack(code)
    assert torch.equal(trellis.pack(states, bits), code)
    new = torch.tensor([int(bits), int(bits + 0.5)]).repeat(128)  # of a weight; an odd one takes the bit more
    shifted = ((states.roll(1, -1) << new) & 0xFFFF) | (states & ((1 << new) - 1))
    assert torch.equal(shifted, states), "every state must continue the one before it, cyclically"
    by_tile = trellis.untile(MCG[states.long()].float())
    assert torch.equal(trellis.decode(code, MCG.float()), by_tile.T)
    assert torch.equal(trellis.tiles_of(by_tile), MCG[states.long()].float())


def random_code(rows: int, columns: int, bits: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(round(2 * bits))
    return torch.randint(-(1 << 15), 1 << 15, (rows, columns, round(16 * bits)), generator=generator).to(torch.int16)


def decoded_by_hand(code: torch.Tensor, bits: float) -> torch.Tensor:
    """Wq [I, O] of mul1, read bit by bit out of the stored bytes: a string of bits for a tile, and a place in it."""
    scale, offset = (np.uint16(n).view(np.float16).astype(np.float64) for n in (0x1EEE, 0xC931))
    weight = np.zeros((16 * code.shape[0], 16 * code.shape[1]))
    for row, column in np.ndindex(*code.shape[:2]):
        words = np.frombuffer(code[row, column].numpy().tobytes(), "<u4")
        ring = "".join(f"{word:032b}" for word in words)
        end = 0
        for i in range(256):
            end += int(bits) + (i % 2 if bits % 1 else 0)
            state = int((ring + ring)[len(ring) + end - 16 : len(ring) + end], 2)
            total = 1024 + sum((state * 0x83DCD12D % 2**32).to_bytes(4, "little"))
            lane, j = divmod(i, 8)
            place = (2 * (lane % 4) + (0, 1, 8, 9)[j % 4], lane // 4 + 8 * (j // 4))
            weight[16 * row + place[0], 16 * column + place[1]] = np.float16(total * scale + offset)
        assert end == len(ring)
    return torch.from_numpy(weight)


@pytest.mark.parametrize("bits", [1, 2, 3, 8, 1.5, 2.5, 3.5])
def test_half_rates_and_whole_ones_decode_as_the_format_says(bits):
    code = random_code(2, 3, bits)
    assert torch.equal(trellis.decode(code, codebook.table("mul1", torch.float64)), decoded_by_hand(code, bits).T)


def test_one_tile_of_two_and_a_half_bits():
    words = [(n * 0x9E3779B1 + 0x7F4A7C15) & 0xFFFFFFFF for n in range(20)]
    states = trellis.unpack(code_of_words(words, 1, 1, 40))[0, 0]
    assert states[:8].tolist() == [0x10E1, 0x870F, 0x1C3F, 0xE1FD, 0x87F4, 0x3FA5, 0xFE94, 0xF4A7]


@pytest.mark.slow
def test_a_coded_linear_knows_its_rate():
    linear = CodedLinear(random_code(8, 8, 2.5), torch.ones(128), torch.ones(128), "mul1")
    assert (linear.bits, linear.half_bits) == (2.5, 5)
    x = torch.linspace(-1, 1, 128)[None]
    torch.testing.assert_close(linear.forward(x).float(), x @ linear.weight().T, rtol=0, atol=2e-2)


def test_tile_order_starts_as_the_tensor_core_fragment():
    row, column = trellis.positions()
    first = [(0, 0), (1, 0), (8, 0), (9, 0), (0, 8), (1, 8), (8, 8), (9, 8), (2, 0)]
    assert list(zip(row[:9].tolist(), column[:9].tolist(), strict=True)) == first


def test_hadamard_is_its_own_inverse_on_either_side():
    h = hadamard_matrix(torch.float64)
    assert torch.equal(h @ h, 128 * torch.eye(128, dtype=torch.float64))
    assert h[5, 6] == -1  # popcount(5 & 6) = popcount(4) = 1
    x = torch.randn(256, 384, dtype=torch.float64)
    for dim in (0, -1):
        assert torch.allclose(hadamard(hadamard(x, dim), dim, 1 / 128), x)
    assert torch.allclose(hadamard(x, 0), hadamard(x.T.contiguous()).T)
