"""Headers of safetensors files: read whole, and clear about what is damaged or missing."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from kakera.arch.stored import checkpoint_files, read_headers, stored_headers
from kakera.errors import CheckpointError


def _write(path: Path, **tensors: np.ndarray) -> None:
    save_file(tensors, path)


def test_header_lists_every_tensor(tmp_path: Path) -> None:
    _write(tmp_path / "a.safetensors", one=np.zeros((2, 3), np.float32), two=np.zeros(5, np.int8))
    assert {(t.name, t.dtype, t.shape, t.bytes) for t in read_headers(tmp_path / "a.safetensors")} == {
        ("one", "F32", (2, 3), 24),
        ("two", "I8", (5,), 5),
    }


@pytest.mark.parametrize("keep", [0, 7, 40, -1])
def test_cut_file_is_named(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "model.safetensors"
    _write(path, one=np.zeros((20, 30), np.float32))
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        read_headers(path)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    _write(tmp_path / "model-00001-of-00002.safetensors", a=np.zeros(1, np.float32))
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors, but that file is missing"):
        checkpoint_files(tmp_path)


@pytest.mark.parametrize(
    "shape",
    [[2**70] * 30_000, [0.5], ["1"], [-1, -1], [2**70, 0], None, 5, [[1]], [1] * 17],
    ids=lambda shape: str(shape)[:20],
)
def test_a_shape_that_is_none_is_said_at_once(tmp_path: Path, shape: object) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 4]}}).encode()
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(CheckpointError, match="malformed safetensors header") as said:
        read_headers(tmp_path / "a.safetensors")
    assert len(str(said.value)) < 400


@pytest.mark.parametrize("name", ["x" * 10_000, "a\0b", "", "."], ids=repr)
def test_a_file_that_can_not_be_is_missing(tmp_path: Path, name: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointError, match="that file is missing") as said:
        checkpoint_files(tmp_path)
    assert len(str(said.value)) < 400


def test_directory_without_weights_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no weights"):
        checkpoint_files(tmp_path)


def test_a_tensor_that_no_file_holds_is_named_and_one_that_no_index_names_is_left_out(tmp_path: Path) -> None:
    shard = "model-00001-of-00001.safetensors"
    _write(tmp_path / shard, a=np.zeros(1, np.float32), b=np.zeros(2, np.float32))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": shard}}))
    assert [tensor.name for tensor in stored_headers(tmp_path)] == ["a"]
    index.write_text(json.dumps({"weight_map": {"a": shard, "c": shard}}))
    with pytest.raises(CheckpointError, match=r"puts tensor c into .*, but the file does not hold it"):
        stored_headers(tmp_path)


def test_a_draft_layers_folder_belongs_to_the_directory(tmp_path: Path) -> None:
    _write(tmp_path / "model.safetensors", a=np.zeros(1, np.float32))
    (tmp_path / "mtp").mkdir()
    _write(tmp_path / "mtp" / "model.safetensors", **{"mtp.fc.weight": np.zeros(1, np.float32)})
    assert [tensor.name for tensor in stored_headers(tmp_path)] == ["a", "mtp.fc.weight"]


@pytest.mark.parametrize("file", ["/etc/model.safetensors", "../other/model.safetensors", "a/../../model.safetensors"])
def test_an_index_names_no_files_outside_of_its_directory(tmp_path: Path, file: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(CheckpointError, match="outside of the model's directory"):
        checkpoint_files(tmp_path)


@pytest.mark.parametrize("nested", ["[" * 100_000, '{"a":' * 50_000])
def test_what_is_nested_deeper_than_a_stack_is_said_to_be(tmp_path: Path, nested: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(nested)
    with pytest.raises(CheckpointError, match="nested too deeply"):
        checkpoint_files(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(len(nested).to_bytes(8, "little") + nested.encode())
    with pytest.raises(CheckpointError, match="nested too deeply"):
        read_headers(tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    "item", [{"shape": [-1, -4]}, {"data_offsets": [-16, 0]}, {"data_offsets": [16, 0]}, {"dtype": 5}]
)
def test_a_header_of_negative_sizes_or_of_no_dtype_is_malformed(tmp_path: Path, item: dict) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16], **item}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    with pytest.raises(CheckpointError, match="malformed"):
        read_headers(tmp_path / "model.safetensors")
