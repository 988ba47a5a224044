"""`make wheel-check`: one pip install. The wheel in empty environments, with the lowest releases that it allows and the
newest: every name that it imports is there, it plans, serves, answers, keeps to a form and chats.

torch is the one that is installed here, linked in: it has 200 MB, gigabytes with CUDA. `--with-torch` installs it, too.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
import venv
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from email.parser import Parser
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from kakera.bench.server import free_port

ROOT = Path(__file__).parents[1]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "src")
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
START_SECONDS, ANSWER_SECONDS = 300, 120  # many times what it takes, for busy machines
FORM = {"type": "object", "properties": {"animal": {"enum": ["fox", "owl"]}}, "required": ["animal"]}


def main(with_torch: bool = False) -> int:
    """Both environments, side by side; returns the exit status."""
    with tempfile.TemporaryDirectory(prefix="kakera-wheel-") as directory:
        place = Path(directory).resolve()
        wheel = build(place)
        needed = requirements(wheel)

        def tried(name: str, constraints: list[str]) -> str:
            began, home = time.monotonic(), place / name
            environment(home, wheel, constraints, with_torch)
            check(home)
            seconds = time.monotonic() - began
            return (
                f"{name}: imports, plan, server, answer, form and chat in {seconds:.0f} s with {versions(home, needed)}"
            )

        with ThreadPoolExecutor() as pool:
            for line in pool.map(tried, ("lowest", "newest"), (lowest(needed), [])):
                print(line)
    if not with_torch:
        bound = next(line for line in lowest(needed) if line.startswith("torch=="))
        print(f"torch was this machine's {distribution('torch').version} in both; --with-torch installs {bound} and")
        print("the newest (gigabytes with CUDA), docs/developers/measurements.md has when that was done last")
    return 0


def build(place: Path) -> Path:
    """The wheel, from a copy of what it is made of: a build leaves files behind."""
    context = place / "sources"
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, context / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            context.mkdir(exist_ok=True)
            shutil.copy(source, context / name)
    run([*PIP, "wheel", "--quiet", "--no-deps", "--wheel-dir", str(place), str(context)], ours())
    shutil.rmtree(context)
    return next(place.glob("kakera-*.whl"))


def requirements(wheel: Path) -> list[Requirement]:
    """What the wheel needs without extras."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = Parser().parsestr(archive.read(name).decode()).get_all("Requires-Dist", [])
    return [each for each in map(Requirement, lines) if not each.marker]


def lowest(needed: list[Requirement]) -> list[str]:
    """Constraints that hold each to its lower bound, which therefore has to be a release."""
    bounds = [(each.name, spec.version) for each in needed for spec in each.specifier if spec.operator == ">="]
    assert len(bounds) == len(needed), "a dependency without a lower bound"
    return [f"{name}=={version}" for name, version in bounds]


def environment(home: Path, wheel: Path, constraints: list[str], with_torch: bool) -> None:
    venv.create(home, with_pip=False)
    if not with_torch:
        link_torch(site_packages(home))
        constraints = [line for line in constraints if not line.startswith("torch==")]
    file = home / "constraints.txt"
    file.write_text("\n".join(constraints))
    install = [*PIP, "--python", str(home / "bin" / "python"), "install", "--quiet", "--no-compile"]
    run([*install, "--constraint", str(file), str(wheel)], ours())


def link_torch(site: Path) -> None:
    """torch as if it were installed, with the CUDA libraries that it brings, if any; pip then adds the rest."""
    names = {"torch"}
    for requirement in map(Requirement, distribution("torch").requires or ()):
        cuda = requirement.name.startswith(("nvidia-", "cuda-")) or requirement.name == "triton"
        if cuda and (not requirement.marker or requirement.marker.evaluate()):
            names.add(requirement.name)
    for name in names:
        found = distribution(name)
        for top in {path.parts[0] for path in found.files or ()} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(found.locate_file(top))))


def site_packages(home: Path) -> Path:
    return home / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def versions(home: Path, needed: list[Requirement]) -> str:
    names = [each.name for each in needed]
    ask = (
        f"from importlib.metadata import version; print(*[f'{{name}} {{version(name)}}' for name in {names}], sep=', ')"
    )
    return run([str(home / "bin" / "python"), "-I", "-c", ask], clean(home)).strip()


def check(home: Path) -> None:
    kakera = str(home / "bin" / "kakera")
    run([str(home / "bin" / "python"), "-I", str(Path(__file__).with_name("wheel_names.py"))], clean(home))
    plan = json.loads(run([kakera, "plan", "mini", "--gpus", "cpu", "--json"], clean(home)))
    assert plan, "an empty plan"
    with served(home) as url:
        said = ask(url, "Who are you?")
        assert "language model" in said, said
        said = ask(
            url,
            "Name an animal.",
            response_format={"type": "json_schema", "json_schema": {"name": "animal", "schema": FORM}},
        )
        assert json.loads(said)["animal"] in ("fox", "owl"), said
        chat = [kakera, "chat", "--url", url, "--no-thinking"]
        assert "language model" in run(chat, clean(home), "Who are you?")


@contextmanager
def served(home: Path) -> Iterator[str]:
    port = free_port()
    url, log = f"http://127.0.0.1:{port}", home / "serve.log"
    with log.open("w") as output:
        command = [str(home / "bin" / "kakera"), "serve", "mini", "--port", str(port)]
        process = subprocess.Popen(command, cwd=home, env=clean(home), stdout=output, stderr=output)
    try:
        end = time.monotonic() + START_SECONDS
        while not healthy(url):
            assert process.poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.2)
        yield url
        process.terminate()
        assert process.wait(timeout=ANSWER_SECONDS) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


def healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def ask(url: str, text: str, **more: Any) -> str:
    body = {"messages": [{"role": "user", "content": text}], "temperature": 0, "reasoning_effort": "none", **more}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"])


def ours() -> dict[str, str]:
    """For pip, which may be set up by variables; nothing of this tree."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def clean(home: Path) -> dict[str, str]:
    """Of a user who has just installed kakera. One thread that sleeps while it waits: others run beside it."""
    threads = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    return {"PATH": "/usr/bin:/bin", "HOME": str(home), "LANG": "C.UTF-8", **threads}


def run(command: list[str], environment: dict[str, str], given: str = "") -> str:
    done = subprocess.run(
        command,
        env=environment,
        cwd=environment.get("HOME", "/"),
        input=given,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}\nended with {done.returncode}")
    return done.stdout


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tools.wheel_check", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--with-torch", action="store_true", help="install torch, too: the lowest, and the newest")
    sys.exit(main(**vars(parser.parse_args())))
