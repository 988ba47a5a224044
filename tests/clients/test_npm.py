"""The npm clients `openai` and `ai` against a real server. What they must see is in the .mjs files beside this one."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from command_server import CommandServer

HERE = Path(__file__).parent
MANIFEST = ("package.json", "package-lock.json")
NODE = 20  # the oldest whose fetch, test runner and JSON modules the clients and their tests use
INSTALL_SECONDS = 120


@pytest.fixture(scope="module")
def node_modules() -> Path:
    """The clients as the lock file pins them, installed once for each lock file into the user's cache."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("node and npm are not installed")
    version = subprocess.run([node, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    if int(version.removeprefix("v").partition(".")[0]) < NODE:
        pytest.skip(f"node {version} is older than {NODE}")
    digest = hashlib.sha256(b"".join((HERE / name).read_bytes() for name in MANIFEST)).hexdigest()[:16]
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kakera-tests"
    installed = caches / f"npm-{digest}"
    if not installed.is_dir():
        caches.mkdir(parents=True, exist_ok=True)
        install(npm, installed)
    return installed / "node_modules"


def install(npm: str, place: Path) -> None:
    """Whole or not at all: an install that breaks off must not look like one."""
    with tempfile.TemporaryDirectory(dir=place.parent) as unfinished:
        directory = Path(unfinished) / "clients"
        directory.mkdir()
        for name in MANIFEST:
            shutil.copy(HERE / name, directory)
        command = [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
        try:
            done = subprocess.run(
                command, cwd=directory, capture_output=True, text=True, check=False, timeout=INSTALL_SECONDS
            )
        except subprocess.TimeoutExpired:
            pytest.skip(f"npm ci did not end within {INSTALL_SECONDS} seconds")
        if done.returncode:
            pytest.skip(f"npm ci failed, is the registry in reach? {done.stderr[-500:]}")
        if not place.is_dir():
            directory.rename(place)


@pytest.mark.parametrize("script", ["openai.test.mjs", "ai.test.mjs"])
def test_an_npm_client_sees_what_its_script_expects(
    script: str, node_modules: Path, server: CommandServer, tmp_path: Path
) -> None:
    for name in (script, "server.mjs"):
        shutil.copy(HERE / name, tmp_path)
    (tmp_path / "node_modules").symlink_to(node_modules)
    address = {"KAKERA_URL": f"http://127.0.0.1:{server.port}"}
    done = subprocess.run(
        ["node", "--test", script],
        cwd=tmp_path,
        env={**os.environ, **address},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
