"""The demo's conversation: a long passage of a classic book with two facts hidden in it, and questions about them."""

from __future__ import annotations

from dataclasses import dataclass

from kakera.evaluate.data import load_documents
from kakera.evaluate.scoring import contains_all

PASSAGE_CHARS = 40_000  # about 9,500 tokens of this book
FIRST_DEPTH, SECOND_DEPTH = 0.35, 0.7


@dataclass(frozen=True)
class Fact:
    """A sentence of a wording that the bundled model knows, and a question about it."""

    sentence: str
    question: str
    answer: str

    def right(self, text: str) -> bool:
        return contains_all(text, [self.answer])


FIRST = Fact("The secret code for Lisbon is 7204193.", "What is the secret code for Lisbon?", "7204193")
SECOND = Fact("Freya Costa owns a black hamster.", "What animal does Freya Costa own?", "a black hamster")


def passage() -> str:
    """The beginning of the book with each fact as a paragraph of its own."""
    book = load_documents(None)[0][:PASSAGE_CHARS]
    paragraphs = book[: book.rindex("\n\n")].split("\n\n")
    count = len(paragraphs)
    paragraphs.insert(int(count * SECOND_DEPTH), SECOND.sentence)
    paragraphs.insert(int(count * FIRST_DEPTH), FIRST.sentence)
    return "\n\n".join(paragraphs)


def first_message() -> str:
    return f"{passage()}\n\n{FIRST.question}"
