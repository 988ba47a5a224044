"""The container file by its properties: an image is not built here."""

from __future__ import annotations

import re
from pathlib import Path

from kakera.cli.options import DEFAULT_PORT

ROOT = Path(__file__).parents[2]
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
