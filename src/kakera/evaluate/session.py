"""Open what a suite needs: an engine for prompts, or models with KV caches for teacher-forced text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from kakera.chat.template import ChatTemplate
from kakera.errors import UsageError
from kakera.evaluate.forced import Forced
from kakera.evaluate.suites import Reader
from kakera.plan import weights
from kakera.plan.budget import make_plan
from kakera.plan.devices import resolve
from kakera.plan.plan import Plan, Wishes
from kakera.plan.spec import ModelSpec
from kakera.run.build import build_engine
from kakera.run.engine import LocalEngine
from kakera.schedule.step import PAGE


def plan_for(directory: Path, wishes: Wishes) -> Plan:
    """The plan that `kakera serve` would make. Raises PlanRefused."""
    spec = ModelSpec.load(directory)
    return make_plan(spec, wishes, resolve(wishes.gpus), weights.from_checkpoint(directory, spec))


def open_engine(directory: Path, wishes: Wishes) -> LocalEngine:
    """An engine in this process, planned as for serving."""
    return build_engine(directory, plan_for(directory, wishes))


def open_reader(directory: Path, engine: LocalEngine) -> Reader:
    """What turns messages into prompts and tokens into answers. Raises UsageError for a base model."""
    template = ChatTemplate.load(directory, engine.tokenizer)
    if template is None:
        raise UsageError(f"{directory} has no chat template: it is a base model, only ppl and kld can measure it")
    return Reader(engine.tokenizer, template, engine.plan.spec.eos, engine.plan.context)


def open_forced(directory: Path, wishes: Wishes, window: int) -> tuple[Forced, LocalEngine]:
    """The model of a directory with a cache for one sequence of `window` tokens, in the steps that serving takes."""
    size = -(-window // PAGE) * PAGE
    engine = build_engine(directory, plan_for(directory, replace(wishes, context=size, max_running=1, host_cache=0)))
    runner = engine.runner
    return Forced(runner.model, runner.kv, runner.states, engine.plan.chunk), engine
