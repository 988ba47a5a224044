"""The byte truth: what the plan says, what the cache counts, and what the tensors take are one number."""

import pytest
import torch
from run_world import CODECS, World, ask, tiny_plan, tokens_of
from torch.utils._python_dispatch import TorchDispatchMode

from kakera.plan.sizes import HEAD_PIECE_ROWS, checkpoint_bytes, checkpoint_parts
from kakera.run.store.host import CheckpointShape, HostStore
from kakera.target.target import CUDA


def row(plan, name):
    return sum(r.bytes for r in plan.rows if r.name.startswith(name))


@pytest.mark.parametrize(("kv", "state_dtype"), [("fp32", "fp32"), ("bf16", "fp16"), ("int2", "fp16")])
def test_what_is_stored_takes_what_the_plan_says(tiny_model, kv, state_dtype):
    """Few pages and much traffic: checkpoints, sinks and demoted pages lie in the store at every step."""
    plan = tiny_plan(tiny_model, kv, pages=24, state_dtype=state_dtype)
    world = World.build(tiny_model, kv, pages=24, state_dtype=state_dtype)
    most = {"checkpoint": 0, "sink": 0, "page": 0}
    for i in range(6):
        world.engine.submit(ask(f"a{i}", tokens_of(i, 150 + 90 * i), 70))
    while world.engine.stats().running or world.engine.stats().waiting:
        world.engine.step()
        store = world.runner.store
        for kind, records in zip(most, (store.checkpoints, store.sinks, store.pages), strict=True):
            most[kind] = max(most[kind], len(records))
        counted = (
            len(store.checkpoints) * plan.checkpoint_bytes
            + len(store.sinks) * plan.sink_bytes
            + len(store.pages) * plan.page_bytes
        )
        assert store.bytes() == counted
    assert most["checkpoint"] > 6 and most["page"] > 6 and (most["sink"] > 3) == (kv == "int2")
    world.check_idle()


@pytest.mark.parametrize("kv", CODECS)
def test_pages_windows_and_states_take_what_the_plan_says(tiny_model, kv):
    plan = tiny_plan(tiny_model, kv)
    world = World.build(tiny_model, kv)
    held = world.runner.kv.bytes()
    assert held.pages == plan.pages * plan.page_bytes
    assert held.ring + held.sink == row(plan, "KV windows and sinks")
    states = world.runner.states
    assert states.state_LSVKD.nbytes + states.conv_LSWC.nbytes == row(plan, "recurrent states")


@pytest.mark.parametrize("state_dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("kv", CODECS)
def test_a_checkpoint_of_a_gpu_takes_what_the_plan_says(tiny_model, kv, state_dtype):
    """The same record with 16-bit activations; where its tensors lie does not change their size."""
    plan = tiny_plan(tiny_model, kv)
    shape = CheckpointShape(checkpoint_parts(plan.spec, plan.kv, state_dtype, CUDA), torch.device("cpu"))
    store = HostStore(shape, None, None)
    store.keep_checkpoint(0, shape.empty(64))
    assert store.bytes() == checkpoint_bytes(plan.spec, plan.kv, state_dtype, CUDA)


def test_a_host_budget_of_nothing_keeps_nothing(tiny_model):
    world = World.build(tiny_model, host_cache=0)
    prompt = tokens_of(1, 200)
    first, second = world.one(ask("a", prompt)), world.one(ask("b", prompt))
    assert first.tokens == second.tokens and second.finished.usage.cached_tokens == 0
    assert world.runner.store.bytes() == 0
    world.check_idle()


class LargestOverVocabulary(TorchDispatchMode):
    """The most bytes of a tensor of rows over the vocabulary that is made while this is active."""

    def __init__(self, vocabulary: int):
        super().__init__()
        self.bytes, self._vocabulary = 0, vocabulary

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        rows = isinstance(made, torch.Tensor) and made.dim() == 2 and made.shape[1] == self._vocabulary
        if rows and not function.is_view:
            self.bytes = max(self.bytes, made.nbytes)
        return made


def test_echo_holds_the_logits_of_few_rows_at_a_time_however_long_the_prompt(tiny_model):
    """Given case 75: logits of a whole prompt are what ends other servers, 1 GB for 1,000 tokens of 248,320 words."""
    world = World.build(tiny_model, chunk=1024)
    vocabulary = world.runner.model.spec.vocab
    prompt = tokens_of(1, 1000)
    with LargestOverVocabulary(vocabulary) as largest:
        echo = world.one(ask("echo", prompt, 1, prompt_logprobs=5))
    assert [found.token for found in echo.prompt_logprobs] == list(prompt[1:])
    assert len(prompt) > 8 * HEAD_PIECE_ROWS and largest.bytes == HEAD_PIECE_ROWS * vocabulary * 4
