"""Against a hub on this machine: what is fetched, what an interrupted download becomes, and errors in words."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
from huggingface_hub import constants

from kakera.errors import CheckpointError
from kakera.hub import disk, download
from kakera.hub.disk import PART, on_disk, snapshots
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


def test_an_answer_longer_than_the_file_fills_no_disk_and_a_part_too_long_is_begun_again(tiny: LocalHub) -> None:
    remote = seen()
    part = download._blob(remote, digest(".safetensors", LARGE)).with_name(digest(".safetensors", LARGE) + PART)
    tiny.spoil = lambda file, data: data * 3 if file == "model-1.safetensors" else data
    with pytest.raises(CheckpointError, match="more came than the 3145728 bytes"):
        fetched(remote)
    assert part.stat().st_size <= len(LARGE)
    tiny.spoil = lambda file, data: data
    part.write_bytes(LARGE + b"more")
    assert (fetched(remote) / "model-1.safetensors").read_bytes() == LARGE


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS], ids=os.strerror)
def test_what_the_disk_refuses_is_not_called_the_networks(
    tiny: LocalHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    remote = seen()
    monkeypatch.setattr(download._Told, "write", refuse)
    with pytest.raises(CheckpointError, match=f"could not be written to {tmp_path}.*{os.strerror(number)}.*HF_HOME"):
        fetched(remote)


ODD = [
    *({"sha": sha} for sha in (None, 5, [], "../" * 13 + "x", "main")),
    *({"siblings": files} for files in (5, "x", [5], [{}], {"a": 1}, [None])),
    *({"siblings": [{"rfilename": name}]} for name in (None, 5, ["x"])),
    *({"siblings": [{"rfilename": "config.json", "size": size}]} for size in ("5", -1, 0.5, [1], {"a": 1})),
    *({"siblings": [{"rfilename": "x.safetensors", "size": 5, "lfs": lfs}]} for lfs in (5, {"sha256": 5}, "x")),
]


@pytest.mark.parametrize("body", [b"", b"<html>", b"null", b"5", b"[]", b"[" * 100_000, b"\xff\xfe{}"])
def test_what_is_no_answer_of_a_hub_is_said(tiny: LocalHub, body: bytes) -> None:
    tiny.spoil = lambda file, data: data if file else body
    with pytest.raises(CheckpointError):
        seen()


@pytest.mark.parametrize("change", ODD, ids=map(repr, ODD))
def test_what_is_no_list_of_files_is_said(tiny: LocalHub, change: dict[str, object]) -> None:
    tiny.spoil = lambda file, data: data if file else json.dumps({**json.loads(data), **change}).encode()
    with pytest.raises(CheckpointError):
        read_json(seen(), "config.json")


@pytest.mark.parametrize("ref", [b"\xff\xfe", b"", b"/etc", b"..", b"../../../..", b"0" * 39])
def test_a_ref_that_names_no_commit_leads_nowhere(tiny: LocalHub, tmp_path: Path, ref: bytes) -> None:
    path = fetched(seen())
    main = path.parents[1] / "refs" / "main"
    main.write_bytes(ref)
    assert on_disk(Repository("owner/tiny")) is None and on_disk(Repository("owner/tiny", ref.decode("latin1"))) is None
    source = disk.source_of(path)
    assert source is not None and source.revision is None
    rows, broken = snapshots()
    assert [row.path for row in rows] == [path] or any(str(main.parents[1]) in line for line in broken)


def test_a_cache_that_is_none_is_said(hub: LocalHub, tmp_path: Path) -> None:
    (tmp_path / "hub").write_text("")
    rows, (line,) = snapshots()
    assert not rows and "can not be listed" in line


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
