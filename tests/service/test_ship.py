"""What is shipped: the container file by its properties and its steps, as no image is built here, and the wheel."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from served import Served, free_port

from kakera.cli.options import DEFAULT_PORT

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LINES = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if line and not line.startswith("#")]


def instructions(name: str) -> list[str]:
    return [line.removeprefix(name).strip() for line in LINES if line.startswith(name + " ")]


def test_what_is_copied_exists_and_is_let_through() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {source for line in instructions("COPY") for source in line.split()[:-1]}
    assert copied and copied == allowed and all((ROOT / source).exists() for source in copied)


def test_both_devices_have_a_stage_and_the_server_is_no_root() -> None:
    stages = set(re.findall(r"AS torch-(\w+)", "\n".join(LINES)))
    assert stages == {"cpu", "gpu"} and instructions("ARG") == ["DEVICE=cpu"]
    assert instructions("FROM")[-1] == "torch-${DEVICE}"
    assert instructions("USER") == ["kakera"] and LINES.index("USER kakera") > LINES.index("COPY src ./src")


def test_health_is_asked_where_the_server_listens() -> None:
    text = "\n".join(LINES)
    assert instructions("EXPOSE") == [str(DEFAULT_PORT)] and f"127.0.0.1:{DEFAULT_PORT}/health" in text
    assert instructions("ENTRYPOINT") == ['["kakera"]'] and '"--host", "0.0.0.0"' in instructions("CMD")[-1]


def status_for(port: int, host: str) -> int:
    """Of a page elsewhere whose name has come to mean this machine (DNS rebinding), or of our own."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/v1/models", headers={"Host": f"{host}:{port}"})
    return connection.getresponse().status


def test_what_the_container_starts_answers_its_health_check_warns_that_it_is_open_and_stops_in_time(
    place: Path, script: str
) -> None:
    """The commands of the file themselves, with a scripted model and another port."""
    serve, _, *options = json.loads(instructions("CMD")[-1])
    check = json.loads(re.findall(r"CMD (\[\"python.*)", (ROOT / "Dockerfile").read_text())[0])
    grace = int(re.findall(r"--stop-timeout (\d+)", (ROOT / "Dockerfile").read_text())[0])
    port = free_port()
    command = [sys.executable, *(part.replace(str(DEFAULT_PORT), str(port)) for part in check[1:])]

    def health() -> int:
        return subprocess.run(command, capture_output=True, check=False, timeout=30).returncode

    assert serve == "serve" and health() != 0
    with Served(place / "a", script, *options, port=port) as server:
        assert health() == 0
        assert [status_for(port, host) for host in ("localhost", "127.0.0.1", "rebound.example.com")] == [200, 200, 421]
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=grace) == 0
    assert health() != 0
    assert f"without --api-key-file: whoever can reach port {port}" in server.errors.read_text()


@pytest.fixture
def room() -> Iterator[Path]:
    """For copies of the package, whose model has 42 MB: pytest would keep those of three runs."""
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory).resolve()


