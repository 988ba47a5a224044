"""A hub on this machine: as much of the Hugging Face Hub's HTTP as huggingface_hub asks to find, read and download
models. No torch."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

Content = bytes | Path
TOKEN = "hf_right"
LFS = (".safetensors",)  # kept elsewhere: who asks for one is sent there, without the token
CDN = "/cdn/"
LARGEST = 16 << 20


class LocalHub:
    """`repositories`: id -> revision -> file -> content. `gated` ones let no file out without TOKEN, `private` ones
    do not exist without. `asked` has every request; `spoil` what becomes of a file on its way, or of
    an answer of the API, whose name is ""."""

    def __init__(self) -> None:
        self.forget()
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def forget(self) -> None:
        self.repositories: dict[str, dict[str, dict[str, Content]]] = {}
        self.gated: set[str] = set()
        self.private: set[str] = set()
        self.asked: list[tuple[str, str, str | None]] = []  # method, path, Range
        self.spoil: Callable[[str, bytes], bytes] = lambda file, data: data

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def ranges(self, file: str) -> list[str | None]:
        """Of every GET so far that brought a file, or a part of it; None: the whole file."""
        stored = CDN if file.endswith(LFS) else ""
        asked = [(path, part) for method, path, part in self.asked if method == "GET" and path.endswith(f"/{file}")]
        return [part for path, part in asked if path.startswith(stored)]


def heard(hub: LocalHub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment's names, for a library that reads them when it is imported; nobody is logged in."""
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    template = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(cache / "no-token"))
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1 << 20)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)


def commit_of(repository: str, revision: str) -> str:
    return hashlib.sha1(f"{repository}@{revision}".encode()).hexdigest()


def digest(file: str, content: Content) -> str:
    """Of a file too large to read, which nobody will download, that of its name."""
    data = str(content).encode() if _size(content) > LARGEST else _part(content, 0, LARGEST)
    return (hashlib.sha256 if file.endswith(LFS) else hashlib.sha1)(data).hexdigest()


def _size(content: Content) -> int:
    return content.stat().st_size if isinstance(content, Path) else len(content)


def _part(content: Content, begin: int, end: int) -> bytes:
    if isinstance(content, bytes):
        return content[begin:end]
    with content.open("rb") as file:
        file.seek(begin)
        return file.read(end - begin)


class _Handler(BaseHTTPRequestHandler):
    hub: LocalHub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append((self.command, path, self.headers.get("Range")))
        if path.startswith(CDN):
            self._from_elsewhere(*path.removeprefix(CDN).split("/", 3))
            return
        of_api = path.startswith("/api/models/")
        owner, name, *rest = [*path.removeprefix("/api/models").split("/")[1:], ""]
        repository = f"{owner}/{name}"
        may = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if repository not in self.hub.repositories or (repository in self.hub.private and not may):
            self._send(401 if name else 404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif rest[0] == "refs":
            self._refs(repository)
        elif rest[0] == "resolve" and repository in self.hub.gated and not may:
            self._send(403 if "Authorization" in self.headers else 401, b"{}", {"X-Error-Code": "GatedRepo"})
        else:
            revision, *parts = [part for part in rest[1:] if part] or ["main"]
            self._of_revision(repository, revision, "" if of_api else "/".join(parts))

    def _refs(self, repository: str) -> None:
        names = self.hub.repositories[repository]
        refs = [{"name": n, "ref": f"refs/heads/{n}", "targetCommit": commit_of(repository, n)} for n in names]
        self._json({"branches": refs, "tags": [], "converts": []})

    def _of_revision(self, repository: str, asked: str, file: str) -> None:
        """Of a branch or commit: what is in it, or one file."""
        revisions = self.hub.repositories[repository]
        found = next((name for name in revisions if asked in (name, commit_of(repository, name))), None)
        if found is None:
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            return
        commit, files = commit_of(repository, found), revisions[found]
        if not file:
            siblings = [self._sibling(name, content) for name, content in files.items()]
            self._json({"id": repository, "sha": commit, "siblings": siblings, "tags": [], "downloads": 0})
        elif file in files and file.endswith(LFS):
            self._elsewhere(repository, file, files[file], commit)
        elif file in files:
            self._file(file, files[file], commit)
        else:
            self._send(404, b"{}", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})

    def _elsewhere(self, repository: str, file: str, content: Content, commit: str) -> None:
        place = f"http://localhost:{self.server.server_address[1]}{CDN}{repository}/{commit}/{file}"
        linked = {"X-Linked-Etag": f'"{digest(file, content)}"', "X-Linked-Size": str(_size(content))}
        self._send(302, b"", {"Location": place, "X-Repo-Commit": commit, "ETag": '"of the pointer"', **linked})

    def _from_elsewhere(self, owner: str, name: str, commit: str, file: str) -> None:
        """Signed addresses are refused together with a token."""
        repository = f"{owner}/{name}"
        found = next(n for n in self.hub.repositories[repository] if commit_of(repository, n) == commit)
        if "Authorization" in self.headers:
            self._send(400, b"", {})
        else:
            self._file(file, self.hub.repositories[repository][found][file], commit)

    def _file(self, name: str, content: Content, commit: str) -> None:
        size = _size(content)
        begin, end, status = 0, size, 200
        headers = {"X-Repo-Commit": commit, "ETag": f'"{digest(name, content)}"'}
        if wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            begin, end, status = int(wanted[1]), min(int(wanted[2] or size) + 1, size), 206
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{size}"
        self._send(status, self.hub.spoil(name, _part(content, begin, end)), headers)

    def _sibling(self, name: str, content: Content) -> dict[str, object]:
        size = _size(content)
        entry: dict[str, object] = {"rfilename": name, "size": size, "blobId": digest("", content)}
        if name.endswith(LFS):
            entry["lfs"] = {"sha256": digest(name, content), "size": size, "pointerSize": 130}
        return entry

    def _json(self, value: object) -> None:
        self._send(200, self.hub.spoil("", json.dumps(value).encode()), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass
