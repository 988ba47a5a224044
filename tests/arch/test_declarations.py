"""Declarations against numbers worked out by hand, and against themselves: what ranks hold adds up to the whole."""

from __future__ import annotations

import contextlib
import time

import pytest

from kakera.arch.layout import Dtypes, checkpoint_record, page_record, record_bytes, sink_record, slot_record
from kakera.arch.registry import ARCHITECTURES, spec_of
from kakera.arch.shard import can_share, of_rank
from kakera.arch.spec import EMBEDDING, LM_HEAD, ModelSpec
from kakera.arch.tensors import Shard, by_blocks, by_rows
from kakera.errors import CheckpointError, KakeraError
from kakera.plan.known import KNOWN
from kakera.plan.plan import Wishes
from kakera.plan.planner import make_plan
from kakera.plan.weights import from_config
from kakera.target.devices import resolve

QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 1000,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rope_theta": 1e6,
}
STATE_27B, CONV_27B = 48 * 48 * 128 * 128, 48 * 3 * 10240


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return spec_of(KNOWN["qwen3.8-27b"])


def test_the_27b_has_64_layers_of_two_blocks(spec):
    assert [[site.block.kind for site in layer.sites] for layer in spec.layers[2:4]] == [
        ["gdn", "swiglu"],
        ["full", "swiglu"],
    ]
    assert spec.full_layers == tuple(range(3, 64, 4)) and len(spec.gdn_layers) == 48
    assert (spec.heads, spec.kv_heads, spec.head_dim, spec.rotary_dim, spec.group) == (24, 4, 256, 64, 6)
    assert spec.gdn is not None and spec.gdn.conv_channels == 10240


def test_coded_weights_of_the_27b_are_those_of_the_published_file(spec):
    assert sum(spec.kinds.values()) == 24_326_963_200
    assert [kind.name for kind in sorted(spec.kinds, key=lambda k: k.order)][:3] == [
        "attention.v",
        "attention.k",
        "mlp.down",
    ]


def test_tensors_have_the_names_shapes_and_roles_of_the_files(spec):
    tensors = spec.tensors()
    assert len(tensors) == 3 + 48 * (2 + 9 + 3) + 16 * (2 + 6 + 3)
    assert tensors["model.layers.3.self_attn.q_proj"].shape == (12288, 5120)
    assert tensors["model.layers.0.linear_attn.conv1d.weight"].shape == (10240, 1, 4)
    assert tensors["model.layers.0.input_layernorm.weight"].values == "delta"
    assert tensors["model.layers.0.linear_attn.norm.weight"].values == "scale"
    assert tensors[EMBEDDING].role == "table" and tensors[LM_HEAD].alias == ""
    forms = {name: t.stored_as("escha") for name, t in tensors.items() if t.role != "small"}
    assert (forms[EMBEDDING], forms["model.layers.0.linear_attn.in_proj_a"]) == ("int8", "plain")
    assert {forms["model.layers.0.mlp.up_proj"], tensors["model.layers.0.mlp.up_proj"].kind.escha} == {"escha", 3}


def test_the_draft_layer_is_one_more_layer_with_what_joins_its_inputs(spec):
    served = spec.tensors()
    draft = {n: t for n, t in spec.tensors(draft=True).items() if n not in served}
    assert len(draft) == 15 and sum(t.count for t in draft.values()) == 424_699_392  # as published
    assert {t.kind.name for t in draft.values() if t.kind} == {"mtp"}
    assert spec.draft is not None and (spec.draft.takes, spec.draft.width) == ("post-norm", 5120)


def test_qwen3_has_no_states_and_plain_norms():
    spec = spec_of(QWEN3)
    assert slot_record(spec, "fp32") == () and spec.gdn is None and spec.draft is None
    assert spec.tensors()["model.layers.1.self_attn.q_norm.weight"].values == "scale"
    assert spec.tensors()["model.layers.1.self_attn.q_proj"].shape == (128, 128)
    assert record_bytes(checkpoint_record(spec, 0, Dtypes("fp32", "fp32"))) == 128 * 4


