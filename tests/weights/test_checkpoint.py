"""Reading model directories: names, formats, what is refused and how little memory it takes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kakera.arch.spec import QWEN_NAMES
from kakera.errors import CheckpointError
from kakera.ops.codec import trellis
from kakera.weights.checkpoint import Checkpoint

CONFIG = {
    "model_type": "qwen3_5_text",
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 1,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "max_position_embeddings": 512,
    "rope_theta": 1e7,
}
UP = "model.layers.0.mlp.up_proj"


def write(directory: Path, tensors: dict[str, torch.Tensor], file: str = "model.safetensors", **config) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG | config))
    save_file(tensors, directory / file)
    return directory


def write_index(directory: Path, weight_map: dict[str, str]) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def random_code(out_channels: int, in_channels: int, bits: float) -> torch.Tensor:
    shape, generator = (
        (in_channels // 16, out_channels // 16, round(16 * bits)),
        torch.Generator().manual_seed(int(bits)),
    )
    return torch.randint(-(1 << 15), 1 << 15, shape, generator=generator).to(torch.int16)


def escha(bits: int = 2, name: str = UP) -> dict[str, torch.Tensor]:
    return {
        f"{name}.escha_code": random_code(256, 128, bits),
        f"{name}.escha_rin": torch.linspace(0.5, 1, 128).half(),
        f"{name}.escha_rout": torch.linspace(-1, 1, 256).half(),
        f"{name}.escha_s_in": torch.linspace(0.98, 1.02, 128),
        f"{name}.escha_s_out": torch.linspace(1.02, 0.98, 256),
        f"{name}.escha_config": torch.tensor([16, bits, 2, 1, 128, 256], dtype=torch.int32),
        f"{name}.bias": torch.ones(256).half(),
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_plain_weights_in_every_dtype(tmp_path, dtype):
    weight = torch.randn(256, 128).to(dtype)
    checkpoint = Checkpoint.open(write(tmp_path, {f"{UP}.weight": weight}))
    assert torch.equal(checkpoint.linear(UP, 256, 128), weight.float())
    assert torch.equal(checkpoint.linear(UP, 256, 128, dtype=dtype), weight)
    assert checkpoint.bias(UP, 256) is None
    assert checkpoint.coded(UP, 256, 128) is None


@pytest.mark.parametrize(
    ("stored", "canonical"),
    [
        ("model.language_model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("language_model.model.norm.weight", "model.norm.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("mtp.fc.weight", "mtp.fc.weight"),
        ("lm_head.weight", "lm_head.weight"),
    ],
)
def test_names_lose_the_multimodal_wrapper(stored, canonical):
    assert QWEN_NAMES.canonical(stored) == canonical


def test_int8_rows_round_to_half_once(tmp_path):
    codes = torch.randint(-127, 128, (256, 128), dtype=torch.int8)
    scale = (torch.rand(256) / 50).half()
    tensors = {"lm_head.weight_int8": codes, "lm_head.weight_scale": scale}
    checkpoint = Checkpoint.open(write(tmp_path, tensors))
    expected = (codes.float() * scale.float()[:, None]).half().float()
    assert torch.equal(checkpoint.linear("lm_head", 256, 128), expected)
    stored = checkpoint.int8_rows("lm_head", 256, 128)
    assert torch.equal(stored[0], codes)
    assert torch.equal(stored[1], scale)


def test_escha_folds_its_scales_in_fp32_and_keeps_its_bias_switched_off(tmp_path):
    tensors = escha()
    directory = write(tmp_path, tensors)
    coded = Checkpoint.open(directory).coded(UP, 256, 128)
    assert torch.equal(coded.in_scale, tensors[f"{UP}.escha_rin"].float() * tensors[f"{UP}.escha_s_in"])
    assert torch.equal(coded.out_scale, tensors[f"{UP}.escha_rout"].float() * tensors[f"{UP}.escha_s_out"])
    assert torch.equal(Checkpoint.open(directory).linear(UP, 256, 128), coded.weight())
    assert Checkpoint.open(directory).bias(UP, 256) is None
    assert torch.equal(Checkpoint.open(directory, escha_bias=True).bias(UP, 256), torch.ones(256))


MULTIPLIERS = {"mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}


def exl3(bits: float, **flags: int) -> dict[str, torch.Tensor]:
    """The leaves of a linear, and scalars as int32, which is how files keep them."""
    return {
        f"{UP}.trellis": random_code(256, 128, bits),
        f"{UP}.suh": torch.rand(128).half(),
        f"{UP}.svh": torch.rand(256).half(),
        f"{UP}.bias": torch.ones(256).half(),
    } | {f"{UP}.{flag}": torch.tensor(value).to(torch.int32) for flag, value in flags.items()}


@pytest.mark.parametrize("value", ["multiplier", 1, 0])
@pytest.mark.parametrize("flag", ["mcg", "mul1", None])
def test_exl3_takes_its_codebook_from_the_flag_that_is_there(tmp_path, flag, value):
    flags = {flag: MULTIPLIERS[flag] if value == "multiplier" else value} if flag else {}
    checkpoint = Checkpoint.open(write(tmp_path, exl3(5, **flags)))
    coded = checkpoint.coded(UP, 256, 128)
    assert (coded.codebook, coded.bits, checkpoint.kind(UP)) == (flag or "3inst", 5, "exl3")
    assert torch.equal(checkpoint.bias(UP, 256), torch.ones(256)), "an EXL3 bias is the model's own"


@pytest.mark.parametrize("bits", [1.5, 2.5, 3.5])
def test_exl3_has_rates_with_a_half(tmp_path, bits):
    tensors = exl3(bits, mul1=MULTIPLIERS["mul1"])
    checkpoint = Checkpoint.open(write(tmp_path, tensors))
    coded = checkpoint.coded(UP, 256, 128)
    assert (coded.codebook, coded.bits) == ("mul1", bits)
    assert torch.equal(checkpoint.linear(UP, 256, 128), coded.weight())
    (entry,) = checkpoint.entries()
    assert (entry.kind, entry.shape) == ("exl3", (256, 128))
    assert entry.bits_per_weight == pytest.approx(bits + 8 * (2 * 128 + 2 * 256 + 2 * 256 + 4) / (256 * 128))


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        (
            exl3(2.5, mcg=MULTIPLIERS["mcg"]),
            r"trellis in .* 2\.5 bits a weight, which the codebook mul1 alone has.*mcg",
        ),
        (exl3(2.5), "the codebook mul1 alone has; this is 3inst"),
        (exl3(4.5, mul1=MULTIPLIERS["mul1"]), "4.5 bits a weight; EXL3 has 1 to 8, or 1.5, 2.5 or 3.5"),
        (exl3(0.5, mul1=MULTIPLIERS["mul1"]), "0.5 bits a weight"),
        (exl3(9), "9 bits a weight"),
        (exl3(2.25, mul1=MULTIPLIERS["mul1"]), "2.25 bits a weight"),
        (exl3(2, mcg=MULTIPLIERS["mcg"], mul1=MULTIPLIERS["mul1"]), "both present"),
        (exl3(2) | {f"{UP}.signs": torch.ones(1, 256).half()}, "signs in .* coded row by row"),
        (exl3(2) | {f"{UP}.trellis": torch.zeros(256, 33, dtype=torch.int16)}, r"shape \[256, 33\], not \[inputs / 16"),
        (escha() | {f"{UP}.escha_code": torch.zeros(256, 33, dtype=torch.int16)}, r"shape \[256, 33\], not \[inputs"),
    ],
)
def test_what_headers_tell_to_be_another_codec_is_refused_by_info_and_when_read(tmp_path, tensors, words):
    checkpoint = Checkpoint.open(write(tmp_path, tensors))
    with pytest.raises(CheckpointError, match=words):
        checkpoint.entries()
    with pytest.raises(CheckpointError, match=words):
        checkpoint.linear(UP, 256, 128)


@pytest.mark.parametrize(("flag", "value"), [("mcg", 0xF34B73AD), ("mul1", 0xCBAC1FED), ("mul1", 2), ("mcg", -1)])
def test_another_multiplier_is_another_codebook(tmp_path, flag, value):
    words = (
        rf"up_proj\.{flag} in .* holds 0x{value & 0xFFFFFFFF:08X}, another codebook than .* 0x{MULTIPLIERS[flag]:08X}"
    )
    refused(write(tmp_path, exl3(2, **{flag: value})), words)


def test_old_exl3_signs_are_bit_fields(tmp_path):
    tensors = {
        f"{UP}.trellis": random_code(256, 128, 2),
        f"{UP}.su": torch.tensor([0b101] + [0] * 7, dtype=torch.int16),
        f"{UP}.svh": torch.rand(256).half(),
    }
    coded = Checkpoint.open(write(tmp_path, tensors)).coded(UP, 256, 128)
    assert coded.in_scale[:4].tolist() == [-1, 1, -1, 1]
    assert coded.in_scale[4:].eq(1).all()


def test_leaves_of_one_linear_may_sit_in_different_shards_and_mtp_in_a_folder(tmp_path):
    tensors = escha()
    halves = [dict(list(tensors.items())[:3]), dict(list(tensors.items())[3:])]
    for number, half in enumerate(halves):
        write(tmp_path, half, f"part{number}.safetensors")
    write_index(tmp_path, {n: f"part{i}.safetensors" for i, half in enumerate(halves) for n in half})
    write(tmp_path / "mtp", {"mtp.norm.weight": torch.ones(128)})
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.linear(UP, 256, 128).isfinite().all()
    assert checkpoint.tensor("mtp.norm.weight", (128,)).eq(1).all()
    assert checkpoint.modules() == [UP, "mtp.norm"]


def test_a_tied_head_is_the_embedding(tmp_path):
    embedding = torch.randn(256, 128)
    checkpoint = Checkpoint.open(write(tmp_path, {"model.embed_tokens.weight": embedding}, tie_word_embeddings=True))
    assert not checkpoint.has("lm_head")
    assert torch.equal(checkpoint.linear("lm_head", 256, 128), embedding)
    checkpoint.check_complete(["model.embed_tokens", "lm_head"])


def test_entries_tell_format_shape_and_rate(tmp_path):
    checkpoint = Checkpoint.open(write(tmp_path, escha(3) | {"model.layers.0.linear_attn.A_log": torch.ones(1)}))
    by_name = {entry.name: entry for entry in checkpoint.entries()}
    assert (by_name[UP].kind, by_name[UP].shape) == ("escha", (256, 128))
    assert 3 < by_name[UP].bits_per_weight < 4
    assert by_name["model.layers.0.linear_attn.A_log"].bits_per_weight == 32


def test_complete_means_nothing_missing_and_nothing_unexpected(tmp_path):
    tensors = {f"{UP}.weight": torch.ones(256, 128), "model.norm.weight": torch.ones(128)}
    extra = {"model.visual.merger.weight": torch.ones(2), "mtp.norm.weight": torch.ones(128)}
    Checkpoint.open(write(tmp_path / "a", tensors | extra)).check_complete([UP, "model.norm.weight"])
    with pytest.raises(CheckpointError, match=r"1 tensors missing: lm_head"):
        Checkpoint.open(write(tmp_path / "b", tensors)).check_complete([UP, "model.norm.weight", "lm_head"])
    with pytest.raises(CheckpointError, match=r"1 tensors extra: model\.norm\.weight"):
        Checkpoint.open(write(tmp_path / "c", tensors)).check_complete([UP])


def refused(directory: Path, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        Checkpoint.open(directory).linear(UP, 256, 128)


def test_refusals_name_the_tensor_and_the_file(tmp_path):
    weight = torch.ones(256, 128)
    refused(write(tmp_path / "missing", {"lm_head.weight": weight}), f"{UP} is missing in .*missing")
    refused(write(tmp_path / "shape", {f"{UP}.weight": weight.T.contiguous()}), r"up_proj.*model\.saf.*\[128, 256\]")
    refused(write(tmp_path / "type", {f"{UP}.weight": weight.int()}), r"up_proj\.weight.*stored as I32")
    weight[3, 5] = torch.nan
    refused(write(tmp_path / "nan", {f"{UP}.weight": weight}), r"up_proj\.weight in .*NaN")
    unknown = escha() | {f"{UP}.escha_rotation_theta": torch.ones(1)}
    refused(write(tmp_path / "leaf", unknown), r"escha_rotation_theta in .*not understood")
    refused(write(tmp_path / "bits", escha(4)), r"escha_code.* has 4 bits")
    another = escha() | {f"{UP}.escha_config": torch.tensor([16, 2, 2, 2, 128, 256], dtype=torch.int32)}
    refused(write(tmp_path / "codebook", another), r"escha_config.*another codec")
    without = {name: tensor for name, tensor in escha().items() if "rin" not in name}
    refused(write(tmp_path / "half", without), r"escha_rin is missing")
    code = escha() | {f"{UP}.escha_code": random_code(128, 128, 2)}
    refused(write(tmp_path / "code", code), r"escha_code.*\[8, 8, 32\], the model needs \[8, 16, 16 x bits\]")


def test_damaged_files_are_refused(tmp_path):
    path = write(tmp_path / "cut", {f"{UP}.weight": torch.ones(256, 128)}) / "model.safetensors"
    whole = path.read_bytes()
    for length in (len(whole) - 1, 40, 3, 0):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"model\.safetensors.*cut off"):
            Checkpoint.open(path.parent)
    path.write_bytes(whole[:8] + b"x" + whole[9:])
    with pytest.raises(CheckpointError, match="malformed safetensors header"):
        Checkpoint.open(path.parent)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        Checkpoint.open(path.parent)
    write_index(path.parent, {f"{UP}.weight": "gone.safetensors"})
    with pytest.raises(CheckpointError, match=rf"{UP}\.weight into gone\.safetensors, but that file is missing"):
        Checkpoint.open(path.parent)


def test_a_file_cut_after_opening_is_an_error_and_not_garbage(tmp_path):
    directory = write(tmp_path, {f"{UP}.weight": torch.ones(256, 128)})
    checkpoint = Checkpoint.open(directory)
    os.truncate(directory / "model.safetensors", 1000)
    with pytest.raises(CheckpointError, match="bytes too early"):
        checkpoint.linear(UP, 256, 128)


MEASURE = """
import sys, torch
from pathlib import Path
from kakera.ops.codec import codebook
from kakera.weights.checkpoint import Checkpoint

def status(key):
    return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith(key)) * 1024

torch.randn(512, 512) @ torch.randn(512, 512)
checkpoint = Checkpoint.open(Path(sys.argv[1]))
codebook.table("mcg", torch.float32)
before = status("VmRSS")
kept = []
for entry in checkpoint.entries():
    rows, columns = entry.shape
    kept.append(checkpoint.linear(entry.name, rows, columns))
loaded = sum(t.numel() * t.element_size() for t in kept)
print(loaded, status("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads peak memory from /proc")
def test_loading_needs_little_more_than_what_it_loads(tmp_path):
    names = [f"model.layers.{i}.mlp.up_proj" for i in range(3)]
    tensors = {f"{name}.weight": torch.zeros(8192, 4096, dtype=torch.bfloat16) for name in names}  # 201 MB
    tensors |= {
        "lm_head.trellis": random_code(8192, 1024, 3),
        "lm_head.suh": torch.ones(1024).half(),
        "lm_head.svh": torch.ones(8192).half(),
        "model.embed_tokens.weight_int8": torch.ones(32768, 512, dtype=torch.int8),
        "model.embed_tokens.weight_scale": torch.ones(32768).half(),
    }
    write(tmp_path, tensors)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src"), "OMP_NUM_THREADS": "1"}
    output = subprocess.check_output([sys.executable, "-c", MEASURE, str(tmp_path)], env=environment, text=True)
    loaded, peak = map(int, output.split())
    assert loaded == 4 * (3 * 8192 * 4096 + 8192 * 1024 + 32768 * 512)
    assert loaded * 0.9 < peak <= loaded + 300e6
    print(f"loaded {loaded / 1e6:.0f} MB, peak above start {peak / 1e6:.0f} MB")


def test_decoding_walks_matrices_wider_than_one_block():
    from kakera.ops.codec import codebook
    from kakera.ops.codec.coded import CodedLinear
    from kakera.ops.codec.hadamard import hadamard

    coded = CodedLinear(random_code(4224, 256, 4), torch.rand(256) + 0.5, torch.rand(4224) + 0.5, "mcg")
    wq_OI = trellis.decode(coded.code, codebook.table("mcg", torch.float64))
    exact = coded.out_scale.double()[:, None] * hadamard(hadamard(wq_OI, 0), -1) * coded.in_scale.double() / 128
    assert torch.allclose(coded.weight().double(), exact, rtol=1e-5, atol=1e-5)
