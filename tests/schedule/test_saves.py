from hypothesis import given, settings
from hypothesis import strategies as st

from kakera.contract.grid import PAGE
from kakera.contract.request import Boundary
from kakera.schedule.saves import choose_saves, grid_points


def test_text_structure_comes_first_and_grid_points_keep_away_from_it():
    ends = [Boundary(500, "system"), Boundary(1000, "message"), Boundary(1100, "prompt")]
    saves = choose_saves(1100, 0, ends, branch=0, grid=8192)
    assert saves == [(64, "grid"), (128, "grid"), (256, "grid"), (448, "system"), (960, "message"), (1088, "message")]


def test_nothing_is_saved_before_the_start_and_the_branch_is():
    saves = choose_saves(3000, 640, [Boundary(500, "system")], branch=1472, grid=8192)
    assert (1472, "branch") in saves
    assert min(position for position, _ in saves) > 640


def test_prompt_that_ends_on_the_grid_is_saved_before_and_at_its_end():
    saves = choose_saves(256, 0, [Boundary(256, "prompt")], branch=0, grid=8192)
    assert saves[-2:] == [(192, "message"), (256, "message")]
    assert choose_saves(256, 0, [], branch=0, grid=8192)[-1] == (256, "rolling")


def test_hundreds_of_messages_are_thinned_by_distance():
    ends = [Boundary(300 * i, "message") for i in range(1, 600)]
    messages = [position for position, kind in choose_saves(180_000, 0, ends, 0, 8192) if kind == "message"]
    assert len(messages) <= 18
    assert messages[-3:] == [300 * 598 // PAGE * PAGE, 300 * 599 // PAGE * PAGE, 179_999 // PAGE * PAGE]
    assert messages[0] < 60_000


def test_grid_doubles_up_to_its_step():
    assert grid_points(20_000, 4096) == [64, 128, 256, 512, 1024, 2048, 4096, 8192, 12288, 16384]


@settings(max_examples=60)
@given(
    tokens=st.integers(1, 5000),
    start=st.integers(0, 40),
    branch=st.integers(0, 80),
    ends=st.lists(st.integers(0, 6000), max_size=30),
)
def test_save_points_lie_on_the_grid_ascending_and_within_the_prompt(tokens, start, branch, ends):
    saves = choose_saves(tokens, start * PAGE, [Boundary(end, "message") for end in ends], branch * PAGE, 1024)
    positions = [position for position, _ in saves]
    assert positions == sorted(set(positions))
    assert all(position % PAGE == 0 and start * PAGE < position <= tokens for position in positions)
    if (tokens - 1) // PAGE > start:
        assert (tokens - 1) // PAGE * PAGE in positions, "an identical prompt must hit"
