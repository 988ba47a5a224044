"""Names of models on the Hugging Face Hub: owner/name, or owner/name@revision. No torch."""

from __future__ import annotations

import re
from dataclasses import dataclass

# A revision is a name as git allows it: it becomes part of a path in the cache.
_FORM = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?![-/.])(?!\S*(?:\.\.|/\.|//))([^\s@\\]+))?")

# Its page, as a browser shows it.
_PAGE = re.compile(r"https://(?:huggingface\.co|hf\.co)/([^/\s]+/[^/\s]+?)(?:/tree/(\S+?))?/?")


@dataclass(frozen=True)
class Repository:
    """`id` is owner/name, `revision` a branch, a tag or a commit; None: the default branch. EXL3 builds keep each of
    their rates in a branch of its own, such as 3.0bpw."""

    id: str
    revision: str | None = None

    @staticmethod
    def called(text: str) -> Repository | None:
        """From such a name, or from the address of its page; None if the text is neither."""
        if page := _PAGE.fullmatch(text):
            text = "@".join(filter(None, page.groups()))
        match = _FORM.fullmatch(text)
        return Repository(match[1], match[2]) if match else None

    @property
    def name(self) -> str:
        """What clients see by default: builds of one repository must not look alike."""
        return str(self).split("/", 1)[1]

    def __str__(self) -> str:
        return f"{self.id}@{self.revision}" if self.revision else self.id


@dataclass(frozen=True)
class Source:
    """Where a model comes from. `revision`: the branches or tags that lead to `commit`, if any is known."""

    repository: str
    revision: str | None
    commit: str

    def __str__(self) -> str:
        at = f" at {self.revision}" if self.revision else ""
        return f"{self.repository}{at}, commit {self.commit[:12]}"
