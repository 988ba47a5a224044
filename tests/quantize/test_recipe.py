"""Rates per kind of linear from one number."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kakera.arch.registry import spec_of
from kakera.errors import UsageError
from kakera.quantize.recipe import Recipe, kinds_of

QWEN_27B = spec_of(
    {
        "model_type": "qwen3_5_text",
        "vocab_size": 248320,
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "max_position_embeddings": 262144,
        "rope_theta": 1e7,
        "mtp_num_hidden_layers": 1,
    }
)


def test_coded_weights_of_the_27b_are_those_of_the_published_file():
    assert sum(QWEN_27B.kinds.values()) == 24_326_963_200


@settings(max_examples=60)
@given(st.floats(2, 2.75), st.sampled_from(["exl3", "escha"]))
def test_the_mean_rate_is_close_below_what_was_asked_for(bits, format):
    recipe = Recipe.for_bits(format, bits, QWEN_27B)
    assert bits - 0.07 < recipe.mean_bits(QWEN_27B) <= bits + 1e-9


@settings(max_examples=60)
@given(st.floats(1, 8))
def test_exl3_rates_differ_by_at_most_one_bit_between_kinds(bits):
    recipe = Recipe.for_bits("exl3", bits, QWEN_27B)
    layers = [recipe.bits[kind.name] for kind in QWEN_27B.kinds]
    assert max(layers) - min(layers) <= 1
    assert recipe.mean_bits(QWEN_27B) <= bits + 1e-9


def test_whole_rates_promote_nothing_and_overrides_hold():
    assert set(Recipe.for_bits("escha", 2, QWEN_27B).bits.values()) == {2, 3}  # 3: the draft layer
    recipe = Recipe.for_bits("exl3", 2.5, QWEN_27B, head_bits=4, overrides={"mlp.gate": 4, "mtp": 5})
    assert (recipe.bits["head"], recipe.bits["mlp.gate"], recipe.bits["mtp"]) == (4, 4, 5)


def test_the_digest_follows_what_changes_the_bytes():
    one = Recipe.for_bits("exl3", 2.5, QWEN_27B)
    assert one.digest() == Recipe("exl3", dict(reversed(one.bits.items()))).digest()
    assert one.digest() != Recipe.for_bits("exl3", 2.5, QWEN_27B, seed=1).digest()
    assert one.digest() != Recipe.for_bits("exl3", 2.5, QWEN_27B, head_bits=4).digest()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("escha", 4, QWEN_27B), "escha has 2 to 3"),
        (("exl3", 9, QWEN_27B), "exl3 has 1 to 8"),
        (("gguf", 2, QWEN_27B), "not known"),
    ],
)
def test_rates_that_a_format_does_not_have_are_refused(arguments, words):
    with pytest.raises(UsageError, match=words):
        Recipe.for_bits(*arguments)


def test_other_refusals_say_why():
    with pytest.raises(UsageError, match="head as int8"):
        Recipe.for_bits("escha", 2, QWEN_27B, head_bits=3)
    with pytest.raises(UsageError, match=r"unknown kinds.*mlp\.gait"):
        Recipe.for_bits("exl3", 2, QWEN_27B, overrides={"mlp.gait": 2})


@pytest.mark.parametrize(
    ("module", "kind"),
    [
        ("model.layers.3.self_attn.q_proj", "attention.q"),
        ("model.layers.0.linear_attn.in_proj_qkv", "gdn.qkv"),
        ("model.layers.0.linear_attn.in_proj_a", None),
        ("model.layers.0.input_layernorm", None),
        ("mtp.layers.0.mlp.up_proj", "mtp"),
        ("mtp.fc", "mtp"),
        ("mtp.norm", None),
        ("lm_head", "head"),
        ("model.embed_tokens", None),
    ],
)
def test_kinds_of_modules(module, kind):
    assert kinds_of(QWEN_27B).get(module) == kind
