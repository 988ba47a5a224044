"""Files of a quantised model: finished linears kept across a kill, then shards, index and configs.

config.json is written last: a directory that has one is complete.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from kakera.errors import UsageError
from kakera.weights.files import BUFFER_BYTES, StoredTensor, read_header

UNFINISHED = ".unfinished"
HEADER_BYTES_PER_TENSOR = 256  # generous: a name, a dtype, a shape and two offsets in JSON
COMPANIONS = (
    *("tokenizer*", "vocab.json", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template*"),
    *("additional_chat_templates/*.jinja", "generation_config.json", "*preprocessor_config.json", "LICENSE*"),
)


class Workspace:
    """Finished linears of an unfinished output, one file each, in OUT/.unfinished. A kill loses the one at work."""

    def __init__(self, out: Path):
        self.path = out / UNFINISHED

    @staticmethod
    def open(out: Path, digest: str) -> Workspace:
        """Start in a new or empty directory, or resume. Raises UsageError if OUT holds something else."""
        workspace = Workspace(out)
        manifest = workspace.path / "manifest.json"
        if manifest.is_file():
            if json.loads(manifest.read_text())["digest"] != digest:
                raise UsageError(
                    f"{out} holds an unfinished quantisation of another source or recipe: "
                    f"repeat its options to resume it, or delete {workspace.path}"
                )
        elif out.is_dir() and any(p.name != UNFINISHED for p in out.iterdir()):
            raise UsageError(f"{out} is not empty: name a new directory for the quantised model")
        else:
            workspace.path.mkdir(parents=True, exist_ok=True)
            write_json(manifest, {"digest": digest})
        return workspace

    def has(self, index: int) -> bool:
        return self._file(index).is_file()

    def load(self, index: int) -> tuple[list[StoredTensor], float]:
        """Tensors and error of a finished linear."""
        path = self._file(index)
        with safe_open(path, "pt") as file:
            error = float(file.metadata()["error"])
        return read_header(path), error

    def save(self, index: int, tensors: Mapping[str, Tensor], error: float) -> None:
        """Keep a finished linear: either all of it is on disk afterwards or, after a kill, none."""
        temporary = self._file(index).with_suffix(".partial")
        save_file({k: v.cpu().contiguous() for k, v in tensors.items()}, temporary, {"error": repr(error)})
        _replace(temporary, self._file(index))

    def close(self) -> None:
        shutil.rmtree(self.path)

    def _file(self, index: int) -> Path:
        return self.path / f"{index:06d}.safetensors"


def write_shards(out: Path, tensors: Iterable[tuple[str, StoredTensor]], shard_bytes: int) -> tuple[int, int]:
    """Copy tensors, in order and under new names, into files of at most `shard_bytes` (unless one tensor is larger).

    Writes the index if there are several. Returns (number of files, their bytes).
    """
    for stale in out.glob("model*.safetensors*"):  # of an assembly that was killed
        stale.unlink()
    shards: list[list[tuple[str, StoredTensor]]] = [[]]
    room = shard_bytes
    for name, stored in tensors:
        need = stored.bytes + HEADER_BYTES_PER_TENSOR
        if shards[-1] and need > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append((name, stored))
        room -= need
    if len(shards) == 1:
        names = ["model.safetensors"]
    else:
        names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        _write_shard(out / name, shard)
    if len(shards) > 1:
        weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor, _ in shard}
        total = sum(stored.bytes for shard in shards for _, stored in shard)
        write_json(out / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})
    return len(shards), sum((out / name).stat().st_size for name in names)


def copy_companions(source: Path, out: Path) -> None:
    """Tokenizer, chat template, generation config and licence, as they are."""
    for pattern in COMPANIONS:
        for path in sorted(source.glob(pattern)):
            if path.is_file():
                copy = out / path.relative_to(source)
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, copy)


def write_json(path: Path, content: Any) -> None:
    """Atomically."""
    temporary = path.with_suffix(".partial")
    temporary.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    _replace(temporary, path)


def _write_shard(path: Path, tensors: list[tuple[str, StoredTensor]]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, stored in tensors:
        header[name] = {
            "dtype": stored.dtype,
            "shape": list(stored.shape),
            "data_offsets": [offset, offset + stored.bytes],
        }
        offset += stored.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format asks for aligned data
    temporary = path.with_suffix(".partial")
    with temporary.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, stored in tensors:
            with stored.path.open("rb") as source:
                source.seek(stored.offset)
                for begin in range(0, stored.bytes, BUFFER_BYTES):
                    file.write(source.read(min(BUFFER_BYTES, stored.bytes - begin)))
    _replace(temporary, path)


def _replace(temporary: Path, path: Path) -> None:
    descriptor = os.open(temporary, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    temporary.replace(path)
