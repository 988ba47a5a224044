"""docs/getting-started.md shows what today's planner says."""

from __future__ import annotations

from tools import cards


def test_the_page_has_the_table_that_the_planner_gives():
    page = cards.PAGE.read_text()
    assert page == cards.written(page), "run `make docs`"


def test_cards_are_named_as_on_their_box():
    names = {name: cards.title(name) for name in ("rtx3060", "rtx3090ti", "rtx4070super", "rtx4070tisuper")}
    assert list(names.values()) == [
        "RTX 3060 12 GB",
        "RTX 3090 Ti 24 GB",
        "RTX 4070 Super 12 GB",
        "RTX 4070 Ti Super 16 GB",
    ]
