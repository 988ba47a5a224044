"""Stacks of experts: the same weights in every form that files have, and what is refused by tensor and file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from kakera.errors import CheckpointError
from kakera.ops.codec import codebook, trellis
from kakera.weights.checkpoint import Checkpoint

EXPERTS, WIDTH, HIDDEN = 5, 128, 256
CONFIG = {
    "model_type": "qwen3_5_moe_text",
    "vocab_size": 64,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 1,
    "layer_types": ["full_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "max_position_embeddings": 512,
    "rope_theta": 1e7,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": WIDTH,
    "shared_expert_intermediate_size": 2 * WIDTH,
}
PREFIX = "model.language_model.layers.0.mlp.experts"
STACKS = {"gate_up_proj": (2 * WIDTH, HIDDEN), "down_proj": (HIDDEN, WIDTH)}
Tensors = dict[str, Tensor]


def write(directory: Path, tensors: Tensors, **changes: int) -> Checkpoint:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    save_file(
        {f"{PREFIX}.{name}": tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors"
    )
    return Checkpoint.open(directory)


def read(checkpoint: Checkpoint, stack: str, number: int) -> Tensor:
    return checkpoint.expert(f"model.layers.0.mlp.experts.{stack}", number)


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.fixture(scope="module")
def stacked() -> Tensors:
    return {name: drawn(EXPERTS, *shape).bfloat16() for name, shape in STACKS.items()}


def split(stacked: Tensors) -> Tensors:
    found = {}
    for number in range(EXPERTS):
        gate, up = stacked["gate_up_proj"][number].chunk(2)
        parts = {"gate_proj": gate, "up_proj": up, "down_proj": stacked["down_proj"][number]}
        found |= {f"{number}.{name}.weight": tensor for name, tensor in parts.items()}
    return found


FORMS = {
    "stacked": lambda stacked: stacked,
    "stacked with .weight": lambda stacked: {f"{name}.weight": tensor for name, tensor in stacked.items()},
    "split": split,
    "half of each": lambda stacked: {**split(stacked), "gate_up_proj": stacked["gate_up_proj"]},
}


@pytest.mark.parametrize("form", FORMS)
def test_an_expert_is_read_alike_from_every_plain_form(tmp_path, stacked, form):
    tensors = FORMS[form](stacked)
    if form == "half of each":
        tensors = {
            name: tensor
            for name, tensor in tensors.items()
            if not name.endswith(("gate_proj.weight", "up_proj.weight"))
        }
    checkpoint = write(tmp_path, tensors)
    for name in STACKS:
        for number in (0, 3, EXPERTS - 1):
            assert torch.equal(read(checkpoint, name, number), stacked[name][number].float())
    entries = checkpoint.entries()
    assert sum(entry.bytes for entry in entries) == sum(t.nbytes for t in stacked.values())
    checkpoint.check_complete([f"model.layers.0.mlp.experts.{name}" for name in STACKS])


def code(inputs: int, outputs: int, bits: float, *experts: int) -> Tensor:
    shape = (*experts, inputs // 16, outputs // 16, round(16 * bits))
    return torch.randint(-(1 << 15), 1 << 15, shape, generator=torch.Generator().manual_seed(3)).to(torch.int16)


def escha(name: str = "gate_up_proj", bits: int = 2, shape: tuple[int, int] | None = None) -> Tensors:
    outputs, inputs = shape or STACKS[name]
    sizes = [16, bits, 2, 1, EXPERTS, inputs, outputs, inputs, outputs]
    rout = drawn(EXPERTS, outputs).half()
    rout[:, ::3] = 0  # as many channels of published files are
    return {
        f"{name}.escha_code": code(inputs, outputs, bits, EXPERTS),
        f"{name}.escha_rin": drawn(EXPERTS, inputs).half(),
        f"{name}.escha_rout": rout,
        f"{name}.escha_s_in": torch.ones(EXPERTS, inputs),
        f"{name}.escha_s_out": torch.ones(EXPERTS, outputs),
        f"{name}.escha_config": torch.tensor(sizes, dtype=torch.int32),
    }


def decoded(code: Tensor, book: codebook.Name, left_I: Tensor, right_O: Tensor) -> Tensor:
    """[O, I] in float64, with the Hadamard matrices written out."""
    h = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(7):
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    hb_II, hb_OO = (torch.block_diag(*[h] * (len(scale) // 128)) for scale in (left_I, right_O))
    wq_OI = trellis.decode(code, codebook.table(book, torch.float64))
    return right_O.double()[:, None] * (hb_OO @ wq_OI @ hb_II) * left_I.double() / 128


@pytest.mark.parametrize(("name", "bits"), [("gate_up_proj", 2), ("down_proj", 3)])
def test_escha_stacks_are_decoded_expert_by_expert(tmp_path, name, bits):
    tensors = escha(name, bits)
    checkpoint = write(tmp_path, tensors)
    for number in (0, 3):
        parts = [tensors[f"{name}.escha_{leaf}"][number] for leaf in ("code", "rin", "rout")]
        expected = decoded(parts[0], "mcg", *parts[1:])
        torch.testing.assert_close(read(checkpoint, name, number).double(), expected, rtol=0, atol=1e-5)
    (entry,) = checkpoint.entries()
    assert (entry.kind, entry.shape, int(entry.bits_per_weight)) == ("escha", (EXPERTS, *STACKS[name]), bits)


def test_extra_scales_that_are_not_one_are_folded_in(tmp_path):
    tensors = escha()
    plain = read(write(tmp_path / "ones", tensors), "gate_up_proj", 2)
    tensors["gate_up_proj.escha_s_out"][2] = 2
    assert torch.equal(read(write(tmp_path / "others", tensors), "gate_up_proj", 2), 2 * plain)


def exl3(number: int, name: str, bits: float, book: codebook.Name, shape: tuple[int, int] | None = None) -> Tensors:
    outputs, inputs = shape or ((HIDDEN, WIDTH) if name == "down_proj" else (WIDTH, HIDDEN))
    found = {"trellis": code(inputs, outputs, bits), "suh": drawn(inputs).half(), "svh": drawn(outputs).half()}
    flags = {"mcg": codebook.MCG_MULTIPLIER, "mul1": codebook.MUL1_MULTIPLIER}
    if book in flags:
        found[book] = torch.tensor(flags[book]).to(torch.int32)
    return {f"{number}.{name}.{leaf}": tensor for leaf, tensor in found.items()}


MIXED: list[tuple[float, codebook.Name]] = [(2, "mcg"), (3, "mul1"), (2.5, "mul1"), (4, "3inst"), (2, "mul1")]


def test_exl3_experts_have_rates_and_codebooks_of_their_own(tmp_path):
    tensors: Tensors = {}
    for number, (bits, book) in enumerate(MIXED):
        for name in ("gate_proj", "up_proj", "down_proj"):
            tensors |= exl3(number, name, bits, book)
    checkpoint = write(tmp_path, tensors)
    checkpoint.check_complete([f"model.layers.0.mlp.experts.{name}" for name in STACKS])
    for number, (_, book) in enumerate(MIXED):
        parts = []
        for name in ("gate_proj", "up_proj"):
            leaves = [tensors[f"{number}.{name}.{leaf}"] for leaf in ("trellis", "suh", "svh")]
            parts.append(decoded(leaves[0], book, *leaves[1:]))
        # the constants of mul1 are exact in kakera's table, and are added in float32
        found = read(checkpoint, "gate_up_proj", number).double()
        torch.testing.assert_close(found, torch.cat(parts), rtol=0, atol=1e-5)


def padded(tensors: Tensors) -> None:
    tensors["gate_up_proj.escha_config"][8] = 512


def shorter(tensors: Tensors) -> None:
    tensors["gate_up_proj.escha_config"] = torch.tensor([16, 2, 2, 1, HIDDEN, 2 * WIDTH], dtype=torch.int32)


def more_experts(tensors: Tensors) -> None:
    tensors["gate_up_proj.escha_rin"] = drawn(EXPERTS + 1, HIDDEN).half()


def unknown_leaf(tensors: Tensors) -> None:
    tensors["gate_up_proj.escha_theta"] = torch.ones(EXPERTS)


def bias(tensors: Tensors) -> None:
    tensors["gate_up_proj.bias"] = torch.ones(EXPERTS, 2 * WIDTH).half()


def four_bits(tensors: Tensors) -> None:
    tensors["gate_up_proj.escha_code"] = code(HIDDEN, 2 * WIDTH, 4, EXPERTS)


DAMAGES = {
    padded: r"escha_config in \S+ is \[.*512\], expected \[16, 2, 2, 1, 5, 256, 256, 256, 256\]",
    shorter: r"escha_config in \S+ is \[16, 2, 2, 1, 256, 256\], expected",
    more_experts: r"escha_rin in \S+ has shape \[6, 256\], the model has 5 experts",
    unknown_leaf: r"escha_theta in \S+: the leaf 'escha_theta' is not understood",
    bias: r"the leaf 'bias' is not understood",
    four_bits: r"escha_code\[1\] in \S+ has 4 bits a weight; Escha files have 2 or 3",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_escha_stack_is_refused_by_tensor_and_file(tmp_path, damage):
    tensors = escha()
    damage(tensors)
    with pytest.raises(CheckpointError, match=DAMAGES[damage]):
        read(write(tmp_path, tensors), "gate_up_proj", 1)


def without(names: str):
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if not name.startswith(names)}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without("3.gate_proj"), r"1 tensors missing: model\.layers\.0\.mlp\.experts\.3\.gate_proj$"),
        (without(("3.", "4.")), "6 tensors missing"),
        (
            lambda tensors: {**tensors, "5.up_proj.weight": drawn(WIDTH, HIDDEN)},
            r"1 tensors extra: \S+\.5\.up_proj\.weight",
        ),
        (lambda tensors: {**tensors, "down_proj": drawn(EXPERTS, *STACKS["down_proj"])}, "5 tensors extra"),
        (lambda tensors: {"router": drawn(3)}, "2 tensors missing: .*experts.down_proj, .*experts.gate_up_proj"),
    ],
    ids=["a linear", "two experts", "one too many", "both forms", "nothing"],
)
def test_what_is_missing_or_too_much_is_named(tmp_path, stacked, change, words):
    checkpoint = write(tmp_path, change(split(stacked)))
    with pytest.raises(CheckpointError, match=words):
        checkpoint.check_complete([f"model.layers.0.mlp.experts.{name}" for name in STACKS])


def test_other_plain_shapes_and_biases_are_refused(tmp_path, stacked):
    for name, tensors, words in (
        ("experts", {"gate_up_proj": drawn(4, *STACKS["gate_up_proj"])}, r"shape \[4, 256, 256\], the model has 5"),
        ("width", {"gate_up_proj": drawn(EXPERTS, WIDTH, HIDDEN)}, r"shape \[128, 256\], the model needs \[256, 256\]"),
        ("bias", {**split(stacked), "0.up_proj.bias": drawn(WIDTH)}, "has a bias"),
        ("rows", {"gate_up_proj.weight_int8": torch.ones(EXPERTS, 256, 256, dtype=torch.int8)}, "'weight_int8' is not"),
    ):
        with pytest.raises(CheckpointError, match=words):
            read(write(tmp_path / name, tensors), "gate_up_proj", 0)


@pytest.mark.parametrize("form", ["stacked", "split", "escha", "exl3"])
def test_what_two_ranks_read_are_the_parts_of_an_expert(tmp_path, form):
    """Of gate and of up the same block of 128, of down the inputs that read it; of coded ones within rounding."""
    shapes = {"gate_up_proj": (4 * WIDTH, HIDDEN), "down_proj": (HIDDEN, 2 * WIDTH)}
    plain = {name: drawn(EXPERTS, *shape).bfloat16() for name, shape in shapes.items()}
    tensors = {"stacked": plain, "split": split(plain)}.get(form, {})
    if form == "escha":
        for name, bits in (("gate_up_proj", 2), ("down_proj", 3)):
            tensors |= escha(name, bits, shapes[name])
    if form == "exl3":
        for number in range(EXPERTS):
            for name in ("gate_proj", "up_proj", "down_proj"):
                shape = shapes["down_proj"] if name == "down_proj" else (2 * WIDTH, HIDDEN)
                tensors |= exl3(number, name, 2, "mcg", shape)
    write(tmp_path, tensors, moe_intermediate_size=2 * WIDTH)
    whole, *parts = (Checkpoint.open(tmp_path, rank=r, ranks=n) for r, n in ((0, 1), (0, 2), (1, 2)))
    for name in shapes:
        expected_OI, (first, second) = read(whole, name, 3), (read(part, name, 3) for part in parts)
        if name == "down_proj":
            found = torch.cat([first, second], 1)
        else:
            found = torch.cat([half for pair in zip(first.chunk(2), second.chunk(2), strict=True) for half in pair])
        torch.testing.assert_close(found, expected_OI, rtol=0, atol=1e-5 if form in ("escha", "exl3") else 0)


def test_a_random_stack_is_its_pieces(tmp_path):
    """So that whoever reads one expert and whoever reads all see one model."""
    for method in (None, "eschamoe"):
        config = {**CONFIG, "random_weights": 4, "quantization_config": method and {"quant_method": method}}
        (tmp_path / "config.json").write_text(json.dumps(config))
        checkpoint = Checkpoint.open(tmp_path)
        checkpoint.check_complete(checkpoint.spec.tensors())
        if method:
            whole = checkpoint.leaves("model.layers.0.mlp.experts.down_proj")["escha_code"]
            assert torch.equal(whole.read()[2], whole.piece(2).read()) and whole.piece(2).shape == (8, 16, 48)
        else:
            whole = checkpoint.leaves("model.layers.0.mlp.experts")["down_proj"]
            assert torch.equal(whole.read()[3].float(), read(checkpoint, "down_proj", 3))
        weight_OI = read(checkpoint, "gate_up_proj", 1)
        assert weight_OI.std().item() == pytest.approx(HIDDEN**-0.5, rel=0.03)
