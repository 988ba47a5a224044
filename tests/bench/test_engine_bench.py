import pytest

from kakera.bench.engine import EngineBench
from kakera.bench.figures_engine import decode_speed, kv_bytes
from kakera.errors import RequestRefused
from kakera.evaluate.session import open_engine
from kakera.plan.plan import Wishes

SMALL = Wishes(gpus="cpu", context=512, max_running=2, kv="fp32", host_cache=0, chunk=64)


@pytest.fixture(scope="module")
def bench(tiny_model):
    return EngineBench(open_engine(tiny_model, SMALL), vocab=256)


def test_prefill_counts_every_prompt_token(bench):
    found = bench.prefill(200, 2)
    assert found.tokens_per_second * found.seconds == pytest.approx(400)


def test_decode_times_steps_in_which_every_row_speaks(bench):
    found = bench.decode(200, 2, 10)
    assert found.tokens_per_second == pytest.approx(2 / found.step.p50, rel=0.9)
    assert 0 < found.step.p50 <= found.step.p95 <= found.step.max
    assert bench.engine.stats().running == 0  # nothing is left behind


def test_shorter_contexts_begin_the_longest_and_no_two_rows_share_a_page(tiny_model):
    wishes = Wishes(gpus="cpu", context=512, max_running=2, kv="fp32", host_cache=50_000_000, chunk=64)
    bench = EngineBench(open_engine(tiny_model, wishes), vocab=256, contexts=(100, 256))
    found = [bench.decode(context, batch, 2).computed_tokens for context, batch in ((256, 1), (256, 2), (100, 2))]
    assert found == [256, 64 + 256, 2 * (100 - 64)]


def test_kernels_run_before_the_clock_starts(tiny_model):
    engine = open_engine(tiny_model, SMALL)
    found = EngineBench(engine, vocab=256, warm_tokens=64).prefill(200, 1)
    assert engine.stats().counters["prompt_tokens"] == (64 + 200 % 64) + 200
    assert found.tokens_per_second * found.seconds == pytest.approx(200)


def test_the_pool_of_the_2_bit_cache_is_measured_in_allocated_bytes(tiny_model):
    (figure,) = kv_bytes(tiny_model, SMALL)
    # head_dim 64 with one group: 16 bytes of codes and 4 of scale and minimum, against 128
    assert figure.value == pytest.approx(20 / 128)
    assert not figure.ok  # small heads pay more for their scales


def test_a_context_that_the_plan_does_not_have_is_refused_in_words(tiny_model):
    with pytest.raises(RequestRefused, match="512"):
        decode_speed(tiny_model, SMALL)
