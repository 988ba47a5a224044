"""doctor's checks, each made to fail on purpose."""

from __future__ import annotations

import hashlib
import re
import shutil
import socket
import sys
from pathlib import Path

import pytest
import torch

from kakera.cli import checks
from kakera.errors import KakeraError
from kakera.ops.cuda import compiler
from kakera.target import devices


def test_taken_port_is_a_note_with_a_fix() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        taken = checks.port(holder.getsockname()[1])
    assert taken.status == "note" and "--port" in taken.fix


def test_wsl_is_recognised_by_its_kernel() -> None:
    found = checks.wsl("6.6.87.2-microsoft-standard-WSL2")
    assert found.status == "note" and ".wslconfig" in found.fix
    assert checks.wsl("6.8.0-45-generic").status == "ok"


def test_how_memory_of_a_card_is_taken_is_told_with_who_chose_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "detect_gpus", lambda: ((), ()))
    assert checks.card_memory().detail.startswith("nothing to choose")
    monkeypatch.setattr(devices, "detect_gpus", lambda: ((devices.Device("card", 12 * 10**9),), ()))
    on = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    for environ, under_wsl, status, words in (
        ({}, False, "ok", "expandable_segments is on, set by kakera: .*; KV pages go back"),
        ({}, True, "ok", "expandable_segments is off, set by kakera: under WSL2 .*; KV pages stay"),
        (on, False, "ok", "is on, set by PYTORCH_CUDA_ALLOC_CONF"),
        (on, True, "note", "is on, set by PYTORCH_CUDA_ALLOC_CONF"),
    ):
        found = checks.card_memory(environ, under_wsl)
        assert found.status == status and re.search(words, found.detail), found
        assert ("PYTORCH_CUDA_ALLOC_CONF" in found.fix) == (status == "note")


def test_little_memory_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "host_memory", lambda: (4 * 10**9, 3 * 10**9))
    assert checks.memory().status == "note"
    monkeypatch.setattr(devices, "host_memory", lambda: (32 * 10**9, 3 * 10**9))
    assert checks.memory().status == "ok"


def test_compiler_is_missed_only_where_a_gpu_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(devices, "detect_gpus", lambda: ((), ()))
    assert checks.c_compiler().status == "ok"
    monkeypatch.setattr(devices, "detect_gpus", lambda: ((devices.Device("card", 12 * 10**9),), ()))
    found = checks.c_compiler()
    assert found.status == "broken" and "apt install gcc" in found.fix


def test_bindings_are_missed_only_where_a_gpu_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    monkeypatch.setattr(devices, "detect_gpus", lambda: ((), ()))
    assert checks.cuda_bindings().status == "ok"
    monkeypatch.setattr(devices, "detect_gpus", lambda: ((devices.Device("card", 12 * 10**9),), ()))
    found = checks.cuda_bindings()
    assert found.status == "broken" and "pip install 'cuda-bindings==" in found.fix


@pytest.mark.parametrize(("built_for", "major"), [("12.6", 12), ("12.9", 12), ("13.0", 13), (None, 13)])
def test_the_bindings_that_are_missing_are_those_of_torchs_cuda(
    monkeypatch: pytest.MonkeyPatch, built_for: str | None, major: int
) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    monkeypatch.setattr(torch.version, "cuda", built_for)
    monkeypatch.setattr(devices, "detect_gpus", lambda: ((devices.Device("card", 12 * 10**9),), ()))
    wanted = f"pip install 'cuda-bindings=={major}.*'"
    assert wanted in checks.cuda_bindings().fix
    with pytest.raises(KakeraError, match=re.escape(wanted)):
        compiler.kernel("int8_few", 32, (f"BUILT_FOR={built_for}",), 0)


def test_driver_that_does_not_answer_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "detect_gpus", lambda: ((), ()))
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    assert checks.gpu().status == "broken"
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert checks.gpu().status == "ok"


def test_check_that_raises_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def port() -> checks.Finding:
        raise RuntimeError("surprise")

    found = checks._guarded(port)
    assert (found.name, found.status) == ("port", "broken") and "surprise" in found.detail


def test_damaged_file_of_the_bundled_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    digest = hashlib.sha256(b"{}").hexdigest()
    (tmp_path / "SHA256SUMS").write_text(f"{digest}  config.json\n{digest}  tokenizer.json\n")
    assert checks._damaged_files(tmp_path) == ["tokenizer.json"]
    (tmp_path / "config.json").write_text("{ }")
    assert checks._damaged_files(tmp_path) == ["config.json", "tokenizer.json"]
    (tmp_path / "SHA256SUMS").unlink()
    assert checks._damaged_files(tmp_path) == ["SHA256SUMS"]
    assert checks.bundled_model(tmp_path).status == "broken"