@pytest.fixture
def context(room: Path) -> Path:
    """What .dockerignore lets through; its patterns are names that are wanted and endings that are not."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    wanted = [line[1:] for line in lines if line.startswith("!")]
    unwanted = [line.removeprefix("**/") for line in lines if line.startswith("**/")]
    assert ["*", *(f"!{name}" for name in wanted), *(f"**/{name}" for name in unwanted)] == lines
    directory = room / "context"
    directory.mkdir()
    for name in wanted:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, directory / name, ignore=shutil.ignore_patterns(*unwanted))
        else:
            shutil.copy(ROOT / name, directory / name)
    return directory


def wheel(context: Path) -> Path:
    """Built by the backend that pyproject.toml names, in the context itself."""
    build = "from setuptools import build_meta; build_meta.build_wheel('wheels')"
    done = subprocess.run([sys.executable, "-c", build], cwd=context, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return next((context / "wheels").glob("kakera-*.whl"))


def shipped(context: Path) -> set[str]:
    """Every file of the package but the notes for its readers; data is shipped as it is."""
    package = context / "src" / "kakera"
    paths = [path.relative_to(context / "src") for path in package.rglob("*") if path.is_file()]
    return {str(path) for path in paths if path.name != "README.md" or "data" in path.parts}


def test_the_build_context_holds_the_package_and_nothing_big_or_secret(context: Path) -> None:
    files = [path for path in context.rglob("*") if path.is_file()]
    endings = {path.suffix for path in files if path.is_relative_to(context / "src")}
    known = {".py", ".typed", ".md", ".cu", ".cuh", ".js", ".css", ".html", ".svg"}
    data = {".json", ".jsonl", ".jinja", ".txt", ".safetensors", ""}  # "": SHA256SUMS
    assert endings == known | data
    assert {path.name for path in files if not path.suffix} == {"LICENSE", "SHA256SUMS"}
    assert sum(path.stat().st_size for path in files) < 60e6


def test_a_wheel_holds_every_file_of_the_package_and_its_command_finds_the_model_there(
    context: Path, room: Path
) -> None:
    files = shipped(context)
    installed = room / "installed"
    with zipfile.ZipFile(wheel(context)) as archive:
        assert {name for name in archive.namelist() if not name.split("/")[0].endswith(".dist-info")} == files
        archive.extractall(installed)
    for part in ("ops/cuda/trellis.cuh", "server/page/index.html", "data/mini/tokenizer.json", "py.typed"):
        assert f"kakera/{part}" in files
    shutil.rmtree(context)
    start = (
        "import sys; from importlib.metadata import distribution as of;"
        "sys.exit(next(e for e in of('kakera').entry_points if e.name == 'kakera').load()())"
    )
    done = subprocess.run(
        [sys.executable, "-B", "-c", start, "info", "mini", "--json"],
        cwd=room,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["path"] == str(installed / "kakera" / "data" / "mini")


def test_no_dependency_may_be_as_old_as_its_known_holes() -> None:
    bounds = dict(re.fullmatch(r"([\w-]+)>=([\d.]+)", line).groups() for line in PROJECT["project"]["dependencies"])
    least = {"torch": "2.10", "jinja2": "3.1.6", "h11": "0.16", "starlette": "1.3.1", "fastapi": "0.133"}
    for name, fixed in least.items():
        assert Version(bounds[name]) >= Version(fixed), name


def test_what_had_malicious_releases_and_tools_without_promises_are_held_to_one() -> None:
    clients = [Requirement(line) for line in PROJECT["project"]["optional-dependencies"]["clients"]]
    held = {each.name for each in clients if [spec.operator for spec in each.specifier] == ["=="]}
    assert held >= {"litellm", "vllm-router"}


def locked(device: str) -> dict[str, Version]:
    """What a lock pins. Every entry has hashes, and nothing else is in there."""
    text = (ROOT / f"requirements-{device}.lock").read_text()
    entries = re.sub(r"#.*\n", "", text).replace("\\\n", " ").splitlines()
    pins = {}
    for entry in entries:
        found = re.fullmatch(r"([\w.-]+)==(\S+)((?:\s+--hash=sha256:[0-9a-f]{64})+)\s*", entry)
        assert found, f"{device}: not a release with hashes: {entry}"
        pins[found[1]] = Version(found[2])
    return pins


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_an_image_installs_by_hash_what_pyproject_asks_for(device: str) -> None:
    project, pins = PROJECT["project"], locked(device)
    assert f"TORCH := torch=={pins['torch'].public}\n" in (ROOT / "Makefile").read_text(), "make lock"
    wanted = [*project["dependencies"], *PROJECT["build-system"]["requires"]]
    wanted += project["optional-dependencies"]["gpu"] if device == "gpu" else []
    for requirement in map(Requirement, wanted):
        name = canonicalize_name(requirement.name)
        assert name in pins, f"{name} is not in the lock: make lock"
        assert requirement.specifier.contains(pins[name]), f"{requirement}, and {pins[name]} is locked: make lock"
    installs = [line for line in "\n".join(LINES).replace("\\\n", " ").splitlines() if "pip install" in line]
    assert any(f"--require-hashes --only-binary :all: -r requirements-{device}.lock" in line for line in installs)
    assert all("--require-hashes" in line or "--no-deps --no-build-isolation" in line for line in installs)
