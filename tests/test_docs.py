"""Links between the repository's pages lead somewhere, to the heading that they name."""

from __future__ import annotations

import functools
import json
import re
import textwrap
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.md")])
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]+))?\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path):
    dead = []
    for path, heading in LINK.findall(page.read_text()):
        target = page.parent / path if path else page
        if not target.exists() or (heading and heading not in headings(target)):
            dead.append(f"{path}#{heading}" if heading else path)
    assert dead == []


@functools.cache
def headings(page: Path) -> frozenset[str]:
    """As links spell them: small letters, hyphens for spaces, nothing else but letters, digits, _ and -."""
    lines = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return frozenset(re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines)


def blocks(page: Path) -> list[str]:
    """Its indented blocks, without the indent of items that hold them."""
    found = re.findall(r"(?:^ {4,}.*\n|^\n(?= {4}))+", page.read_text(), re.MULTILINE)
    return [textwrap.dedent(block.strip("\n")) for block in found]


def test_settings_of_clients_can_be_pasted():
    """JSON and TOML parse once CONTEXT is a number; all of them ask the default port for the default model."""
    read = 0
    for page in (ROOT / "docs" / "clients").glob("*.md"):
        for block in blocks(page):
            text = block.replace("CONTEXT", "131072")
            if text.startswith("{"):
                settings = json.dumps(json.loads(text))
            elif "[model_providers" in text:
                settings = json.dumps(tomllib.loads(text))
            else:
                continue
            read += 1
            assert "default" in settings and ("127.0.0.1:30000" in settings or page.stem == "aider"), page
    assert read == 4  # Claude Code, Codex, opencode, aider's list of models


def test_checkpoints_are_told_as_what_they_are():
    rows = re.findall(r"^\| .*`\w[\w.-]+/[\w.-]+`.*$", (ROOT / "docs" / "getting-started.md").read_text(), re.MULTILINE)
    ids = [row for row in rows if "kakera serve" not in row]
    assert len(ids) >= 6 and all("not run by us" in row for row in ids)


def test_messages_that_users_look_up_are_those_that_are_printed():
    """Their words, without names and numbers."""
    page = (ROOT / "docs" / "getting-started.md").read_text().partition("## 6.")[2]
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| ")][1:]
    phrases = [phrase for row in rows for phrase in re.findall(r"`([^`]+)`", row)]
    words = [part.strip() for phrase in phrases for part in re.split(r"\.\.\.|\d[\d.:]*", phrase)]
    printed = "\n".join(file.read_text() for file in (ROOT / "src").rglob("*.py"))
    printed = re.sub(r'"\s+f?"', "", printed)  # strings that go on in the next line
    assert len(words) > 12 and [part for part in words if part not in printed] == []


def test_tests_that_the_page_of_failures_names_exist():
    page = (ROOT / "docs/developers/failures-of-others.md").read_text()
    rows = [line for line in page.splitlines() if line[2:3].isdigit()]
    wrong = []
    for row in rows:
        file = Path()
        for path, name in re.findall(r"`([\w/]+\.py)?::(\w+)`", row):
            file = ROOT / "tests" / path if path else file
            if f"def {name}(" not in file.read_text():
                wrong.append((row[:6], name))
    assert len(rows) == 36 and not wrong
    assert all("::" in row or "the same" in row for row in rows)
