"""MODEL on the command line -> files on disk, or, for planning, only a shape and byte counts.

`spec:NAME` is a model of NAME's shapes with random weights: right for speed and memory, good for nothing else.
"""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kakera.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from kakera.arch.spec import ModelSpec
    from kakera.arch.stored import TensorHeader
    from kakera.arch.weigh import Entry
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


@dataclass(frozen=True)
class Shape:
    """A model without its weights: `headers` of its files, or None if only the config is known."""

    spec: ModelSpec
    config: dict[str, Any]
    headers: list[TensorHeader] | None
    source: str

    def weights(self) -> WeightBytes:
        from kakera.plan.weights import from_config, from_tensors

        if self.headers is None:
            return from_config(self.spec, self.config)
        return from_tensors(self.headers, self.spec, f"{len(self.headers)} tensors of {self.source}")

    def entries(self) -> list[Entry]:
        from kakera.arch.weigh import expected_entries, stored_entries

        return (
            expected_entries(self.spec, self.config)
            if self.headers is None
            else stored_entries(self.spec, self.headers)
        )


def resolve_model(name: str) -> Model:
    """Files that can be served; downloads a repo id. Raises UsageError or CheckpointError naming what is missing, and
    Unserved before that for a model that can be planned only."""
    from kakera.arch.registry import refuse_unserved
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
        refuse_unserved(_config_in(path))
        return Model(path.resolve().name, _complete(path))
    if name in KNOWN:
        refuse_unserved(KNOWN[name])
        raise UsageError(
            f"{name} is a shape without weights: give a directory or a Hugging Face repo id, or {SPEC}{name}, whose "
            f"weights are random, to measure speed and memory"
        )
    repo = _repo_id(name)
    reason = _unreachable(repo)
    refuse_unserved(_remote_config(repo, offline=reason is not None))
    return Model(name.rsplit("/", 1)[-1], _complete(_download(repo, reason)))


def shape_of(name: str) -> tuple[ModelSpec, WeightBytes]:
    """What a plan needs, without downloading weights: only headers are read, or the config of a well-known name."""
    shape = read_shape(name)
    return shape.spec, shape.weights()


def read_shape(name: str) -> Shape:
    """Of anything that can be planned. Raises UsageError, CheckpointError."""
    from kakera.arch.registry import load_spec, spec_of
    from kakera.arch.stored import read_config, stored_headers
    from kakera.plan.known import KNOWN
    from kakera.plan.weights import RANDOM_WEIGHTS

    if name.startswith(SCRIPTED):
        raise UsageError("a scripted model has no weights and needs no plan")
    if name in KNOWN or name.startswith(SPEC):
        config = _config_of(name.removeprefix(SPEC))
        return Shape(spec_of(config, planned=True), config, None, name)
    path = BUNDLED if name == "mini" else Path(name).expanduser()
    if not path.is_dir():
        return _remote_shape(_repo_id(name))
    spec, config = load_spec(path, planned=True), read_config(path)
    stored = any(path.glob("*.safetensors*")) and RANDOM_WEIGHTS not in config
    return Shape(spec, config, stored_headers(path, spec.names.beside) if stored else None, path.name or str(path))


def _config_in(directory: Path) -> Any:
    """What a config.json holds, None if it holds no JSON: `load_spec` says what is wrong with it."""
    from kakera.arch.stored import read_config

    try:
        return read_config(directory)
    except ValueError:
        return None


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


def _download(repo: str, reason: Exception | None) -> Path:
    """The snapshot of a repo. What was downloaded before is enough when the hub can not be reached, for a `reason`."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repo, allow_patterns=_WANTED, local_files_only=reason is not None))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(_why(repo, reason or error)) from None


def _remote_config(repo: str, *, offline: bool) -> Any:
    """config.json of a repo, None if it can not be had: the download of the rest will say why."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return json.loads(Path(hf_hub_download(repo, "config.json", local_files_only=offline)).read_text())
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError):
        return None


def _unreachable(repo: str) -> Exception | None:
    """One quick question to the hub: downloads retry for half a minute before they say that there is no network."""
    from huggingface_hub import model_info

    try:
        model_info(repo, timeout=CONNECT_SECONDS)
    except Exception as error:  # connection errors belong to the hub's HTTP library, and that changes by version
        return error
    return None


def _remote_shape(repo: str) -> Shape:
    """config.json and the safetensors headers of a repo: some hundred KB instead of gigabytes."""
    from huggingface_hub import HfApi, get_safetensors_metadata, hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError

    from kakera.arch.registry import spec_of
    from kakera.arch.stored import TensorHeader

    if (reason := _unreachable(repo)) is not None:
        raise CheckpointError(_why(repo, reason))
    try:
        config = json.loads(Path(hf_hub_download(repo, "config.json")).read_text())
        spec = spec_of(config, planned=True)
        files = list(get_safetensors_metadata(repo).files_metadata.values())
        for name in spec.names.beside:
            with contextlib.suppress(EntryNotFoundError):
                files.append(HfApi().parse_safetensors_file_metadata(repo, name))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(_why(repo, error)) from None
    headers = [
        TensorHeader(name, Path(repo), t.dtype, tuple(t.shape), begin, end - begin)
        for file in files
        for name, t in file.tensors.items()
        for begin, end in [t.data_offsets]
    ]
    return Shape(spec, config, headers, f"{repo} (headers only, nothing downloaded)")


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
