"""What a target says, and that torch means the same by it."""

from __future__ import annotations

import pytest
import torch

from kakera.errors import UsageError
from kakera.target import as_torch
from kakera.target.devices import resolve
from kakera.target.target import CPU, CUDA, DTYPE_BYTES


def test_a_machine_has_the_target_of_what_it_names() -> None:
    assert (resolve("cpu").target, resolve("cpu:4GB").target, resolve("12GB,rtx5070").target) == (CPU, CPU, CUDA)


@pytest.mark.parametrize(("target", "size"), [(CPU, 4), (CUDA, 2)])
def test_activations_take_the_bytes_of_their_dtype(target, size) -> None:
    assert target.activation_bytes == as_torch.DTYPES[target.dtype].itemsize == size


def test_dtypes_have_one_name_each_way() -> None:
    assert all(as_torch.DTYPES[name].itemsize == size for name, size in DTYPE_BYTES.items())
    assert all(as_torch.name_of(dtype) == name for name, dtype in as_torch.DTYPES.items())
    assert as_torch.name_of(torch.float64) is None


def test_a_device_of_torch_is_a_target(monkeypatch) -> None:
    assert as_torch.target_of(torch.device("cpu")) is CPU
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (8, 9))
    as_torch.target_of.cache_clear()
    found = as_torch.target_of(torch.device("cuda", 0))
    as_torch.target_of.cache_clear()
    assert (found.kind, found.capability, found.staged) == ("cuda", (8, 9), CUDA.staged)


def test_device_names_are_torchs_and_auto(monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert [as_torch.device_called(name) for name in ("auto", "cuda", "cuda:1", "cpu")] == [
        torch.device("cuda"),
        torch.device("cuda"),
        torch.device("cuda", 1),
        torch.device("cpu"),
    ]
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert as_torch.device_called("auto") == torch.device("cpu") and as_torch.is_there(CPU)
    with pytest.raises(UsageError, match="kakera doctor says why"):
        as_torch.device_called("cuda:1")
    with pytest.raises(UsageError, match="choose auto, cpu or cuda"):
        as_torch.device_called("tpu")
