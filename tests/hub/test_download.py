"""Against a hub on this machine: what is fetched, what an interrupted download becomes, and errors in words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from huggingface_hub import constants

from kakera.errors import CheckpointError
from kakera.hub import disk, download
from kakera.hub.disk import on_disk, snapshots
from kakera.hub.names import Repository
from kakera.hub.remote import Remote, look, needed_files, read_json, weight_files
from local_hub import TOKEN, LocalHub, commit_of, digest

INDEX = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}).encode()
LARGE = b"0123456789abcdef" * (3 << 16)  # 3 MiB: three chunks
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"{ }",
    "chat_template.jinja": b"x",
    "additional_chat_templates/tool_use.jinja": b"y",
    "model.safetensors.index.json": INDEX,
    "model-1.safetensors": LARGE,
    "model-2.safetensors": b"small",
    "consolidated.safetensors": b"the same again",
    "README.md": b"#",
    "original/model.safetensors": b"of another library",
    "mtp/model.safetensors": b"draft",
}
NEEDED = {name for name in FILES if name.split("/")[0] not in ("consolidated.safetensors", "README.md", "original")}


@pytest.fixture
def tiny(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> LocalHub:
    hub.repositories["owner/tiny"] = {"main": FILES, "3.0bpw": {**FILES, "model-2.safetensors": b"3 bits"}}
    monkeypatch.setattr(download, "LARGE", 1 << 20)
    return hub


def seen(name: str = "owner/tiny") -> Remote:
    repository = Repository.called(name)
    assert repository
    return look(repository)


def fetched(remote: Remote, advance=lambda count: None) -> Path:
    return download.fetch(remote, needed_files(remote), advance)


def test_what_serving_needs_is_fetched_and_nothing_else(tiny: LocalHub) -> None:
    remote = seen("owner/tiny@3.0bpw")
    assert remote.commit == commit_of("owner/tiny", "3.0bpw") and read_json(remote, "config.json") == {}
    assert set(needed_files(remote)) == NEEDED
    coming = download.absent(remote, NEEDED)  # the config and the index came when they were read
    assert coming == {name: len(FILES[name]) + (name == "model-2.safetensors") for name in coming} and len(coming) == 6
    came: list[int] = []
    path = fetched(remote, came.append)
    assert sum(came) == sum(coming.values())
    assert {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()} == NEEDED
    assert (path / "model-1.safetensors").read_bytes() == LARGE and (
        path / "model-2.safetensors"
    ).read_bytes() == b"3 bits"
    assert on_disk(remote.repository) == path and on_disk(Repository("owner/tiny")) is None
    asked = len(tiny.asked)
    assert fetched(remote) == path and download.absent(remote, NEEDED) == {}
    assert len(tiny.asked) == asked + 1  # whether the branch still leads there


def test_an_interrupted_download_goes_on_where_it_stopped(tiny: LocalHub, tmp_path: Path) -> None:
    def interrupted(count: int) -> None:
        if count > 1 << 16:
            raise KeyboardInterrupt

    remote = seen()
    with pytest.raises(KeyboardInterrupt):
        fetched(remote, interrupted)
    assert tiny.ranges("model-1.safetensors") == [None]
    begun = download.absent(remote, ["model-1.safetensors"])["model-1.safetensors"]
    assert 0 < len(LARGE) - begun < len(LARGE)
    (row,), broken = snapshots()
    assert row.waiting == len(LARGE) - begun and row.name.startswith("owner/tiny@") and not broken
    came: list[int] = []
    path = fetched(seen(), came.append)
    assert tiny.ranges("model-1.safetensors") == [None, f"bytes={len(LARGE) - begun}-"]
    assert (path / "model-1.safetensors").read_bytes() == LARGE and sum(came) >= begun
    assert list(tmp_path.rglob("*.part")) == []
    (row,), _ = snapshots()
    assert (row.name, row.waiting, row.path) == ("owner/tiny", 0, path)


def test_a_file_that_came_damaged_is_deleted(tiny: LocalHub, tmp_path: Path) -> None:
    tiny.spoil = lambda file, data: data.replace(b"f", b"e") if file == "model-1.safetensors" else data
    with pytest.raises(CheckpointError, match=r"model-1.safetensors came damaged and was deleted"):
        fetched(seen())
    assert not [
        path for path in tmp_path.rglob("*") if digest(".safetensors", LARGE) in path.name and path.suffix != ".lock"
    ]
    tiny.spoil = lambda file, data: data
    assert (fetched(seen()) / "model-1.safetensors").read_bytes() == LARGE


def test_a_file_that_another_process_downloads_is_left_alone(tiny: LocalHub) -> None:
    remote = seen()
    with (
        download._alone(download._blob(remote, digest(".safetensors", LARGE)).with_suffix(".part"), "x"),
        pytest.raises(CheckpointError, match=r"model-1.safetensors is being downloaded by another process"),
    ):
        fetched(remote)


def test_a_full_disk_is_found_before(tiny: LocalHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(download, "room", lambda: (tmp_path, download.SPARE + 9))
    download.check_room(seen(), {"a": 4, "b": 5})
    with pytest.raises(CheckpointError, match=r"3.00 GB have still to come, and .* has 1.00 GB free.* free 3.00 GB"):
        download.check_room(seen(), {"a": 3 * 10**9})
    monkeypatch.setattr(download, "room", lambda: (tmp_path, 0))
    download.check_room(seen(), {})  # nothing comes
    assert disk.room()[1] > 0 and disk.room()[0] == tmp_path / "hub"


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"README.md": b""}, "has neither model.safetensors nor"),
        ({"model.safetensors.index.json": b"[]"}, "can not be read"),
        ({"model.safetensors.index.json": b"{"}, "not valid JSON"),
        ({"model.safetensors.index.json": INDEX}, "names model-1.safetensors, which is not in the repository"),
        ({"model.safetensors.index.json": b'{"weight_map": {"a": "../x"}}'}, "outside of the model's directory"),
    ],
)
def test_weights_that_are_not_there(hub: LocalHub, files: dict[str, bytes], words: str) -> None:
    hub.repositories["owner/odd"] = {"main": files}
    with pytest.raises(CheckpointError, match=words):
        weight_files(seen("owner/odd"))
    with pytest.raises(CheckpointError, match=r"owner/odd has no config.json"):
        read_json(seen("owner/odd"), "config.json")


def test_errors_say_what_to_do(tiny: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    def said(name: str) -> str:
        with pytest.raises(CheckpointError) as found:
            fetched(seen(name))
        return str(found.value)

    assert said("owner/tiny@4.0bpw").endswith("no revision 4.0bpw; owner/tiny has the branches 3.0bpw, main")
    assert "has no such repository, or it is private" in said("owner/none")
    tiny.private, tiny.gated = {"owner/tiny"}, set()
    assert "set HF_TOKEN, or log in" in said("owner/tiny")
    tiny.private, tiny.gated = set(), {"owner/tiny"}
    assert f"ask for it at {tiny.url}/owner/tiny, then set HF_TOKEN" in said("owner/tiny")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "check the token (HF_TOKEN)" in said("owner/tiny")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    path = fetched(seen())
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "could not be fetched" in said("owner/tiny") and on_disk(Repository("owner/tiny")) == path


def test_digests_that_are_none_become_no_paths(tiny: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("local_hub.digest", lambda file, content: "../../outside")
    assert {file.digest for file in seen().files.values()} == {None}
    monkeypatch.setattr("local_hub.commit_of", lambda repository, revision: "../../outside")
    with pytest.raises(CheckpointError, match="names no commit; if HF_ENDPOINT is set"):
        seen()


def test_what_was_only_looked_at_is_no_model(tiny: LocalHub) -> None:
    read_json(seen(), "config.json")
    (row,), _ = snapshots()
    assert row.only_looked_at
    fetched(seen())
    (row,), _ = snapshots()
    assert not row.only_looked_at
