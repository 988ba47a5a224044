"""Rotations: the fast transform, files of both formats, and every way in which a file can be wrong."""

from pathlib import Path

import pytest
import torch
from kv_world import make_spec

from kakera.errors import CheckpointError, UsageError
from kakera.kv.cache import KVCache
from kakera.kv.rotation import Frame, Rotation, fast_hadamard, hadamard_matrix
from kakera.plan.kv_format import KvFormat


def random_rotation(layers: int, heads: int, dim: int, seed: int = 0) -> Rotation:
    generator = torch.Generator().manual_seed(seed)

    def frame() -> Frame:
        matrix = torch.linalg.qr(torch.randn(layers, heads, dim, dim, generator=generator)).Q
        return Frame(matrix, torch.randn(layers, heads, dim, generator=generator))

    return Rotation(frame(), frame())


@pytest.mark.parametrize("dim", [1, 2, 8, 32, 64, 128, 256])
def test_fast_hadamard_is_the_matrix(dim: int) -> None:
    matrix, x = hadamard_matrix(dim), torch.randn(3, 5, dim)
    assert torch.allclose(matrix @ matrix, torch.eye(dim), atol=1e-5)
    assert torch.allclose(fast_hadamard(x), x @ matrix, atol=1e-5)


def test_hadamard_of_a_size_that_is_no_power_of_two_is_refused() -> None:
    with pytest.raises(ValueError, match="96"):
        hadamard_matrix(96)


def test_files_round_trip_with_centres(tmp_path: Path) -> None:
    spec, rotation = make_spec(head_dim=32, full=3), random_rotation(3, 2, 32)
    rotation.save(tmp_path / "rotation", spec, "test")
    back = Rotation.load(tmp_path / "rotation", spec)
    for a, b in zip(
        (*rotation.k.tensors(), *rotation.v.tensors()), (*back.k.tensors(), *back.v.tensors()), strict=True
    ):
        assert torch.equal(a, b)
    assert back.hash == rotation.hash != random_rotation(3, 2, 32, seed=1).hash


def test_a_saved_hadamard_is_recognised_and_fast_again(tmp_path: Path) -> None:
    spec = make_spec(head_dim=32)
    Rotation.hadamard(spec).save(tmp_path, spec, "hadamard")
    back = Rotation.load(tmp_path, spec)
    assert back.k.rotation_LKDD is None and back.hash == Rotation.hadamard(spec).hash


@pytest.mark.parametrize("names", [int, str])
def test_format_1_shares_a_matrix_between_heads(tmp_path: Path, names: type) -> None:
    spec, rotation = make_spec(head_dim=32), random_rotation(2, 1, 32)
    for name, frame in (("k", rotation.k), ("v", rotation.v)):
        layers = {
            names(i): {"layer_id": i, "rotation": frame.dense()[i, 0], "eigenvalues": torch.ones(32)} for i in range(2)
        }
        torch.save({"format_version": 1, "layers": layers}, tmp_path / f"{name}_rotation_qqt_r_h_pbr.pt")
    back = Rotation.load(tmp_path, spec)
    assert torch.equal(back.k.dense(), rotation.k.dense().expand(-1, 2, -1, -1))
    assert back.v.centre_LKD.eq(0).all()


def damage(record: dict, how: str) -> object:
    entry = record["layers"][1]
    if how == "layer":
        del record["layers"][1]
    elif how == "width":
        entry["rotation"] = torch.eye(16)
    elif how == "orthogonal":
        entry["rotation"] = entry["rotation"] * 1.01
    elif how == "nan":
        entry["rotation"][0, 0, 0] = float("nan")
    elif how == "centre":
        entry["centre"] = torch.zeros(3)
    elif how == "version":
        record["format_version"] = 3
    elif how == "entry":
        record["layers"][1] = "text"
    else:
        return ["not a dict"]
    return record


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("layer", r"layers \[1\]"),
        ("width", r"layer 1 .*\(16, 16\)"),
        ("orthogonal", "layer 1 is not orthogonal"),
        ("nan", "layer 1 is not orthogonal"),
        ("centre", "centre of layer 1"),
        ("version", "format_version 3"),
        ("entry", "layer 1 .*NoneType"),
        ("list", "'layers'"),
    ],
)
def test_a_wrong_file_is_refused_in_words(tmp_path: Path, how: str, words: str) -> None:
    spec = make_spec(head_dim=32)
    random_rotation(2, 2, 32).save(tmp_path, spec, "test")
    file = tmp_path / "v_rotation.pt"
    torch.save(damage(torch.load(file, weights_only=True), how), file)
    with pytest.raises(CheckpointError, match=words):
        Rotation.load(tmp_path, spec)


def test_missing_and_damaged_files_are_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="0 files named k_rotation"):
        Rotation.load(tmp_path, make_spec(head_dim=32))
    for name in "kv":
        (tmp_path / f"{name}_rotation.pt").write_bytes(b"not a zip file")
    with pytest.raises(CheckpointError, match="not a readable rotation file"):
        Rotation.load(tmp_path, make_spec(head_dim=32))


def test_formats_that_a_model_can_not_use_are_refused_at_construction() -> None:
    for group in (16, 48, 64, 0):
        with pytest.raises(UsageError, match="--kv-group"):
            KVCache(make_spec(head_dim=32), KvFormat("int2", group, 2), 2, 1)
    with pytest.raises(UsageError, match="power of two"):
        KVCache(make_spec(head_dim=96), KvFormat("int2", 32, 2), 2, 1)
    with pytest.raises(UsageError, match="--kv-window"):
        KVCache(make_spec(head_dim=32), KvFormat("int2", 32, 0), 2, 1)
    with pytest.raises(UsageError, match="--rotation"):
        KVCache(make_spec(head_dim=32), KvFormat("bf16"), 2, 1, Rotation.hadamard(make_spec(head_dim=32)))
    KVCache(make_spec(head_dim=96), KvFormat("bf16"), 2, 1)


def test_a_rotation_of_another_model_is_refused_at_construction() -> None:
    with pytest.raises(CheckpointError, match=r"\(2, 2, 32\)"):
        KVCache(make_spec(head_dim=32), KvFormat("int2", 32, 2), 2, 1, Rotation.hadamard(make_spec(head_dim=64)))
