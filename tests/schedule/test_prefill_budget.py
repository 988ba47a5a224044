from hypothesis import given, settings
from hypothesis import strategies as st

from kakera.contract.grid import PAGE
from kakera.schedule.budget import PrefillBudget, divide


def test_full_chunk_while_nobody_decodes():
    budget = PrefillBudget(chunk=1000, target_seconds=0.25)
    assert budget.tokens(decode_rows=0) == 960
    assert budget.tokens(decode_rows=1) == 256


def test_prefill_takes_what_the_decode_step_leaves_of_the_target():
    budget = PrefillBudget(chunk=8192, target_seconds=0.25)
    for _ in range(30):
        budget.observe(0, 0.05)
        budget.observe(512, 0.05 + 512 * 0.0005)
    assert budget.tokens(decode_rows=2) == 384  # 0.2 s / 0.5 ms, on the grid


def test_never_less_than_a_page_and_a_stall_is_forgotten():
    budget = PrefillBudget(chunk=8192, target_seconds=0.25)
    budget.observe(0, 0.02)
    budget.observe(512, 60.0)  # kernels were compiled
    assert budget.tokens(decode_rows=1) == PAGE
    for _ in range(25):
        budget.observe(PAGE, 0.02 + PAGE * 0.0005)
    assert budget.tokens(decode_rows=1) > 4 * PAGE


def test_oldest_gets_three_quarters_and_the_shortest_others_the_rest():
    assert divide(1024, [100_000, 50_000, 100], step=0) == [768 + 0, 128, 100]
    assert divide(1024, [100, 200, 300], step=0) == [100, 200, 300]
    assert divide(1024, [100_000], step=0) == [1024]


def test_small_budgets_take_turns():
    shares = [divide(64, [10_000, 64], step) for step in range(4)]
    assert shares == [[64, 0], [64, 0], [64, 0], [0, 64]]


@settings(max_examples=100)
@given(
    pages=st.integers(1, 40),
    remaining=st.lists(st.integers(1, 5000), min_size=1, max_size=6),
    step=st.integers(0, 7),
)
def test_shares_respect_budget_and_grid_and_somebody_moves(pages, remaining, step):
    shares = divide(pages * PAGE, remaining, step)
    assert 0 < sum(shares) <= pages * PAGE
    for share, left in zip(shares, remaining, strict=True):
        assert share <= left and (share % PAGE == 0 or share == left)
