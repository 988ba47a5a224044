"""Open what a suite needs: an engine for prompts, or a model with a KV cache for teacher-forced text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from kakera.contract.grid import PAGE
from kakera.errors import UsageError
from kakera.evaluate.forced import Forced
from kakera.evaluate.suites import Reader
from kakera.kv.cache import KVCache
from kakera.kv.rotation import Rotation
from kakera.model.qwen3_5 import HybridModel
from kakera.model.state import StatePool
from kakera.plan.plan import Wishes
from kakera.plan.planner import plan_for
from kakera.run.build import check_cards
from kakera.run.engine import LocalEngine
from kakera.run.ranks import engine as ranks
from kakera.server.model import ServedModel
from kakera.target.as_torch import DTYPES


def open_engine(directory: Path, wishes: Wishes, *, escha_bias: bool = False) -> LocalEngine:
    """An engine in this process, planned as for serving."""
    return ranks.open_engine(directory, plan_for(directory, wishes), escha_bias=escha_bias)


def open_reader(directory: Path) -> Reader:
    """What turns messages into prompts and tokens into answers. Raises UsageError for a base model."""
    return _reader(ServedModel.load(directory, directory.name), directory)


def open_seeing_reader(directory: Path, wishes: Wishes) -> Reader:
    """The same, of prompts with images, for the engine that these wishes make. Raises UsageError for a model that sees
    none."""
    plan = plan_for(directory, wishes)
    if plan.vision is None or plan.spec.vision is None:
        raise UsageError(f"{directory} reads no images: kakera info tells whether it holds a vision tower")
    tower = Path(plan.vision_tower or directory)
    model = ServedModel.load(directory, directory.name)
    return _reader(model.seeing(plan.spec.vision, tower, plan.image_tokens), directory)


def _reader(model: ServedModel, directory: Path) -> Reader:
    if model.template is None:
        raise UsageError(f"{directory} has no chat template: it is a base model, only ppl and kld can measure it")
    sight = None if model.images is None else model.images.look
    return Reader(model.tokenizer, model.template, model.eos, sight)


def open_forced(
    directory: Path,
    wishes: Wishes,
    window: int,
    model: HybridModel | None = None,
    *,
    escha_bias: bool = False,
    draft: bool = False,
) -> Forced:
    """The model of a directory with a cache for one sequence of `window` tokens, in the steps that serving takes.

    `model` may be that model, loaded already: several caches can share one. `draft`: load its draft layer too.
    Raises PlanRefused, CheckpointError, UsageError.
    """
    size = -(-window // PAGE) * PAGE
    plan = plan_for(directory, replace(wishes, context=size, max_running=1, host_cache=0))
    check_cards(plan)
    device, dtype = plan.target.kind, DTYPES[plan.target.dtype]
    rotation = Rotation.load(Path(plan.rotation), plan.spec) if plan.rotation else None
    on_host = plan.embedding == "host"
    return Forced(
        model
        or HybridModel.load(directory, dtype, device, escha_bias=escha_bias, draft=draft, embedding_on_host=on_host),
        KVCache(plan.spec, plan.kv, plan.pages, 1, rotation, device, plan.chunk, dtype).backend,
        StatePool(plan.spec, 1, device, dtype),
        plan.chunk,
    )
