from __future__ import annotations

import json
from pathlib import Path

import pytest

from kakera.arch.preprocessor import LEAST, MOST, Pixels, read_pixels
from kakera.arch.registry import spec_of
from kakera.arch.vision import VisionSpec
from kakera.errors import CheckpointError
from tiny_model import CONFIG

PUBLISHED = {
    "model_type": "qwen3_5_vision",
    "depth": 27,
    "hidden_size": 1152,
    "num_heads": 16,
    "intermediate_size": 4304,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 2304,
    "hidden_act": "gelu_pytorch_tanh",
    "in_channels": 3,
    "deepstack_visual_indexes": [],
}
FILE = {
    "size": {"shortest_edge": 65536, "longest_edge": 16777216},
    "patch_size": 16,
    "merge_size": 2,
    "resample": 3,
    "temporal_patch_size": 2,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
    "rescale_factor": 0.00392156862745098,
}


def declared(vision: object = None, token: object = 7, **text: object):
    told = PUBLISHED if vision is None else vision
    return spec_of({**CONFIG, **text, "vision_config": told, "image_token_id": token})


def tower(**of_text: int) -> VisionSpec:
    found = declared(**of_text).vision
    assert found is not None
    return found


def test_the_tower_of_the_family_has_333_tensors():
    """Their bytes are those that its users counted: 921.5 MB in bf16 beside the 27B."""
    sizes = {t.name: t.shape for t in VisionSpec(**{**vars(tower()), "out": 5120}).tensors()}
    assert len(sizes) == 333
    assert sizes["model.visual.blocks.26.attn.qkv.weight"] == (3456, 1152)
    assert sizes["model.visual.patch_embed.proj.weight"] == (1152, 3, 2, 16, 16)
    assert VisionSpec(**{**vars(tower()), "out": 5120}).parameters * 2 == pytest.approx(921.5e6, rel=1e-4)


def test_sizes_that_a_config_leaves_out_are_those_of_the_family():
    assert declared({"depth": 27}).vision == tower()
    assert (tower().head_dim, tower().patch_values, tower().factor, tower().side) == (72, 1536, 32, 48)


def test_axes_take_turns_by_their_sections():
    """11, 11, 10 of 32 pairs fall out of the rule; transformers writes rows over 1, 4, .. and columns over 2, 5, .."""
    axes = tower(head_dim=256, partial_rotary_factor=0.25).axes
    assert axes == tuple(i % 3 for i in range(32)) and [axes.count(axis) for axis in range(3)] == [11, 11, 10]
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
    assert tower(head_dim=16, rope_parameters=rope).axes == (0, 1, 2, 0)


def test_a_text_model_stays_one():
    assert spec_of(CONFIG).vision is None
    assert declared(token=None).vision is None and declared(token=None).blind == ""


@pytest.mark.parametrize(
    ("vision", "said"),
    [
        ({**PUBLISHED, "hidden_act": "silu"}, "hidden_act is 'silu'"),
        ({**PUBLISHED, "deepstack_visual_indexes": [8, 16]}, "deepstack"),
        ({**PUBLISHED, "num_position_embeddings": 2300}, "no square grid"),
        ({**PUBLISHED, "num_heads": 7}, "7 heads"),
        ({**PUBLISHED, "out_hidden_size": 3584}, "out_hidden_size is 3584"),
        ({**PUBLISHED, "depth": "many"}, "depth is 'many'"),
        ({**PUBLISHED, "rope_parameters": {"rope_type": "yarn"}}, "rope_type is 'yarn'"),
    ],
)
def test_a_tower_that_is_not_computed_leaves_a_text_model(vision, said):
    spec = declared(vision)
    assert spec.vision is None and said in spec.blind
    assert spec.tensors() == spec_of(CONFIG).tensors()


def written(directory: Path, name: str, content: object) -> Path:
    (directory / name).write_text(json.dumps(content))
    return directory


def test_limits_of_areas(tmp_path):
    vision = tower()
    assert read_pixels(tmp_path, vision) == Pixels(32, LEAST, MOST)
    newer = written(tmp_path, "processor_config.json", {"image_processor": {**FILE, "size": {"longest_edge": 1 << 20}}})
    assert read_pixels(newer, vision) == Pixels(32, LEAST, 1 << 20)
    older = written(tmp_path, "preprocessor_config.json", {"min_pixels": 16384, "max_pixels": 262144, "size": {}})
    assert read_pixels(older, vision) == Pixels(32, 16384, 262144)
    assert Pixels(32).tokens(1088, 1920) == 2040


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"patch_size": 14}, "patch_size is 14"),
        ({"image_mean": [0.48145466, 0.4578275, 0.40821073]}, "image_mean"),
        ({"resample": 2}, "resample is 2"),
        ({"do_resize": False}, "do_resize is False"),
        ({"rescale_factor": 1 / 256}, "rescale_factor"),
        ({"size": {"shortest_edge": 1 << 20, "longest_edge": 1}}, "between 1048576 and 1 pixels"),
        ({"size": {"longest_edge": "large"}}, "longest_edge is 'large'"),
        ({"size": 3}, "size is 3"),
    ],
)
def test_a_preprocessing_that_is_not_computed_is_refused(tmp_path, changed, said):
    with pytest.raises(CheckpointError, match=said):
        read_pixels(written(tmp_path, "preprocessor_config.json", {**FILE, **changed}), tower())
