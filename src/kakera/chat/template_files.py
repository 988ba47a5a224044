"""Where a checkpoint keeps its chat templates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kakera.arch.documents import read_object, read_text
from kakera.errors import CheckpointError

DEFAULT, WITH_TOOLS = "default", "tool_use"  # names that transformers gives a meaning
FILE, FOLDER = "chat_template.jinja", "additional_chat_templates"
OLDER = ("tokenizer_config.json", "chat_template.json")  # key `chat_template` of each


def find_templates(directory: Path) -> dict[str, str]:
    """Sources by name; none of a base model. As for transformers' tokenizers, files with templates alone come before
    tokenizer_config.json; last comes the file that older processors have.

    Raises CheckpointError for a file that is damaged, and for templates of which none is the default.
    """
    found = _files(directory)
    for name in OLDER:
        if DEFAULT not in found:
            path = directory / name
            found = {**_named(read_object(path).get("chat_template"), path), **found}
    if found and DEFAULT not in found:
        names = ", ".join(sorted(found))
        raise CheckpointError(f"{directory} has chat templates named {names} and none named {DEFAULT}: add {FILE}")
    return found


def _files(directory: Path) -> dict[str, str]:
    paths = {path.stem: path for path in sorted((directory / FOLDER).glob("*.jinja"))}
    if (directory / FILE).is_file():
        paths[DEFAULT] = directory / FILE
    return {name: read_text(path) for name, path in paths.items()}


def _named(value: Any, path: Path) -> dict[str, str]:
    """One template, a list of named ones, or none."""
    if not value:
        return {}
    if isinstance(value, list) and all(isinstance(entry, dict) for entry in value):
        value = {entry.get("name"): entry.get("template") for entry in value}
    found = value if isinstance(value, dict) else {DEFAULT: value}
    if not all(isinstance(name, str) and isinstance(source, str) for name, source in found.items()):
        raise CheckpointError(
            f"{path}: chat_template is neither a template nor a list of objects with `name` and `template`"
        )
    return found
