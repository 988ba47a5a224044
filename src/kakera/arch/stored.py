"""What a model directory stores, from the headers of its safetensors files; nothing else is read. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from kakera.arch.config import short
from kakera.arch.documents import parsed, read_object, refuse_pointer
from kakera.errors import CheckpointError

HEADER_LIMIT = 100_000_000  # the format's own limit
MOST_DIMENSIONS = 16  # the product of a million sizes is not to be had
DTYPE_BYTES = {
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "F32": 4,
    "I32": 4,
    "U32": 4,
    "F16": 2,
    "BF16": 2,
    "I16": 2,
    "U16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
SINGLE, INDEX, DRAFT = "model.safetensors", "model.safetensors.index.json", "mtp/model.safetensors"


@dataclass(frozen=True)
class TensorHeader:
    """One tensor of one file. `name` is the name in the file, `offset` counts from the start of the file."""

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int

    def __str__(self) -> str:
        return f"tensor {self.name} in {self.path}"


def read_config(directory: Path) -> dict[str, Any]:
    """config.json of a model directory, {} if there is none. Raises CheckpointError for one that is no JSON object."""
    return read_object(directory / "config.json")


def read_headers(path: Path) -> list[TensorHeader]:
    """Of all tensors of a file. Raises CheckpointError if it is missing, damaged or cut off."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing")
    size = path.stat().st_size
    with path.open("rb") as file:
        refuse_pointer(path, file.read(64))
        file.seek(0)
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, HEADER_LIMIT):
            raise CheckpointError(f"{path} is cut off or no safetensors file ({size} bytes); download it again")
        try:
            header = parsed(file.read(length))
            header.pop("__metadata__", None)
            found = [_header(path, name, item, 8 + length) for name, item in header.items()]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path}: malformed safetensors header ({error!r})") from None
    last = max(found, key=lambda tensor: tensor.offset + tensor.bytes, default=None)
    if last is not None and (end := last.offset + last.bytes) > size:
        raise CheckpointError(
            f"{path} is cut off: {last.name} ends at byte {end}, the file at {size}; download it again"
        )
    return found


def _header(path: Path, name: str, item: dict[str, Any], base: int) -> TensorHeader:
    begin, end = item["data_offsets"]
    sizes = item["shape"]
    fair = len(sizes) <= MOST_DIMENSIONS and all(isinstance(size, int) and 0 <= size < 2**63 for size in sizes)
    if not 0 <= begin <= end or not fair or not isinstance(item["dtype"], str):
        raise ValueError(f"{name}: bytes {begin} to {end} of shape {short(sizes)} and dtype {short(item['dtype'])}")
    found = TensorHeader(name, path, item["dtype"], tuple(sizes), base + begin, end - begin)
    width = DTYPE_BYTES.get(found.dtype)
    if width is not None and found.bytes != math.prod(found.shape) * width:
        raise ValueError(f"{name}: {found.bytes} bytes for {found.dtype} {list(found.shape)}")
    return found


def checkpoint_files(directory: Path) -> dict[Path, set[str]]:
    """The files with weights, each with the tensors that an index wants of it (none of a single file). Raises
    CheckpointError naming what is missing."""
    index = directory / INDEX
    if (directory / SINGLE).is_file():
        return {directory / SINGLE: set()}
    if not index.is_file():
        held = sum(file.suffix == ".safetensors" for file in directory.iterdir())
        why = f"nothing says what its {held} safetensors files are; download the index" if held else "it has no weights"
        raise CheckpointError(f"{directory} has neither {SINGLE} nor {INDEX}: {why}")
    found = {directory / file: names for file, names in indexed_files(read_object(index), str(index)).items()}
    for path, names in found.items():
        if not _is_file(path):
            raise CheckpointError(
                f"{index} puts tensor {min(names)} into {path.name[:80]}, but that file is missing; download it again"
            )
    return found


def _is_file(path: Path) -> bool:
    """False, too, of a name that no file can have."""
    try:
        return path.is_file()
    except OSError:
        return False


def indexed_files(index: Any, where: str) -> dict[str, set[str]]:
    """Files that an index names, each with its tensors. Raises CheckpointError."""
    found: dict[str, set[str]] = {}
    try:
        for name, file in index["weight_map"].items():
            found.setdefault(file, set()).add(name)
        for file, names in found.items():
            if PurePath(file).is_absolute() or ".." in PurePath(file).parts:
                raise ValueError(f"{min(names)} is said to lie in {file}, outside of the model's directory")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{where} can not be read ({error!r})") from None
    return found


def stored_headers(directory: Path, beside: Iterable[str] = ()) -> list[TensorHeader]:
    """Of all tensors of a model directory; those of a draft layer's folder and of files `beside` the index's come
    last, if they are there. Raises CheckpointError."""
    found: list[TensorHeader] = []
    for path, names in checkpoint_files(directory).items():
        held = read_headers(path)
        if missing := names - {tensor.name for tensor in held}:
            raise CheckpointError(
                f"{directory / INDEX} puts tensor {min(missing)} into {path.name}, but the file does not hold it"
            )
        found += [tensor for tensor in held if not names or tensor.name in names]
    others = (directory / name for name in (DRAFT, *beside))
    return found + [tensor for path in others if path.is_file() for tensor in read_headers(path)]


def headers_beginning(directory: Path, prefixes: tuple[str, ...]) -> list[TensorHeader]:
    """Of tensors whose names begin so, in any safetensors file of a directory: no index is asked, so only the files
    that hold them need be there. Raises CheckpointError for a file that is damaged."""
    found: dict[str, TensorHeader] = {}
    for path in sorted(directory.glob("*.safetensors")):
        for header in read_headers(path):
            if header.name.startswith(prefixes):
                found.setdefault(header.name, header)
    return list(found.values())
