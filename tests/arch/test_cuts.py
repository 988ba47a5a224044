"""Cuts of random models: every value is some rank's, heads stay with what they read, and bytes add up."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kakera.arch.blocks import SwiGlu
from kakera.arch.parts import LEAVES, leaf_cut, leaf_shard, of_first
from kakera.arch.registry import spec_of
from kakera.arch.shard import can_share, of_rank, vocabulary
from kakera.arch.spec import LM_HEAD, ModelSpec
from kakera.arch.tensors import WHOLE, Cut, Shard, Tensor
from kakera.plan.weights import from_config
from random_model import ESCHA

FORMATS = ({}, {"quant_method": "escha"}, {"quant_method": "exl3", "bits": 3})
RUNS = st.lists(st.integers(0, 6), min_size=2, max_size=2, unique=True)


@st.composite
def configs(draw) -> dict[str, Any]:
    kv_heads, key_heads = draw(st.sampled_from([1, 2, 3, 4, 8])), draw(st.sampled_from([1, 2, 4, 6, 16]))
    return {
        **ESCHA,
        "vocab_size": draw(st.one_of(st.integers(8, 5000), st.integers(1, 40).map(lambda runs: 128 * runs))),
        "intermediate_size": draw(st.one_of(st.integers(1, 12).map(lambda runs: 128 * runs), st.just(200))),
        "num_attention_heads": kv_heads * draw(st.integers(1, 6)),
        "num_key_value_heads": kv_heads,
        "head_dim": draw(st.sampled_from([64, 128, 256])),
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * draw(st.integers(1, 4)),
        "linear_key_head_dim": draw(st.sampled_from([32, 128])),
        "linear_value_head_dim": draw(st.sampled_from([32, 128])),
        "mtp_num_hidden_layers": draw(st.integers(0, 1)),
        "tie_word_embeddings": draw(st.booleans()),
        "quantization_config": draw(
            st.sampled_from([{}, {"quant_method": "escha"}, {"quant_method": "exl3", "bits": 3}])
        ),
    }


def channels(cut: Cut | None, size: int) -> list[int]:
    return list(range(size)) if cut is None else [i for part in cut.ranges for i in range(*part)]


@pytest.mark.slow
@settings(max_examples=150)
@given(configs(), st.sampled_from([2, 3, 4, 8]))
def test_every_value_is_some_ranks_and_shapes_are_those_of_the_share(config, ranks):
    spec = spec_of(config)
    if not can_share(spec, ranks):
        with pytest.raises(ValueError, match=f"{ranks} ranks"):
            of_rank(spec, 0, ranks)
        return
    shares = [of_rank(spec, rank, ranks) for rank in range(ranks)]
    held = [share.tensors(draft=True) for share in shares]
    for name, tensor in spec.tensors(draft=True).items():
        cuts = [tensor.shard.cut(rank, ranks) for rank in range(ranks)]
        assert [own[name].shape for own in held] == [
            tensor.shape if cut is None else cut.shape(tensor.shape) for cut in cuts
        ]
        if tensor.shard.axis is None:
            continue
        found = [i for cut in cuts for i in channels(cut, 0)]
        assert sorted(found) == list(range(tensor.shape[tensor.shard.axis])), name
    for state in spec.states:
        own = [next(s for s in share.states if s.name == state.name) for share in shares]
        assert [s.shape for s in own] == [state.shard.shape(state.shape, rank, ranks) for rank in range(ranks)]
    rows = [len(ids) for ids in vocabulary(spec, ranks)]
    assert rows == [own[LM_HEAD].shape[0] for own in held] and max(rows) - min(rows) <= 128
    _heads_stay_together(spec, ranks)
    _bytes_add_up(spec, config, ranks)


def _heads_stay_together(spec: ModelSpec, ranks: int) -> None:
    """Query heads with the KV head that they read, value heads with their key head: counted as kernels count them."""
    attention, gdn = spec.attention, spec.gdn
    assert gdn is not None
    cuts = {t.name: t.shard for layer in spec.layers for t in spec.of_layer(layer)}
    full, mixer = spec.layers[spec.full_layers[0]].name, spec.layers[spec.gdn_layers[0]].name
    for rank in range(ranks):
        width = attention.head_dim

        def heads(name: str, of: int, start: int = 0, within: str = full, rank: int = rank) -> list[int]:
            """Which heads of `of` channels a rank has, from a channel of the tensor on."""
            found = [i - start for i in channels(cuts[f"{within}.{name}"].cut(rank, ranks), 0) if i >= start]
            return list(dict.fromkeys(i // of for i in found))

        keys, queries = heads("self_attn.k_proj", width), heads("self_attn.q_proj", 2 * width)
        assert keys == heads("self_attn.v_proj", width) and queries == heads("self_attn.o_proj", width)
        assert [keys[i // attention.group] for i in range(len(queries))] == [q // attention.group for q in queries]
        values_at, ratio = 2 * gdn.k_heads * gdn.k_dim, gdn.v_heads // gdn.k_heads
        qkv = f"{mixer}.linear_attn.in_proj_qkv"
        q, k, v = (cuts[qkv].cut(rank, ranks).ranges[i] for i in range(3))
        own_keys = [i // gdn.k_dim for i in range(*q)][:: gdn.k_dim]
        assert own_keys == [(i - gdn.k_heads * gdn.k_dim) // gdn.k_dim for i in range(*k)][:: gdn.k_dim]
        own_values = [(i - values_at) // gdn.v_dim for i in range(*v)][:: gdn.v_dim]
        assert [own_keys[i // ratio] for i in range(len(own_values))] == [value // ratio for value in own_values]
        for name, of in (("in_proj_z", gdn.v_dim), ("out_proj", gdn.v_dim), ("in_proj_a", 1), ("A_log", 1)):
            assert heads(f"linear_attn.{name}", of, within=mixer) == own_values
        assert cuts[f"{mixer}.linear_attn.conv1d.weight"] == cuts[qkv]


def _bytes_add_up(spec: ModelSpec, config: dict[str, Any], ranks: int) -> None:
    weights = from_config(spec, config)
    held = [weights.of_rank(rank, ranks) for rank in range(ranks)]
    assert abs(sum(held) - weights.coded - (ranks - 1) * weights.replicated) <= 2 * ranks  # rates are no whole bytes
    assert weights.of_rank(0, 1) == weights.coded
    apart = weights.without_embedding()
    assert abs(sum(apart.of_rank(rank, ranks) for rank in range(ranks)) - sum(held) + weights.embedding) <= 2 * ranks


@given(
    st.sampled_from(sorted(LEAVES)), st.integers(0, 1), st.lists(st.integers(0, 6), min_size=2, max_size=2, unique=True)
)
def test_what_is_read_of_a_leaf_is_what_is_counted(leaf, axis, edges):
    """Of a weight of 6 runs of 128 channels on both sides."""
    known, size = LEAVES[leaf], 6 * 128
    cut = Cut(axis, ((128 * min(edges), 128 * max(edges)),))
    shape = tuple(size // known.step for _ in known.axes)
    found, linear = leaf_cut(cut, leaf), Tensor("x", (size, size), "linear", Shard(axis, ((6, 128),)))
    stack = Tensor("x", (3, size, size), "stack", Shard(axis + 1, ((6, 128),)))
    assert (found is None) == (leaf_shard(linear, leaf) == WHOLE) == (leaf_shard(stack, leaf) == WHOLE)
    if found is not None:
        assert found.shape(shape)[found.axis] * size == shape[found.axis] * 128 * (max(edges) - min(edges))
    assert of_first(axis, leaf) == (leaf == "bias" and axis == 1)


@dataclass(frozen=True)
class Whole(SwiGlu):
    """A feed-forward block that nobody cuts."""

    def tensors(self, hidden: int) -> tuple[Tensor, ...]:
        return tuple(replace(tensor, shard=WHOLE) for tensor in super().tensors(hidden))


def test_a_block_that_every_rank_has_whole_is_not_added_up():
    """Each rank would add all of what it gives."""
    spec = spec_of({**ESCHA, "num_attention_heads": 4, "num_key_value_heads": 2})
    first, *others = spec.layers
    whole = replace(first, sites=(first.sites[0], replace(first.sites[1], block=Whole(256))))
    assert can_share(spec, 2) and not can_share(replace(spec, layers=(whole, *others)), 2)
    assert can_share(replace(spec, layers=(whole, *others)), 1)