def test_records_of_the_27b(spec):
    slot = {part.name: part for part in slot_record(spec, "bf16")}
    assert slot["state"].shape == (48, 48, 128, 128) and slot["conv"].shape == (48, 3, 10240)
    assert record_bytes(slot_record(spec, "bf16")) == 4 * STATE_27B + 2 * CONV_27B
    record = checkpoint_record(spec, 4, Dtypes("fp16", "bf16"))
    assert [part.name for part in record] == ["state", "conv", "window_k", "window_v", "hidden"]
    window = 4 * 64 * 32768 * 2  # four pages of K and V in 16 bit
    assert record_bytes(record) == 2 * STATE_27B + 2 * CONV_27B + window + 5120 * 2
    assert record_bytes(sink_record(spec)) == 64 * 32768 * 2
    assert record_bytes(page_record(spec, lambda width: width // 4 + 4)) == 64 * 8704  # 8.5 KiB a token


@pytest.mark.parametrize("name", [n for n, config in KNOWN.items() if config["model_type"] in ARCHITECTURES])
@pytest.mark.parametrize("ranks", [2, 4])
def test_what_ranks_hold_is_the_whole_cut_as_its_tensors_say(name, ranks):
    spec = spec_of(KNOWN[name])
    assert can_share(spec, ranks) == (spec.kv_heads % ranks == 0)
    if spec.kv_heads % ranks:
        return
    whole = spec.tensors(draft=True)
    for rank in range(ranks):
        part = of_rank(spec, rank, ranks).tensors(draft=True)
        assert {n: t.shard.shape(t.shape, rank, ranks) for n, t in whole.items()} == {
            n: t.shape for n, t in part.items()
        }
    for state, layers in spec.states.items():
        held = {s.name: (s.shape, n) for s, n in of_rank(spec, 0, ranks).states.items()}
        assert held[state.name] == (state.shard.shape(state.shape, 0, ranks), layers)


@pytest.mark.parametrize(
    ("shard", "ranks"), [(by_blocks(0, 640, unequal=True), 2), (by_rows(0, 1003), 4), (Shard(0, ((4, 2), (12, 2))), 4)]
)
def test_the_parts_of_all_ranks_are_the_whole_without_a_gap(shard, ranks):
    size = sum(units * width for units, width in shard.ranges)
    parts = sorted(part for rank in range(ranks) for part in shard.parts(rank, ranks))
    assert [end for _, end in parts[:-1]] == [begin for begin, _ in parts[1:]]
    assert (parts[0][0], parts[-1][1]) == (0, size)


def test_blocks_that_do_not_divide_are_shared_unequally_or_not_at_all():
    assert [list(by_blocks(0, 640, unequal=True).parts(rank, 2)) for rank in range(2)] == [[(0, 256)], [(256, 640)]]
    with pytest.raises(ValueError, match="evenly"):
        list(by_blocks(0, 640).parts(0, 2))
    assert not by_blocks(0, 100).divides(2) and by_blocks(0, 100).divides(1)


def test_cards_that_can_not_share_the_heads_are_refused(spec):
    assert [ranks for ranks in range(1, 9) if can_share(spec, ranks)] == [1, 2, 4]
    with pytest.raises(ValueError, match="3 ranks"):
        of_rank(spec, 0, 3)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "llama"}, "'llama' is not supported; kakera serves qwen3_5, qwen3_5_text, qwen3"),
        ({"num_experts": 256}, "num_experts is not known of qwen3_5_text"),
        ({"linear_gate_heads": 3}, "linear_gate_heads is not known"),
        ({"linear_num_key_heads": None}, "wrong type"),
        ({"hidden_size": 0}, "hidden_size is 0, which is no size"),
        ({"num_key_value_heads": 5}, "24 query heads can not share 5 KV heads"),
        ({"layer_types": ["linear_attention"]}, "1 entries for 64 layers"),
        ({"mtp_num_hidden_layers": 10**9}, "mtp_num_hidden_layers is 1000000000; the most that is understood is 4096"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"partial_rotary_factor": 5, "rope_parameters": {"rope_theta": 1e7}}, "channels turn"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan, which is no positive number"),
        ({"linear_num_value_heads": 17}, "17 value heads can not share"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(changes, words):
    with pytest.raises(CheckpointError, match=words):
        spec_of({**KNOWN["qwen3.8-27b"], **changes})


HOSTILE = ("x", "", "9" * 50, -1, 0, 0.5, 1e308, float("inf"), float("nan"), 10**9, 10**30, True, [], [1], [None], {})


@pytest.mark.slow
@pytest.mark.parametrize("model", sorted(KNOWN))
def test_whatever_a_key_holds_a_model_is_planned_or_refused_in_words_and_soon(model):
    """Sizes that are texts, fractions, infinite, or so large that a layer each would take all memory."""
    config, machine = KNOWN[model], resolve("h200")
    keys = {*config, "mtp_num_hidden_layers", "layer_types", "full_attention_interval", "head_dim", "rms_norm_eps"}
    keys |= {"rope_parameters", "rope_theta", "partial_rotary_factor", "linear_conv_kernel_dim", "text_config"}
    cases = [(key, value) for key in keys for value in HOSTILE]
    cases += [("rope_parameters", {"partial_rotary_factor": value}) for value in (5, -1, float("inf"), "x")]
    for key, value in cases:
        changed = {name: each for name, each in config.items() if (key, name) != ("num_hidden_layers", "layer_types")}
        changed[key] = value
        began = time.process_time()
        with contextlib.suppress(KakeraError):
            spec = spec_of(changed, planned=True)
            make_plan(spec, Wishes(), machine, from_config(spec, changed))
        assert time.process_time() - began < 5, (key, value)  # of CPU time; a second


def test_a_missing_key_is_named():
    config = {key: value for key, value in KNOWN["qwen3.8-27b"].items() if key != "linear_num_key_heads"}
    with pytest.raises(CheckpointError, match="lacks the key 'linear_num_key_heads'"):
        spec_of(config)


def test_names_of_the_multimodal_class_are_those_of_the_text_model(spec):
    assert spec.names.canonical("model.language_model.layers.0.mlp.up_proj") == "model.layers.0.mlp.up_proj"
    assert spec.names.canonical("language_model.lm_head.weight") == "lm_head.weight"
    counted = ["lm_head.weight", "mtp.fc.weight", "model.visual.patch_embed.proj.weight"]
    assert [spec.counts(name) for name in counted] == [True, False, False]
