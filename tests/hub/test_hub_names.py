"""Names of repositories, and where a directory came from."""

from __future__ import annotations

from pathlib import Path

import pytest

from kakera.hub.disk import source_of
from kakera.hub.names import Repository, Source

COMMIT = "0123456789" * 4


@pytest.mark.parametrize(
    ("text", "found", "name"),
    [
        ("owner/name", Repository("owner/name"), "name"),
        ("owner/name@3.0bpw", Repository("owner/name", "3.0bpw"), "name@3.0bpw"),
        ("Ow-n.er/na_me.1@refs/pr/1", Repository("Ow-n.er/na_me.1", "refs/pr/1"), "na_me.1@refs/pr/1"),
        (f"owner/name@{COMMIT}", Repository("owner/name", COMMIT), f"name@{COMMIT}"),
    ],
)
def test_a_name_with_its_revision(text: str, found: Repository, name: str) -> None:
    assert Repository.called(text) == found and str(found) == text and found.name == name


@pytest.mark.parametrize(
    "text",
    ["name", "owner/name@", "owner/name@a@b", "a/b/c", "./a/b", "owner/name@a b", "", "owner/name@../../x",
     "owner/name@a/../b", "owner/name@/etc/passwd", "owner/name@-x", "owner/name@a/.b", "owner/name@a\\b"],
)  # fmt: skip
def test_other_names_are_none(text: str) -> None:
    assert Repository.called(text) is None


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("https://huggingface.co/owner/name", "owner/name"),
        ("https://huggingface.co/owner/name/", "owner/name"),
        ("https://hf.co/owner/name/tree/3.0bpw", "owner/name@3.0bpw"),
        ("https://huggingface.co/owner/name/tree/refs/pr/1/", "owner/name@refs/pr/1"),
        ("https://huggingface.co/owner/name/blob/main/config.json", "None"),
        ("https://huggingface.co/owner/name/tree/../x", "None"),
        ("https://elsewhere.example/owner/name", "None"),
        ("https://huggingface.co/owner", "None"),
    ],
)
def test_the_address_of_its_page_is_a_repository_too(address: str, name: str) -> None:
    assert str(Repository.called(address)) == name


def test_a_snapshot_knows_its_repository_and_the_branches_that_lead_to_it(tmp_path: Path) -> None:
    folder = tmp_path / "models--owner--my--name"
    snapshot = folder / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    assert source_of(tmp_path) is None
    assert source_of(snapshot) == Source("owner/my--name", None, COMMIT)
    for ref, commit in {"main": "f" * 40, "3.0bpw": COMMIT, "refs/pr/1": COMMIT}.items():
        path = folder / "refs" / ref
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(commit)
    assert source_of(snapshot) == Source("owner/my--name", "3.0bpw, refs/pr/1", COMMIT)
    assert str(source_of(snapshot)) == f"owner/my--name at 3.0bpw, refs/pr/1, commit {COMMIT[:12]}"
