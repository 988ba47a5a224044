"""From MODEL and wishes to an engine recipe and to what a server says about the model. Shared by serve and chat."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kakera.cli.model import Model
from kakera.plan.plan import Wishes

if TYPE_CHECKING:
    from kakera.run.engine import LocalEngine
    from kakera.server.model import ServedModel

    Recipe = Callable[[], LocalEngine]


def recipe_for(model: Model, wishes: Wishes, say: Callable[[str], None]) -> Recipe:
    """A picklable build function. `say` gets the plan's sum and its warnings, one line each. Raises PlanRefused."""
    if model.scripted:
        from kakera.run.scripted import ScriptedRecipe

        return ScriptedRecipe(model.path)
    from kakera.cli.last_plan import compare_with_last
    from kakera.plan import weights
    from kakera.plan.budget import cautions, make_plan
    from kakera.plan.devices import resolve
    from kakera.plan.spec import ModelSpec
    from kakera.plan.table import summary
    from kakera.run.recipe import EngineRecipe

    spec = ModelSpec.load(model.path)
    machine = resolve(wishes.gpus)
    plan = make_plan(spec, wishes, machine, weights.from_checkpoint(model.path, spec))
    say(summary(plan))
    for caution in (*cautions(plan, machine), *compare_with_last(plan, str(model.path.resolve()), wishes)):
        say(f"warning: {caution}")
    return EngineRecipe(model.path, plan)


def served_model(model: Model, name: str | None = None) -> ServedModel:
    """Tokenizer, template and sampling defaults; a script brings its own tokenizer. Raises CheckpointError."""
    from kakera.server.model import ServedModel

    if not model.scripted:
        return ServedModel.load(model.path, name or model.name)
    from kakera.run.scripted import Script

    return ServedModel.load(Script.load(model.path).tokenizer_dir, name or model.name)
