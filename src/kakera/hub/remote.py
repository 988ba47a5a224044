"""What the Hub says of a repository at a revision: its files, small ones read, the headers of large ones. No torch.

One quick question comes first (`look`): the library's downloads retry for half a minute before they say that there is
no network. HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE are heard by huggingface_hub, which does all the talking.
"""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kakera.arch import documents
from kakera.arch.formats import refuse_files
from kakera.arch.stored import DRAFT, INDEX, SINGLE, TensorHeader, indexed_files
from kakera.errors import CheckpointError
from kakera.hub.disk import COMMIT, cache_directory
from kakera.hub.names import Repository, Source

CONNECT_SECONDS = 10.0
SMALL = (".json", ".jinja")  # configs, the tokenizer, the template, the index
FOLDERS = ("", "additional_chat_templates")  # in which they lie
SMALL_BYTES = 64 << 20  # the tokenizer of 248,320 tokens takes 20 MB; a larger JSON file is no part of a model
READERS = 8
OF_THE_DISK = {
    getattr(errno, name) for name in ("ENOSPC", "EDQUOT", "EFBIG", "EACCES", "EPERM", "EROFS", "EIO", "ENOTDIR")
}
_DIGEST = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")  # becomes the name of a file, as the commit does


@dataclass(frozen=True)
class File:
    """`digest` names its content: the SHA-256 of a large file, git's hash of a small one."""

    bytes: int
    digest: str | None


@dataclass(frozen=True)
class Remote:
    """A repository at a commit. `files` by their path in it."""

    repository: Repository
    commit: str
    files: Mapping[str, File]

    @property
    def source(self) -> Source:
        return Source(self.repository.id, self.repository.revision or "main", self.commit)


def look(repository: Repository) -> Remote:
    """Raises CheckpointError, in words: no such repository or revision (then with those that there are), no access, no
    network."""
    from huggingface_hub import HfApi

    try:
        info = HfApi().model_info(
            repository.id, revision=repository.revision, timeout=CONNECT_SECONDS, files_metadata=True
        )
    except Exception as error:  # connection errors belong to the hub's HTTP library, and that changes by version
        raise failed(repository, error) from None
    if not COMMIT.fullmatch(str(info.sha)):
        raise CheckpointError(f"{repository}: the hub names no commit; if HF_ENDPOINT is set, check that it is a hub")
    files = {}
    for item in info.siblings or ():
        digest = str(item.lfs.sha256 if item.lfs else item.blob_id)
        size = item.size or 0
        if not isinstance(item.rfilename, str) or not isinstance(size, int) or size < 0:
            raise CheckpointError(f"{repository}: the hub's list of files is none; if HF_ENDPOINT is set, check it")
        files[item.rfilename] = File(size, digest if _DIGEST.fullmatch(digest) else None)
    return Remote(repository, str(info.sha), files)


def read_json(remote: Remote, file: str) -> Any:
    """What a small file holds; it is kept in the cache. Raises CheckpointError."""
    from huggingface_hub import hf_hub_download

    if file not in remote.files:
        refuse_files(remote.files, str(remote.repository))
        raise CheckpointError(f"{remote.repository} has no {file}: it is no model that kakera can read")
    try:
        return documents.read_json(Path(hf_hub_download(remote.repository.id, file, revision=remote.commit)))
    except Exception as error:
        raise failed(remote.repository, error) from None


def weight_files(remote: Remote, beside: Iterable[str] = ()) -> list[str]:
    """As `arch.stored.stored_headers` finds them in a directory: the index's, the draft layer's, those `beside`. Raises
    CheckpointError if there are none, or one is missing."""
    if SINGLE in remote.files:
        found = [SINGLE]
    elif INDEX in remote.files:
        found = list(indexed_files(read_json(remote, INDEX), f"{remote.repository}: {INDEX}"))
        if missing := [name for name in found if name not in remote.files]:
            raise CheckpointError(f"{remote.repository}: {INDEX} names {missing[0]}, which is not in the repository")
    else:
        refuse_files(remote.files, str(remote.repository))
        raise CheckpointError(f"{remote.repository} has neither {SINGLE} nor {INDEX}: it has no weights")
    return found + [name for name in (DRAFT, *beside) if name in remote.files]


