"""MODEL on the command line -> files on disk, or, for planning, only a shape and byte counts.

`spec:NAME` is a model of NAME's shapes with random weights: right for speed and memory, good for nothing else.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kakera.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from kakera.arch.spec import ModelSpec
    from kakera.plan.weights import WeightBytes

BUNDLED = Path(__file__).resolve().parent.parent / "data" / "mini"
SCRIPTED = "scripted:"
SPEC = "spec:"
_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_WANTED = ["*.json", "*.jinja", "*.safetensors", "*.model", "*.txt"]
CONNECT_SECONDS = 10.0
_NEEDED = ("config.json", "tokenizer.json")


@dataclass(frozen=True)
class Model:
    """`path` is a model directory, or the script file of a scripted model. `name` is what a client sees."""

    name: str
    path: Path
    scripted: bool = False


def resolve_model(name: str) -> Model:
    """Files that can be served; downloads a repo id. Raises UsageError or CheckpointError naming what is missing."""
    from kakera.plan.known import KNOWN

    if name.startswith(SCRIPTED):
        path = Path(name.removeprefix(SCRIPTED))
        if not path.is_file():
            raise UsageError(f"{name}: there is no file {path}")
        return Model(path.stem, path, scripted=True)
    if name.startswith(SPEC):
        from kakera.cli.stand_in import directory_for

        shape = name.removeprefix(SPEC)
        return Model(name, directory_for(Path(shape).name, _config_of(shape), BUNDLED))
    if name == "mini":
        return Model("mini", _complete(BUNDLED))
    path = Path(name).expanduser()
    if path.is_dir():
        return Model(path.resolve().name, _complete(path))
    if name in KNOWN:
        raise UsageError(
            f"{name} is a shape without weights: give a directory or a Hugging Face repo id, or {SPEC}{name}, whose "
            f"weights are random, to measure speed and memory"
        )
    return Model(name.rsplit("/", 1)[-1], _complete(_download(_repo_id(name))))


def shape_of(name: str) -> tuple[ModelSpec, WeightBytes]:
    """What a plan needs, without downloading weights: only headers are read, or the config of a well-known name."""
    from kakera.arch.registry import load_spec, spec_of
    from kakera.plan import weights
    from kakera.plan.known import KNOWN

    if name.startswith(SCRIPTED):
        raise UsageError("a scripted model has no weights and needs no plan")
    if name in KNOWN or name.startswith(SPEC):
        config = _config_of(name.removeprefix(SPEC))
        spec = spec_of(config)
        return spec, weights.from_config(spec, config)
    path = BUNDLED if name == "mini" else Path(name).expanduser()
    if not path.is_dir():
        return _remote_shape(_repo_id(name))
    spec = load_spec(path)
    if any(path.glob("*.safetensors*")):
        return spec, weights.from_checkpoint(path, spec)
    return spec, weights.from_config(spec, json.loads((path / "config.json").read_text()))


def _config_of(shape: str) -> dict[str, Any]:
    """Config of a well-known model, or of a directory, which needs nothing else. Raises UsageError."""
    from kakera.arch.stored import read_config
    from kakera.plan.known import KNOWN

    config = KNOWN.get(shape) or read_config(Path(shape).expanduser())
    if not config:
        raise UsageError(f"{shape}: known shapes are {', '.join(KNOWN)}; a directory with a config.json will do, too")
    return config


def _complete(path: Path) -> Path:
    """Name every missing file at once: a model without its tokenizer would start and answer nonsense."""
    from kakera.arch.stored import checkpoint_files

    missing = [file for file in _NEEDED if not (path / file).is_file()]
    if missing:
        raise CheckpointError(f"{path} lacks {' and '.join(missing)}: the model can not be served without")
    checkpoint_files(path)
    return path


def _repo_id(name: str) -> str:
    from kakera.plan.known import KNOWN

    if not _REPO_ID.fullmatch(name):
        raise UsageError(
            f"{name}: no such directory, and not a Hugging Face repo id (owner/name); `mini` is bundled, and "
            f"`kakera plan` knows the shapes {', '.join(KNOWN)}"
        )
    return name


def _download(repo: str) -> Path:
    """The snapshot of a repo. What was downloaded before is enough when the hub can not be reached."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    reason = _unreachable(repo)
    try:
        return Path(snapshot_download(repo, allow_patterns=_WANTED, local_files_only=reason is not None))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(_why(repo, reason or error)) from None


def _unreachable(repo: str) -> Exception | None:
    """One quick question to the hub: downloads retry for half a minute before they say that there is no network."""
    from huggingface_hub import model_info

    try:
        model_info(repo, timeout=CONNECT_SECONDS)
    except Exception as error:  # connection errors belong to the hub's HTTP library, and that changes by version
        return error
    return None


def _remote_shape(repo: str) -> tuple[ModelSpec, WeightBytes]:
    """config.json and the safetensors headers of a repo: some hundred KB instead of gigabytes."""
    from huggingface_hub import get_safetensors_metadata, hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    from kakera.arch.registry import spec_of
    from kakera.arch.stored import TensorHeader
    from kakera.plan.weights import from_tensors

    if (reason := _unreachable(repo)) is not None:
        raise CheckpointError(_why(repo, reason))
    try:
        config = json.loads(Path(hf_hub_download(repo, "config.json")).read_text())
        files = get_safetensors_metadata(repo).files_metadata.values()
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(_why(repo, error)) from None
    spec = spec_of(config)
    tensors = [
        TensorHeader(name, Path(repo), t.dtype, tuple(t.shape), begin, end - begin)
        for file in files
        for name, t in file.tensors.items()
        for begin, end in [t.data_offsets]
    ]
    return spec, from_tensors(tensors, spec, f"{len(tensors)} tensors of {repo} (headers only, nothing downloaded)")


def _why(repo: str, error: Exception) -> str:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    if isinstance(error, GatedRepoError):
        return f"{repo}: access needs an agreement on huggingface.co and a login (hf auth login)"
    if isinstance(error, RepositoryNotFoundError):
        return f"{repo}: huggingface.co has no such repository, or it is private (hf auth login)"
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return (
        f"{repo} could not be fetched from huggingface.co ({first}). Offline? Give a local model directory, or use "
        f"`mini`, which needs no network"
    )
