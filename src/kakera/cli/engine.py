"""From MODEL and wishes to an engine recipe and to what a server says about the model. Shared by serve and chat."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from kakera.cli.model import Model
from kakera.plan.plan import Wishes

if TYPE_CHECKING:
    from kakera.plan.plan import DraftWish, Plan
    from kakera.run.engine import LocalEngine
    from kakera.run.process.kv_events import KvEvents
    from kakera.server.model import ServedModel
    from kakera.service.limits import Bounds
    from kakera.target.devices import Machine

    class Recipe(Protocol):
        """A picklable build function. `plan` is None if there is no memory to plan."""

        @property
        def plan(self) -> Plan | None: ...

        @property
        def kv_events(self) -> KvEvents | None: ...

        def __call__(self) -> LocalEngine: ...


def recipe_for(model: Model, wishes: Wishes, say: Callable[[str], None], threads: int | None = None) -> Recipe:
    """How to build the engine, with `threads` of a CPU. `say` gets the plan's sum and its warnings, one line each.
    Raises PlanRefused."""
    if model.scripted:
        from kakera.run.scripted import ScriptedRecipe

        return ScriptedRecipe(model.path)
    from kakera.cli.last_plan import compare_with_last
    from kakera.plan.cautions import cautions
    from kakera.plan.planner import plan_and_speed
    from kakera.plan.proven import proof_for, proven_line
    from kakera.plan.table import summary
    from kakera.run.process.recipe import EngineRecipe
    from kakera.target.devices import resolve_to_compute

    machine = resolve_to_compute(wishes.gpus)
    wishes = with_decoder(model, wishes, say)
    plan, _ = plan_and_speed(model.path, wishes, machine)
    say(summary(plan))
    if proof := proof_for(plan, machine):
        say(f"this plan, or a larger one, was {proven_line(proof)}")
    for caution in (*cautions(plan, machine, wishes), *compare_with_last(plan, str(model.path.resolve()), wishes)):
        say(f"warning: {caution}")
    return EngineRecipe(model.path, plan, threads=threads)


def with_drafts(wishes: Wishes, wanted: DraftWish, machine: Machine) -> Wishes:
    """And guesses of what comes next. Raises UsageError where nobody checks them: on cards, in several processes."""
    from dataclasses import replace

    from kakera.errors import UsageError
    from kakera.plan.plan import AUTO, OFF

    if machine.target.has_cards or machine.processes > 1:
        if wanted not in (AUTO, OFF):
            where = "on a CPU only" if machine.target.has_cards else "in one process only"
            raise UsageError(f"--drafts {wanted}: guesses are checked {where} so far; leave the option out")
        wanted = OFF
    return replace(wishes, drafts=wanted)


def with_decoder(model: Model, wishes: Wishes, say: Callable[[str], None]) -> Wishes:
    """Without a tower where nothing could decode an image for it. Raises UsageError if one was asked for."""
    from dataclasses import replace

    from kakera.arch.registry import load_spec
    from kakera.errors import UsageError
    from kakera.vision.decode import require_pillow

    if wishes.vision == "off" or not (wishes.vision_tower or load_spec(model.path).vision):
        return wishes
    try:
        require_pillow()
    except UsageError as error:
        if wishes.vision != "auto":
            raise
        say(f"warning: images are refused: {error}")
        return replace(wishes, vision="off")
    return wishes


def seeing(
    offered: ServedModel, model: Model, recipe: Recipe, say: Callable[[str], None], image_urls: str | None = None
) -> ServedModel:
    """The same model, which reads images if its engine has a tower; `image_urls`: hosts that they are fetched from.
    Raises CheckpointError, UsageError."""
    from kakera.errors import UsageError
    from kakera.vision.fetch import Fetcher

    plan = recipe.plan
    if plan is None or plan.vision is None or plan.spec.vision is None:
        if image_urls is not None:
            raise UsageError("--image-urls: this server reads no images (kakera info tells of a vision tower)")
        return offered
    fetcher = None if image_urls is None else Fetcher.allowing(image_urls)
    if fetcher is not None:
        who = "any public host" if fetcher.public else ", ".join(sorted(fetcher.hosts))
        say(f"warning: images are fetched from {who} for whoever writes a prompt")
    found = offered.seeing(plan.spec.vision, Path(plan.vision_tower or model.path), plan.image_tokens, fetcher)
    if not found.sees:
        say("warning: images are refused: the chat template has no place for them")
    return found


def recording(recipe: Recipe, file: Path, name: str, prompts: bool) -> Recipe:
    """The same engine, which records its steps. Raises UsageError for a script, which computes none."""
    from dataclasses import replace

    from kakera.contract.recording import check_place
    from kakera.errors import UsageError
    from kakera.run.process.recipe import EngineRecipe, Recording

    if not isinstance(recipe, EngineRecipe):
        raise UsageError("--record: a scripted model computes nothing that could be replayed")
    check_place(file)
    return replace(recipe, recording=Recording(file.resolve(), name, prompts))


def with_disk(recipe: Recipe, limit: int, say: Callable[[str], None]) -> Recipe:
    """The same engine, which keeps prefixes on disk, `limit` bytes at most. Raises UsageError."""
    from dataclasses import replace

    from kakera.cache.host import CacheSizes
    from kakera.disk.home import DiskCache, check_home, default_home
    from kakera.errors import UsageError
    from kakera.run.process.recipe import EngineRecipe

    if not isinstance(recipe, EngineRecipe):
        raise UsageError("--disk-cache: a scripted model has no prefixes to keep")
    if recipe.recording is not None:
        raise UsageError("--disk-cache: a recording could not be replayed without the disk; leave --record out")
    home = default_home()
    check_home(home)
    if recipe.plan.ranks > 1:
        raise UsageError("--disk-cache: not for a model that several processes share yet")
    if not CacheSizes.of(recipe.plan).can_save:
        raise UsageError("--disk-cache: the memory of the prefix cache holds no state; give --host-cache more")
    say(f"prefixes are kept in {home}, up to {limit / 1e9:.1f} GB")
    return replace(recipe, disk=DiskCache(home, limit))


def with_kv_events(recipe: Recipe, wanted: str, say: Callable[[str], None]) -> Recipe:
    """The same engine, which tells routers what can be hit. Raises UsageError."""
    import re
    from dataclasses import replace

    from kakera.errors import UsageError
    from kakera.run.process.kv_events import KvEvents
    from kakera.run.process.recipe import EngineRecipe
    from kakera.run.scripted import ScriptedRecipe
    from kakera.server.http.access import is_loopback

    found = re.fullmatch(r"tcp://([^:/\s]+|\[[0-9a-fA-F:]+\]):([0-9]+)(?:,([!-~]*))?", wanted)
    if found is None or not 0 < int(found[2]) < 65535:
        raise UsageError(f"--kv-events {wanted}: write tcp://127.0.0.1:5557, or tcp://*:5557,TOPIC for all addresses")
    assert isinstance(recipe, EngineRecipe | ScriptedRecipe)
    place = KvEvents(found[1], int(found[2]), found[3] or "")
    if not is_loopback(place.host.strip("[]")):
        ports = f"ports {place.port} and {place.port + 1}"
        say(f"warning: --kv-events tells the tokens of prompts to whoever can reach {ports}")
    return replace(recipe, kv_events=place)


def stall_limit_for(model: Model, wishes: Wishes, machine: Machine) -> float:
    """Seconds without progress after which the engine hangs."""
    from kakera.plan.planner import plan_and_speed
    from kakera.service.limits import STALL_LEAST, stall_seconds

    return STALL_LEAST if model.scripted else stall_seconds(*plan_and_speed(model.path, wishes, machine))


def bounds_for(model: Model, wishes: Wishes) -> Bounds:
    """Seconds and bytes of a service with this model. Raises PlanRefused."""
    from kakera.plan.planner import plan_and_speed
    from kakera.service.limits import SCRIPTED_BOUNDS, bounds, file_bytes
    from kakera.target.devices import resolve_to_compute

    if model.scripted:
        return SCRIPTED_BOUNDS
    return bounds(*plan_and_speed(model.path, wishes, resolve_to_compute(wishes.gpus)), file_bytes(model.path))


def served_model(model: Model, names: Sequence[str] = (), *, any_name: bool = False) -> ServedModel:
    """Tokenizer, template and sampling defaults; a script brings its own tokenizer. Raises CheckpointError."""
    from dataclasses import replace

    from kakera.run.scripted import Script
    from kakera.server.model import ServedModel

    first, *aliases = names or (model.name,)
    if model.scripted:
        script = Script.load(model.path)
        served = ServedModel.load(script.tokenizer_dir, first, script.tokenizer)
    else:
        served = ServedModel.load(model.path, first)
    return replace(served, aliases=tuple(aliases), any_name=any_name)