def needed_files(remote: Remote, beside: Iterable[str] = ()) -> list[str]:
    """What serving reads, and nothing else of what a repository may hold: small files first. Raises CheckpointError."""
    small = [
        name
        for name, file in remote.files.items()
        if name.rpartition("/")[0] in FOLDERS and name.endswith(SMALL) and file.bytes <= SMALL_BYTES
    ]
    return small + weight_files(remote, beside)


def read_headers(remote: Remote, files: Iterable[str]) -> list[TensorHeader]:
    """Of all tensors of these files: 100 KB a file instead of gigabytes. Raises CheckpointError."""
    from huggingface_hub import HfApi

    def headers(file: str) -> list[TensorHeader]:
        held = HfApi().parse_safetensors_file_metadata(remote.repository.id, file, revision=remote.commit)
        return [
            TensorHeader(name, Path(remote.repository.id) / file, t.dtype, tuple(t.shape), begin, end - begin)
            for name, t in held.tensors.items()
            for begin, end in [t.data_offsets]
        ]

    try:
        with ThreadPoolExecutor(READERS) as readers:
            return [header for found in readers.map(headers, files) for header in found]
    except Exception as error:
        raise failed(remote.repository, error) from None


def failed(repository: Repository, error: Exception) -> CheckpointError:
    """What the hub, or the way to it, answered, and what to do."""
    from huggingface_hub import constants, get_token
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if isinstance(error, CheckpointError):
        return error
    if isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # why it was looked for on the disk
    if isinstance(error, OSError) and error.errno in OF_THE_DISK:
        return CheckpointError(
            f"{repository} could not be written to {cache_directory()} ({error.strerror}): free room there or make it "
            "writable, or set HF_HOME to a directory on another disk"
        )
    host = constants.ENDPOINT.partition("://")[2]
    page = f"{constants.ENDPOINT}/{repository.id}"
    token = "set HF_TOKEN, or log in (hf auth login)" if get_token() is None else "check the token (HF_TOKEN)"
    if isinstance(error, OfflineModeIsEnabled):
        return CheckpointError(
            f"{repository} could not be fetched from {host}: HF_HUB_OFFLINE is set, and then only what is on this disk "
            "can be used; kakera models shows that, and kakera pull without HF_HUB_OFFLINE fetches it"
        )
    if isinstance(error, GatedRepoError):
        return CheckpointError(f"{repository}: its owner gives access on request: ask for it at {page}, then {token}")
    if isinstance(error, RepositoryNotFoundError):
        return CheckpointError(
            f"{repository}: there is no such directory, and {host} has no such repository, or it is private: check the "
            f"name; if it is private, {token}"
        )
    if isinstance(error, RevisionNotFoundError):
        return CheckpointError(f"{repository}: there is no revision {repository.revision}{_revisions(repository)}")
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        return CheckpointError(f"{repository}: {host} refuses access ({status}): {token}")
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return CheckpointError(
        f"{repository} could not be fetched from {host} ({first}). Offline? Give a local model directory (kakera "
        "models shows what is on this disk), or use `mini`, which needs no network"
    )


def _revisions(repository: Repository) -> str:
    """The branches and tags that there are, as the end of a sentence."""
    from huggingface_hub import HfApi

    with contextlib.suppress(Exception):  # the error that is told is enough
        refs = HfApi().list_repo_refs(repository.id)
        kinds = (("branches", refs.branches), ("tags", refs.tags))
        told = [f"the {kind} {', '.join(sorted(ref.name for ref in found))}" for kind, found in kinds if found]
        return f"; {repository.id} has {' and '.join(told)}"
    return ""
