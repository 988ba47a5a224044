"""The bars of a card that is lent."""

from dataclasses import replace

from tools.lend import Nap

GOOD = Nap(1, 1.2, 8 * 10**8, 10**10, 1.5, 0.9, 190_000, 189_952, same_text=True)


def test_each_bar_is_missed_by_what_it_is_for():
    assert all(figure.ok for figure in GOOD.figures())
    wrong = [{"sleep_seconds": 2.1}, {"left_bytes": 10**9}, {"first_token_seconds": 3.1}, {"cached_tokens": 170_000}]
    assert [[f.ok for f in replace(GOOD, **change).figures()].index(False) for change in wrong] == [0, 1, 2, 3]
    (kept,) = replace(GOOD, level=2, sleep_seconds=9.0, same_text=False).figures()
    assert kept.ok and "ANOTHER TEXT" in kept.note
