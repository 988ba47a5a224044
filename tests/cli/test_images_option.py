"""Where a server reads images, and where it says that it does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from kakera.cli.engine import recipe_for, seeing, served_model, with_decoder
from kakera.cli.model import Model
from kakera.errors import UsageError
from kakera.plan.plan import Wishes

WISHES = Wishes(gpus="cpu", context=512, kv_group=32, host_cache=2**20, image_tokens=100)


@pytest.fixture
def model(seeing_model: Path) -> Model:
    return Model("seeing", seeing_model)


def test_a_server_reads_images_where_its_plan_has_a_tower(model):
    said: list[str] = []
    offered = served_model(model)
    for vision, sees in (("auto", True), ("off", False)):
        recipe = recipe_for(model, Wishes(**{**vars(WISHES), "vision": vision}), said.append)
        assert seeing(offered, model, recipe, said.append).sees == sees
        assert ("images of up to 100 tokens" in said[-1]) == sees
    with pytest.raises(UsageError, match="--image-urls: this server reads no images"):
        seeing(offered, model, recipe, said.append, "public")


def test_whoever_has_images_fetched_is_warned(model):
    said: list[str] = []
    recipe = recipe_for(model, WISHES, said.append)
    found = seeing(served_model(model), model, recipe, said.append, "b.example,a.example")
    assert said[-1] == "warning: images are fetched from a.example, b.example for whoever writes a prompt"
    assert found.images is not None and found.images.fetcher is not None


def test_without_pillow_text_is_served_unless_a_tower_was_asked_for(model, tiny_model, monkeypatch):
    """An upgrade must not stop a server that has answered until then."""
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    monkeypatch.setitem(__import__("sys").modules, "PIL.Image", None)
    said: list[str] = []
    assert with_decoder(model, WISHES, said.append).vision == "off"
    assert said[0].startswith("warning: images are refused: images need Pillow: pip install 'kakera[vision]'")
    with pytest.raises(UsageError, match="images need Pillow"):
        with_decoder(model, Wishes(vision="device"), said.append)
    assert with_decoder(Model("tiny", tiny_model), WISHES, said.append) == WISHES and len(said) == 1


def test_a_picture_goes_with_the_next_message_of_a_chat(model, tmp_path):
    """By a path as it is typed or dropped; a history keeps it, and the next message has none."""
    import io

    from PIL import Image
    from rich.console import Console

    from kakera.cli.chat import obey
    from kakera.cli.conversation import Conversation, Settings
    from kakera.cli.local_answers import LocalModel

    recipe = recipe_for(model, WISHES, lambda line: None)
    offered = seeing(served_model(model), model, recipe, lambda line: None)
    engine = recipe()
    out = io.StringIO()
    chat = Conversation(LocalModel(engine, offered, Settings(8)), Console(file=out, width=100))
    file = tmp_path / "a cat.png"
    Image.new("RGB", (48, 64), "red").save(file)
    for said in (f"/image '{file}'", "what is this?", "/image nowhere.png", "and now?"):
        assert obey(chat, said)
    shown = out.getvalue()
    assert "a cat.png goes with the next message" in shown and "nowhere.png: No such file" in shown
    assert engine.stats().counters["images_encoded"] == 1
    users = [message["content"] for message in chat.messages if message["role"] == "user"]
    assert [part["type"] for part in users[0]] == ["image_url", "text"] and users[1:] in ([], ["and now?"])
    file.write_text("no image")
    assert obey(chat, f"/image {file}") and obey(chat, "what is this?")
    assert "in no format that is read" in out.getvalue()


def test_info_and_plan_tell_of_a_tower(seeing_model, tiny_model):
    """Stored or not: `info` of a directory whose config tells of a tower that its files lack says so."""
    import json
    import shutil

    from in_process import run

    shown = run("info", str(seeing_model)).stdout
    assert "vision tower: 2 blocks x 48" in shown and "a token is 8 x 8 pixels" in shown
    told = json.loads(run("info", str(seeing_model), "--json").stdout)["vision"]
    assert told["bytes"] == 2 * told["parameters"] > 0 and told["pixels_per_token"] == 64
    assert "vision" not in json.loads(run("info", str(tiny_model), "--json").stdout)
    lacking = seeing_model.parent / "lacking"
    shutil.copytree(tiny_model, lacking)
    shutil.copy(seeing_model / "config.json", lacking)
    assert "which this checkpoint does not hold" in run("info", str(lacking)).stdout
    planned = run("plan", str(seeing_model), "--gpus", "cpu", "--kv-group", "32", "--json")
    assert json.loads(planned.stdout)["vision"] == "device"
    without = json.loads(run("plan", str(lacking), "--gpus", "cpu", "--kv-group", "32", "--json").stdout)
    assert "vision" not in without and "images are refused: the checkpoint holds no whole" in without["warnings"][-1]
