"""Stop strings: cut exactly before, never leaked, whatever the pieces."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kakera.text.stops import StopMatcher, partial_suffix

small = st.text(alphabet="ab\n", max_size=12)
stop_lists = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), max_size=3)


def run(pieces: list[str], stops: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    shown = "".join(matcher.feed(piece) for piece in pieces)
    if matcher.matched is None:
        shown += matcher.finish()
    return shown, matcher.matched


def expected(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The slow way: the first prefix of the text that ends in a stop string."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@settings(max_examples=300)
@given(st.lists(small, max_size=6), stop_lists)
def test_the_first_complete_stop_cuts_the_text_however_it_is_split(pieces, stops):
    assert run(pieces, stops) == expected("".join(pieces), stops)


@settings(max_examples=200)
@given(st.lists(small, max_size=6), stop_lists)
def test_only_the_beginning_of_a_stop_is_held_back(pieces, stops):
    matcher = StopMatcher(stops)
    for piece in pieces:
        matcher.feed(piece)
        assert matcher.held == "" or any(stop.startswith(matcher.held) for stop in stops)


def test_a_stop_over_token_borders():
    assert run(["The quick br", "own", " f", "ox jumps"], ["own fox"]) == ("The quick br", "own fox")
    assert run(["Hi", "\n", "User", ": x"], ["\nUser:"]) == ("Hi", "\nUser:")


def test_held_text_is_released_at_the_end():
    assert run(["Hi", "\n", "Use"], ["\nUser:"]) == ("Hi\nUse", None)


@given(st.text(alphabet="<a>", max_size=8))
def test_partial_suffix_is_the_longest_proper_prefix(text):
    marker = "<a>"
    sizes = [n for n in range(len(marker)) if text.endswith(marker[:n])]
    assert partial_suffix(text, marker) == max(sizes)
