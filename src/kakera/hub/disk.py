"""The hub's cache on this disk: which snapshots are there, whose they are, and how much room is left. No torch."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from kakera.hub.names import Repository, Source

LOOKED_AT = 64 << 20  # bytes: config, index and tokenizer of a large model
PART = ".part"  # of a blob of which only a beginning is there
COMMIT = re.compile("[0-9a-f]{40}")
_SNAPSHOT = re.compile(r"models--([^/]+?)--([^/]+)/snapshots/([0-9a-f]{40})")


@dataclass(frozen=True)
class Snapshot:
    """Files of one commit. `waiting`: bytes of files of the repository that were begun and not finished. `used`: when a
    file was last read, in seconds since 1970, as the file system tells (often to the day)."""

    name: str
    path: Path
    bytes: int
    used: float
    waiting: int = 0

    @property
    def only_looked_at(self) -> bool:
        """Nothing but the small files that are read before a download."""
        return not self.waiting and self.bytes < LOOKED_AT and not any(self.path.glob("*.safetensors"))


def cache_directory() -> Path:
    """HF_HUB_CACHE, or what HF_HOME says."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def folder_of(repository: Repository) -> Path:
    """Where the cache keeps a repository."""
    return cache_directory() / f"models--{repository.id.replace('/', '--')}"


def room() -> tuple[Path, int]:
    """The cache's directory, and the free bytes of its disk."""
    place = cache_directory()
    return place, shutil.disk_usage(next(p for p in (place, *place.parents) if p.exists())).free


def on_disk(repository: Repository) -> Path | None:
    """The snapshot of a repository that the cache has, whole or not; None if it has none of the revision."""
    folder, revision = folder_of(repository), repository.revision or "main"
    commit = _commit_in(folder / "refs" / revision) or revision
    path = folder / "snapshots" / commit
    return path if COMMIT.fullmatch(commit) and path.is_dir() else None


def _commit_in(ref: Path) -> str:
    """ "" of what is no file, or can not be read."""
    try:
        return ref.read_text().strip() if ref.is_file() else ""
    except (OSError, ValueError):
        return ""


def source_of(directory: Path) -> Source | None:
    """Of a snapshot, also where its directory itself was named; None for any other directory."""
    directory = Path(os.path.realpath(directory))
    match = _SNAPSHOT.search(directory.as_posix())
    if match is None:
        return None
    owner, name, commit = match.groups()
    refs = directory.parents[1] / "refs"
    leading = [ref for ref in sorted(refs.rglob("*")) if _commit_in(ref) == commit]
    names = [ref.relative_to(refs).as_posix() for ref in leading]
    return Source(f"{owner}/{name}", ", ".join(names) or None, commit)


def snapshots() -> tuple[list[Snapshot], list[str]]:
    """Models in the cache, and what is wrong with those that could not be read."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    place = cache_directory()
    try:
        found = scan_cache_dir(place)
    except CacheNotFound:
        return [], []
    except Exception as error:  # one ref that is no text, and the library lists nothing
        refs = (ref for ref in place.glob("models--*/refs/**/*") if not ref.is_dir() and not _commit_in(ref))
        return [], [f"{place} can not be listed ({error})", *(f"{ref} names no commit: remove it" for ref in refs)]
    rows = [
        Snapshot(
            name=_name(repo.repo_id, revision.refs, revision.commit_hash),
            path=revision.snapshot_path,
            bytes=revision.size_on_disk,
            used=max((file.blob_last_accessed for file in revision.files), default=revision.last_modified),
            waiting=sum(part.lstat().st_size for part in (repo.repo_path / "blobs").glob(f"*{PART}") if part.is_file()),
        )
        for repo in found.repos
        if repo.repo_type == "model"
        for revision in repo.revisions
    ]
    return sorted(rows, key=lambda row: row.name), [str(warning) for warning in found.warnings]


def _name(repository: str, refs: frozenset[str], commit: str) -> str:
    """What to type to get it again: a commit that no branch leads to has only its number."""
    if "main" in refs:
        return repository
    return f"{repository}@{min(refs, default=commit)}"
