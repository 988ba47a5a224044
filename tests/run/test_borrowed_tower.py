"""A model without a tower takes that of another directory: the answers are those of a model that has it itself."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from run_world import GROUP, MACHINE, World, ask, equal, tokens_of

from kakera.arch.registry import load_spec
from kakera.errors import CheckpointError
from kakera.plan.plan import Plan, Wishes
from kakera.plan.planner import plan_and_speed
from kakera.run.build import build_engine
from kakera.run.store.open_disk import differences, disk_key
from kakera.server.model import ServedModel
from seeing_model import SEEING, picture, prompt_of
from tiny_model import CONFIG


@pytest.fixture(scope="module")
def parts(seeing_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The text model of a directory that sees, and its tower alone with an index of files that are not there."""
    from safetensors.torch import load_file, save_file

    blind, tower = (tmp_path_factory.mktemp(name) for name in ("blind", "tower"))
    shutil.copytree(seeing_model, blind, dirs_exist_ok=True)
    tensors = load_file(seeing_model / "model.safetensors")
    of_tower = {name: tensor for name, tensor in tensors.items() if name.startswith("model.visual.")}
    save_file({name: tensor for name, tensor in tensors.items() if name not in of_tower}, blind / "model.safetensors")
    (blind / "config.json").write_text(json.dumps(CONFIG))
    (blind / "preprocessor_config.json").unlink()
    short = {name.removeprefix("model."): tensor for name, tensor in of_tower.items()}
    save_file(short, tower / "model-00002-of-00009.safetensors")
    for name in ("config.json", "preprocessor_config.json"):
        shutil.copy(seeing_model / name, tower / name)
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00009.safetensors"}}
    (tower / "model.safetensors.index.json").write_text(json.dumps(index))
    return blind, tower


def plan(directory: Path, **wishes: object) -> Plan:
    sizes = {"context": 1024, "max_running": 2, "kv_group": GROUP, "kv_window": 128, "host_cache": 64 * 2**20}
    return plan_and_speed(directory, Wishes(**{**sizes, "image_tokens": 100, **wishes}), MACHINE)[0]


def test_answers_with_a_borrowed_tower(seeing_model, parts):
    blind, tower = parts
    assert plan(blind).vision is None
    plans = {seeing_model: plan(seeing_model), blind: plan(blind, vision_tower=str(tower))}
    assert plans[blind].wishes().vision_tower == str(tower)
    tokens, images = prompt_of(tokens_of(1, 50), picture(1, 9, 11), tokens_of(2, 20))
    worlds = [World(build_engine(directory, found)).watch() for directory, found in plans.items()]
    for world in worlds:
        world.one(replace(ask("a", tokens), images=images))
    assert equal(worlds[0].seen["a"], worlds[1].seen["a"])
    keys = [disk_key(blind, each, "float32", False) for each in (plan(blind), plans[blind])]
    assert "vision tower" not in keys[0] and keys[1]["vision tower"]
    for old, new in (keys, keys[::-1]):
        assert differences(old, new) == ["vision tower changed"], "in both directions: what is said of an empty cache"
    model = ServedModel.load(blind, "blind")
    vision = plans[blind].spec.vision
    assert vision is not None and model.seeing(vision, tower, 100).images.pixels.least == 256 and not model.sees


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"vision_config": None}, "tells of no vision tower"),
        ({"vision_config": {**SEEING["vision_config"], "hidden_act": "silu"}}, "hidden_act is 'silu'"),
        ({"vision_config": {**SEEING["vision_config"], "depth": 3}}, "holds no whole vision tower"),
        ({"hidden_size": 96, "vision_config": {**SEEING["vision_config"], "out_hidden_size": 96}}, "of 96 channels"),
        ({"image_token_id": 400, "vocab_size": 500}, "another family"),
    ],
)
def test_towers_that_do_not_fit_are_refused(parts, tmp_path, changed, said):
    blind, tower = parts
    shutil.copytree(tower, tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_text(json.dumps({**SEEING, **changed}))
    with pytest.raises(CheckpointError, match=said):
        plan(blind, vision_tower=str(tmp_path))


def test_a_config_that_tells_of_a_tower_keeps_its_own_token(seeing_model, parts, tmp_path):
    """As checkpoints do whose makers left the tower out: config and template are those of the whole model."""
    blind, tower = parts
    shutil.copytree(blind, tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_text(json.dumps({**SEEING, "image_token_id": 299}))
    found = plan(tmp_path, vision_tower=str(tower)).spec.vision
    assert found is not None and found.token == 299 != load_spec(seeing_model).vision.token
