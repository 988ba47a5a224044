"""An architecture that kakera has never heard of, declared in one file (`shiftnet.py`): it is planned, made up,
quantised, loaded, run, restored and drafted with, without an edit in src/."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import shiftnet
import torch
from safetensors.torch import save_file
from tests.quantize.tiny import cheap_encode
from torch import Tensor

from kakera.arch.layout import slot_record
from kakera.arch.registry import ARCHITECTURES, load_spec, spec_of
from kakera.arch.shard import of_rank
from kakera.contract.request import Request, Sampling
from kakera.errors import CheckpointError
from kakera.model.kinds import KINDS
from kakera.model.mtp import draft_hidden
from kakera.model.qwen3_5 import HybridModel
from kakera.plan.plan import Plan, Wishes
from kakera.plan.planner import make_plan
from kakera.plan.weights import from_checkpoint, from_config
from kakera.quantize.convert import quantize_checkpoint
from kakera.quantize.recipe import Recipe
from kakera.run.build import build_engine
from kakera.run.engine import LocalEngine
from kakera.run.generate import Completion, generate
from kakera.target.devices import Device, Machine
from kakera.target.target import CPU, CUDA
from kakera.weights.checkpoint import Checkpoint
from kakera.weights.synthetic import RandomTensor, normal

GB = 10**9
MACHINES = {
    "a CPU": Machine(CPU, (Device("cpu", 16 * GB, 2 * GB),), 16 * GB, 2 * GB),
    "a card": Machine(CUDA, (Device("8GB", 8 * GB),), 32 * GB, 2 * GB),
    "four cards": Machine(CUDA, (Device("80GB", 80 * GB),) * 4, 128 * GB, 2 * GB),
}
CONFIG = {
    "model_type": shiftnet.MODEL_TYPE,
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "gdn_heads": 2,
    "max_position_embeddings": 4096,
    "rope_theta": 1e7,
    "eos_token_id": 1,
}


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ARCHITECTURES, shiftnet.MODEL_TYPE, shiftnet.declare)
    monkeypatch.setitem(KINDS, shiftnet.ShiftMlp.kind, shiftnet.KIND)


def write(directory: Path, config: dict, tensors: dict[str, Tensor] | None = None) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    if tensors is not None:
        save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.fixture
def made_up(tmp_path: Path) -> Path:
    """A directory whose weights are random."""
    return write(tmp_path / "made-up", {**CONFIG, "random_weights": 5})


@pytest.fixture
def plain(made_up: Path, tmp_path: Path) -> Path:
    """The same weights in a file, with a draft layer."""
    checkpoint, spec = Checkpoint.open(made_up), load_spec(made_up)
    tensors = {}
    for name in checkpoint.modules():
        leaves = checkpoint.leaves(name)
        tensors |= {f"{name}.{leaf}" if name else leaf: leaves[leaf].read() for leaf in leaves.names()}
    for name, declared in spec.tensors(draft=True).items():
        if name not in spec.tensors():
            stored = name if declared.role == "small" else f"{name}.weight"
            mean, deviation = (1.0, 0.02) if declared.role == "small" else (0.0, declared.shape[-1] ** -0.5)
            random = RandomTensor(stored, made_up, "BF16", declared.shape, 0, 0, 9, normal(mean, deviation))
            tensors[stored] = random.read()
    return write(tmp_path / "plain", CONFIG, tensors)


@pytest.fixture
def quantised(plain: Path, tmp_path: Path) -> Path:
    out = tmp_path / "quantised"
    quantize_checkpoint(plain, out, Recipe.for_bits("exl3", 2.5, load_spec(plain)), encode=cheap_encode)
    return out


def plan_of(directory: Path, **changes: object) -> Plan:
    wishes = Wishes(context=1024, max_running=4, kv_group=32, kv_window=128, chunk=128, host_cache=64 * 2**20)
    spec = load_spec(directory)
    return make_plan(spec, wishes, MACHINES["a CPU"], from_checkpoint(directory, spec))


@pytest.mark.parametrize("machine", MACHINES)
def test_it_is_planned_for_every_machine_and_ranks_share_it(machine):
    spec = spec_of(CONFIG)
    plan = make_plan(spec, Wishes(), MACHINES[machine], from_config(spec, CONFIG))
    ranks = len(plan.device_names)
    assert ranks <= 2, "two KV heads, so two cards at most"
    rows = {row.name: row.bytes for row in plan.rows}
    gdn, last = 4 * (4 // ranks) * 64 * 64 * 4, 6 * 128  # bytes of S; values of what the blocks have read last
    item = 4 if machine == "a CPU" else 2
    assert rows["recurrent states"] == plan.slots * (gdn + item * (last + 4 * 3 * (512 // ranks)))
    assert of_rank(spec, 1, 2).tensors()["model.layers.0.mixer.down"].shape == (128, 128)
    assert {part.name for part in slot_record(spec, "bf16")} == {"state", "conv", "last"}


def test_random_weights_are_those_that_its_config_plans(made_up):
    checkpoint, spec = Checkpoint.open(made_up), load_spec(made_up)
    checkpoint.check_complete(spec.tensors())
    assert sum(entry.bytes for entry in checkpoint.entries()) == from_config(spec, CONFIG).coded
    up_OI = checkpoint.linear("model.layers.5.mixer.up", 256, 128)
    assert up_OI.std().item() == pytest.approx(128**-0.5, rel=0.03)


def test_its_own_kinds_of_linears_get_rates_and_the_draft_layer_its_own(quantised):
    spec = load_spec(quantised)
    checkpoint = Checkpoint.open(quantised)
    checkpoint.check_complete(spec.tensors(draft=True))
    rates = {e.name: round(e.bits_per_weight) for e in checkpoint.entries() if e.kind == "exl3"}
    assert {rates[f"model.layers.{i}.mixer.down"] for i in range(6)} == {3}, "promoted before the other"
    assert rates["draft.join"] == rates["draft.layer.mlp.up_proj"] == 4
    assert Counter(e.kind for e in checkpoint.entries())["exl3"] == 4 * 3 + 2 * 4 + 6 * 2 + 1 + 1 + 4 + 3
    assert Recipe.for_bits("exl3", 2.5, spec).bits["shift.up"] == 2


def answer(engine: LocalEngine, id: str, prompt: Sequence[int], tokens: int = 3) -> Completion:
    sampling = Sampling(max_tokens=tokens, seed=1, temperature=0.0, logprobs=1)
    (completion,) = generate(engine, [Request(id, tuple(prompt), sampling)]).values()
    assert completion.finished is not None and completion.finished.reason in ("stop", "length")
    return completion


@pytest.mark.parametrize("kind", ["made_up", "quantised"])
def test_it_runs_and_a_hit_is_the_same_computation(kind, request):
    """States of its own block included: what the slot holds behind a restored prompt has the bits of the cold one."""
    directory = request.getfixturevalue(kind)
    engine = build_engine(directory, plan_of(directory))
    states = engine.runner.states
    for length in (64, 127, 300):
        prompt = torch.randint(2, 256, (length,), generator=torch.Generator().manual_seed(length)).tolist()
        held, answers = [], []
        for name in ("cold", "warm"):
            answers.append(answer(engine, f"{name} {length}", prompt))
            held.append({part: tensor.clone() for part, tensor in states.parts.items()})
        cold, warm = (completion.finished.usage.cached_tokens for completion in answers)
        assert (cold, warm) == (0, (length - 1) // 64 * 64)
        assert answers[0].tokens == answers[1].tokens
        gaps = [abs(a.logprob - b.logprob) for a, b in zip(answers[0].logprobs, answers[1].logprobs, strict=True)]
        assert max(gaps) < 1e-4
        slots = [part.abs().sum((0, *range(2, part.dim()))) > 0 for part in held[1].values()]
        assert all(bool(used.any()) for used in slots)
        assert {n: torch.equal(t, held[1][n]) for n, t in held[0].items()} == dict.fromkeys(states.parts, True)


def test_a_forgotten_state_would_show(made_up):
    """The test above fails if a checkpoint loses what the block has read last."""
    engine = build_engine(made_up, plan_of(made_up))
    prompt = torch.randint(2, 256, (127,), generator=torch.Generator().manual_seed(1)).tolist()
    cold = answer(engine, "cold", prompt)
    with torch.inference_mode():
        for checkpoint in engine.runner.store.checkpoints.values():
            checkpoint.parts["last"].zero_()
    warm = answer(engine, "warm", prompt)
    assert warm.finished.usage.cached_tokens == 64
    assert warm.logprobs[0].logprob != cold.logprobs[0].logprob


def test_its_draft_layer_drafts(quantised):
    model = HybridModel.load(quantised, draft=True)
    tokens_N, hidden_NH = torch.arange(2, 12), torch.randn(10, 128)
    drafted_NH = draft_hidden(model, tokens_N, hidden_NH)
    assert drafted_NH.shape == (10, 128) and drafted_NH.isfinite().all()
    assert torch.allclose(draft_hidden(model, tokens_N[:4], hidden_NH[:4]), drafted_NH[:4], atol=1e-5)


def test_without_code_for_its_block_it_is_planned_and_refused_in_words(made_up, monkeypatch):
    monkeypatch.delitem(KINDS, shiftnet.ShiftMlp.kind)
    with pytest.raises(CheckpointError, match=r"can plan this model and not compute it yet.*shift_mlp"):
        build_engine(made_up, plan_of(made_up))
