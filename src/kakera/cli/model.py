"""MODEL on the command line -> files on disk, or, for planning, only a shape and byte counts.

`spec:NAME` is a model of NAME's shapes with random weights: right for speed and memory, good for nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kakera.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from kakera.arch.spec import ModelSpec
    from kakera.arch.stored import TensorHeader
    from kakera.arch.weigh import Entry
    from kakera.hub.names import Repository, Source
    from kakera.hub.remote import Remote
    from kakera.plan.weights import WeightBytes

BUNDLED = Path(__file__).resolve().parent.parent / "data" / "mini"
SCRIPTED = "scripted:"
SPEC = "spec:"
_NEEDED = ("config.json", "tokenizer.json")


@dataclass(frozen=True)
class Model:
    """`path` is a model directory, or the script file of a scripted model. `name` is what a client sees."""

    name: str
    path: Path
    scripted: bool = False


@dataclass(frozen=True)
class Pulled:
    """A snapshot with every file that serving needs: all their bytes, and those that came just now."""

    path: Path
    bytes: int
    came: int


@dataclass(frozen=True)
class Shape:
    """A model without its weights: `headers` of its files, or None if only the config is known."""

    spec: ModelSpec
    config: dict[str, Any]
    headers: list[TensorHeader] | None
    source: str
    origin: Source | None = None  # of a model that is on the hub, too

    def __post_init__(self) -> None:
        """Raises CheckpointError for headers of tensors that are not read."""
        from kakera.arch.formats import refuse_tensors

        refuse_tensors(self.spec, self.headers or ())

    def weights(self) -> WeightBytes:
        return self.weights_of(self.spec)

    def weights_of(self, spec: ModelSpec) -> WeightBytes:
        """With the draft layer, if the declaration says so."""
        from kakera.plan.weights import from_config, from_tensors

        if self.headers is None:
            return from_config(spec, self.config)
        return from_tensors(self.headers, spec, f"{len(self.headers)} tensors of {self.source}")

    def tower_bytes(self) -> int:
        from kakera.arch.weigh import tower_bytes

        return tower_bytes(self.spec, self.headers or ())

    def entries(self) -> list[Entry]:
        from kakera.arch.weigh import expected_entries, stored_entries

        return (
            expected_entries(self.spec, self.config)
            if self.headers is None
            else stored_entries(self.spec, self.headers)
        )


def resolve_model(name: str, gpus: str | None = None) -> Model:
    """Files that can be served; downloads a repo id. Raises UsageError or CheckpointError naming what is missing, and
    Unserved before that for a model that can be planned only, or that can not be computed on `gpus`."""
    from kakera.arch.formats import refuse_file
    from kakera.arch.registry import refuse_unserved
    from kakera.arch.stored import read_config
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
        return Model("mini", whole(BUNDLED))
    path = Path(name).expanduser()
    refuse_file(path)
    if path.is_dir():
        refuse_unserved(read_config(path))
        return Model(path.resolve().name, whole(path))
    if name in KNOWN:
        refuse_unserved(KNOWN[name])
        raise UsageError(
            f"{name} is a shape without weights: give a directory or a Hugging Face repo id, or {SPEC}{name}, whose "
            f"weights are random, to measure speed and memory"
        )
    repository = named_repository(name)
    found = _reached(repository)
    if isinstance(found, Path):
        refuse_unserved(read_config(found))
        return Model(repository.name, found)
    return Model(repository.name, pulled(found, gpus=gpus).path)


def shape_of(name: str) -> tuple[ModelSpec, WeightBytes]:
    """What a plan needs, without downloading weights: only headers are read, or the config of a well-known name."""
    shape = read_shape(name)
    return shape.spec, shape.weights()


def read_shape(name: str) -> Shape:
    """Of anything that can be planned. Raises UsageError, CheckpointError."""
    from kakera.arch.formats import refuse_file
    from kakera.arch.registry import load_spec, spec_of
    from kakera.arch.stored import read_config, stored_headers
    from kakera.hub.disk import source_of
    from kakera.hub.remote import Remote
    from kakera.plan.known import KNOWN
    from kakera.plan.weights import RANDOM_WEIGHTS

    if name.startswith(SCRIPTED):
        raise UsageError("a scripted model has no weights and needs no plan")
    if name in KNOWN or name.startswith(SPEC):
        config = _config_of(name.removeprefix(SPEC))
        return Shape(spec_of(config, planned=True), config, None, name)
    path = BUNDLED if name == "mini" else Path(name).expanduser()
    refuse_file(path)
    if not path.is_dir():
        found = _reached(named_repository(name))
        if isinstance(found, Remote):
            return _remote_shape(found)
        path = found
    spec, config = load_spec(path, planned=True), read_config(path)
    stored = any(path.glob("*.safetensors*")) and RANDOM_WEIGHTS not in config
    headers = stored_headers(path, spec.names.beside) if stored else None
    return Shape(spec, config, headers, path.name or str(path), source_of(path))


def _config_of(shape: str) -> dict[str, Any]:
    """Config of a well-known model, or of a directory, which needs nothing else. Raises UsageError."""
    from kakera.arch.stored import read_config
    from kakera.plan.known import KNOWN

    config = KNOWN.get(shape) or read_config(Path(shape).expanduser())
    if not config:
        raise UsageError(f"{shape}: known shapes are {', '.join(KNOWN)}; a directory with a config.json will do, too")
    return config


def whole(path: Path) -> Path:
    """Name every missing file at once: a model without its tokenizer would start and answer nonsense."""
    from kakera.arch.formats import refuse_directory
    from kakera.arch.stored import checkpoint_files

    refuse_directory(path)
    missing = [file for file in _NEEDED if not (path / file).is_file()]
    if missing:
        raise CheckpointError(f"{path} lacks {' and '.join(missing)}: the model can not be served without")
    checkpoint_files(path)
    return path


def named_repository(name: str) -> Repository:
    """Raises UsageError for what is no name of one."""
    from kakera.hub.names import Repository
    from kakera.plan.known import KNOWN

    if name == "mini":
        raise UsageError("mini comes along: there is nothing to download")
    if (found := Repository.called(name)) is None:
        raise UsageError(
            f"{name}: no such directory, and not a Hugging Face repo id (owner/name or owner/name@revision); `mini` is "
            f"bundled, and `kakera plan` knows the shapes {', '.join(KNOWN)}"
        )
    return found


def _reached(repository: Repository) -> Remote | Path:
    """What the hub has, or what was downloaded before when the hub can not be reached or refuses. Raises
    CheckpointError, with the hub's reason, if there is neither, or only a part."""
    from kakera.hub.disk import on_disk
    from kakera.hub.remote import look

    try:
        return look(repository)
    except CheckpointError as reason:
        if (found := on_disk(repository)) is None:
            raise
        try:
            return whole(found)
        except CheckpointError as lacking:
            raise CheckpointError(f"{reason}. Only a part of it is on this disk: {lacking}") from None


def needed(remote: Remote, gpus: str | None = None) -> tuple[list[str], dict[str, int]]:
    """The files that serving needs, and the bytes that have still to come of those that are not on this disk. Raises
    CheckpointError or Unserved, by the config and the headers, for what kakera does not serve (on `gpus`)."""
    from kakera.arch.registry import spec_of
    from kakera.hub.download import absent
    from kakera.hub.remote import needed_files, read_json
    from kakera.plan.planner import refuse_unserved_on

    spec = spec_of(read_json(remote, "config.json"))
    if gpus is not None:
        refuse_unserved_on(spec, gpus)
    names = needed_files(remote, spec.names.beside)
    if coming := absent(remote, names):
        _remote_shape(remote)
    return names, coming


def pulled(remote: Remote, before: Callable[[int], None] | None = None, gpus: str | None = None) -> Pulled:
    """From the cache, or downloaded once the disk was found to have room for it. `before` hears how many bytes will
    come, and may raise. Raises as `needed`."""
    from kakera.cli.progress import progress
    from kakera.hub.download import check_room, fetch
    from kakera.plan.table import gigabytes

    names, coming = needed(remote, gpus)
    check_room(remote, coming)
    came = sum(coming.values())
    if before and came:
        before(came)
    with progress(str(remote.repository), came, gigabytes) as advance:
        path = fetch(remote, names, advance)
    return Pulled(whole(path), sum(remote.files[name].bytes for name in names), came)


def _remote_shape(remote: Remote) -> Shape:
    """config.json and the safetensors headers of a repository: some hundred KB instead of gigabytes."""
    from kakera.arch.registry import spec_of
    from kakera.hub.remote import read_headers, read_json, weight_files

    config = read_json(remote, "config.json")
    spec = spec_of(config, planned=True)
    headers = read_headers(remote, weight_files(remote, spec.names.beside))
    return Shape(spec, config, headers, f"{remote.repository} (headers only, nothing downloaded)", remote.source)
