"""Qwen3.8-Flash-Next: its declaration against the public config, the headers of a published build and sums by hand."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

import flash_next
from kakera.arch.layout import Dtypes, checkpoint_record, page_record, record_bytes, sink_record, slot_record
from kakera.arch.moe import Moe
from kakera.arch.ngram import NgramInput, head_offsets, head_rows
from kakera.arch.registry import load_spec, spec_of
from kakera.arch.shard import can_share, of_rank
from kakera.arch.spec import ModelSpec
from kakera.arch.stored import TensorHeader, stored_headers
from kakera.arch.tensors import Tensor
from kakera.arch.weigh import Quantization, by_tensor, format_of
from kakera.errors import CheckpointError, UsageError


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return spec_of(flash_next.CONFIG, planned=True)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A directory with four layers of the 2.05-bit build, of which only headers take room."""
    directory = tmp_path_factory.mktemp("flash-next")
    flash_next.write_headers(directory)
    return directory


def part_of(name: str) -> str:
    """The group of bytes that a tensor is counted in."""
    for mark, part in (
        ("mtp.", "draft"),
        ("hyper_connection", "hyper-connections"),
        ("ngram_embedding", "table"),
        (".ple.", "n-gram input"),
        (".experts.", "experts"),
        (".shared_expert.", "shared"),
        (".mlp.", "routers"),
        (".linear_attn.", "GDN"),
        (".self_attn.", "attention"),
        ("lm_head", "head"),
        ("embed_tokens", "embedding"),
    ):
        if mark in name:
            return part
    raise AssertionError(name)


def test_layers_are_lists_of_blocks_and_one_has_a_side_input(spec):
    kinds = [[(site.block.kind, site.read) for site in layer.sites] for layer in spec.layers[:4]]
    gdn = [("gdn", "attn_hyper_connection"), ("moe", "mlp_hyper_connection")]
    assert kinds == [gdn, [("ngram_input", ""), *gdn], gdn, [("full", "attn_hyper_connection"), gdn[1]]]
    assert spec.full_layers == tuple(range(3, 48, 4)) and len(spec.gdn_layers) == 36
    assert spec.with_block("ngram_input") == (1,)  # layer 2 of a config that counts from 1


def test_what_stands_in_no_config_or_means_something_else_here(spec):
    assert spec.gdn is not None and spec.gdn.activation == "sigmoid"
    assert (spec.residual.kind, spec.residual.streams) == ("hyper_connections", 4)
    assert spec.draft is not None and (spec.draft.takes, spec.draft.width) == ("stream", 10240)
    assert (spec.heads, spec.kv_heads, spec.group, spec.rotary_dim, spec.gated) == (24, 2, 12, 64, True)
    index = spec.attention.selector
    assert index is not None and (index.kind, index.alive) == ("block_index", 640 + 512)
    assert "model.norm.weight" not in spec.tensors() and "model.hyper_connection_mixer.hc_norm.weight" in spec.tensors()
    assert not spec.counts("model.visual.patch_embed.proj.weight")
    with pytest.raises(UsageError, match=r"kakera can plan Qwen3.8-Flash-Next \(qwen4_exp\) and not serve it yet: "):
        spec_of(flash_next.CONFIG)


def test_numbers_of_the_hash_are_those_that_checkpoints_store(spec):
    (side,) = [block for block in spec.distinct if isinstance(block, NgramInput)]
    assert side.multipliers == (23_703_573_157_769, 20_109_073_645_365, 8_052_911_324_071)  # seed 1234, not stated
    assert side.heads[:3] == (20_000_003, 20_000_023, 20_000_033) and side.heads[-1] == 20_000_171
    assert head_offsets(side.heads)[-2:] == (280_001_114, 300_001_275)
    assert (sum(side.heads), side.rows, side.rows // 128) == (320_001_446, 320_001_536, 2_500_012)
    assert (side.eos, side.tokens) == (248044, 3)
    (table,) = [t for t in spec.tensors().values() if t.derived]
    assert [name for name, _ in table.derived] == ["head_offsets", "head_vocab_sizes", "layer_multipliers"]
    assert (table.role, table.places, table.active) == ("table", ("host", "file"), 16)


def test_a_second_table_hashes_by_other_primes_and_multipliers():
    first, second = (block for _, block in _sides(flash_next.with_text(ple_layer_ids=[5, 2], seed=None)))
    assert second.heads == head_rows(20_000_000, 16, 1) and second.heads[0] > first.heads[-1]
    assert set(first.multipliers).isdisjoint(second.multipliers)


def _sides(config):
    layers = enumerate(spec_of(config, planned=True).layers)
    return [(i, b) for i, layer in layers for b in layer.blocks if isinstance(b, NgramInput)]


VALUES = {
    "experts": 120.80e9,
    "GDN": 2.09e9,
    "attention": 0.62e9,
    "shared": 0.24e9,
    "head": 0.64e9,
    "hyper-connections": 0.634e9,
    "routers": 0.063e9,
    "n-gram input": 0.033e9,
    "embedding": 0.64e9,
    "table": 51.20e9,
    "draft": 2.61e9,
}
BYTES = {
    "experts": 30.67e9,
    "GDN": 1.04e9,
    "attention": 0.31e9,
    "shared": 0.12e9,
    "head": 0.32e9,
    "hyper-connections": 1.27e9,
    "routers": 0.126e9,  # 0.13 in two digits
    "n-gram input": 0.0657e9,  # 0.07 in two digits
    "embedding": 1.27e9,
    "table": 26.2e9,
}
DRAFT_BYTES = 0.714e9  # its two fc are coded, at 3 bits


def test_values_of_every_part(spec):
    found: Counter[str] = Counter()
    for name, tensor in spec.tensors(draft=True).items():
        found[part_of(name)] += tensor.count
    assert found == pytest.approx(VALUES, rel=0.02)
    assert sum(n for part, n in found.items() if part not in ("draft", "table")) == pytest.approx(125.7e9, rel=0.001)


def test_bytes_of_the_2_bit_build_from_its_config_alone(spec):
    quantization = Quantization.of(spec, flash_next.BUILD)
    found: Counter[str] = Counter()
    for name, tensor in spec.tensors(draft=True).items():
        found[part_of(name)] += int(quantization.bytes(tensor))
    assert found == pytest.approx({**BYTES, "draft": DRAFT_BYTES}, rel=0.03)
    assert found["experts"] == 48 * 512 * 1_248_000  # 2 bits a value and two vectors for each of three matrices
    assert found["table"] == 320_001_536 * 2 * 41


def test_headers_of_the_2_bit_build_hold_what_its_config_promises(written):
    spec = load_spec(written, planned=True)
    tensors = spec.tensors(draft=True)
    stored = by_tensor(spec, stored_headers(written, spec.names.beside))
    assert set(tensors) - set(stored) == set()
    assert {name for name in stored if name not in tensors} == {"model.visual.patch_embed.proj.weight"}
    quantization = Quantization.of(spec, flash_next.of_layers(4))
    for name, tensor in tensors.items():
        held = sum(header.bytes for header in stored[name])
        assert held == pytest.approx(int(quantization.bytes(tensor)), rel=0.002), (
            name
        )  # flags of codebooks, a head's vectors
    forms = {part_of(name): format_of(stored[name]) for name, tensor in tensors.items() if tensor.role != "small"}
    assert {part for part, form in forms.items() if form == "plain"} >= {"routers", "n-gram input", "embedding"}
    assert forms["experts"] == forms["table"] == forms["attention"] == "exl3"


def test_a_table_in_128_plain_pieces_and_stacked_experts_are_found_too(spec):
    names = [
        "model.language_model.layers.1.ple.ple_embedding.ngram_embedding.shard_127.weight",
        "model.language_model.layers.47.mlp.experts.down_proj",
        "mtp.layers.0.mlp.experts.511.up_proj.svh",
    ]
    headers = [_header(name) for name in names]
    assert list(by_tensor(spec, headers)) == [
        "model.layers.1.ple.ple_embedding.ngram_embedding",
        "model.layers.47.mlp.experts.down_proj",
        "mtp.layers.0.mlp.experts.gate_up_proj",
    ]


def _header(name):
    return TensorHeader(name, Path("x"), "F16", (1,), 0, 2)


@pytest.mark.parametrize(
    ("stated", "bits"),
    [
        ({"bits": 4.05, "head_bits": 6, "mtp_bits": 4}, {"experts": 4, "index": 4, "gdn.z": 6, "head": 6, "fc": 5}),
        ({"bits": 2.05, "head_bits": 4, "mtp_bits": 2}, {"experts": 2, "index": 2, "gdn.z": 4, "head": 4, "fc": 3}),
        ({"bits": 3.0}, {"experts": 3, "index": 3, "gdn.z": 3, "head": 6, "fc": 3}),
    ],
)
def test_rates_of_published_mixes_follow_from_their_mean(spec, stated, bits):
    quantization = Quantization.of(
        spec, {"quantization_config": {"quant_method": "exl3", "codebook": "mul1", **stated}}
    )
    tensors = spec.tensors(draft=True)
    names = {
        "experts": "model.layers.0.mlp.experts.gate_up_proj",
        "index": "model.layers.3.self_attn.indexer.index_qk_proj",
        "gdn.z": "model.layers.0.linear_attn.in_proj_z",
        "head": "lm_head",
        "fc": "mtp.fc_hidden",
    }
    assert {part: quantization.bits(tensors[name]) for part, name in names.items()} == bits


def test_what_a_token_reads(spec):
    """Of one row at the rates of the 2.05-bit build."""
    quantization = Quantization.of(spec, flash_next.BUILD)
    read: Counter[str] = Counter()
    for name, tensor in spec.tensors().items():
        read[part_of(name)] += float(quantization.bytes(tensor) * tensor.share)
    assert read["experts"] == pytest.approx(599e6, rel=0.001)
    assert read["table"] == 16 * 82 and read["embedding"] == 5120
    dense = sum(read.values()) - read["experts"]
    assert dense == pytest.approx(3.3e9, rel=0.03)  # all but experts and embedding, which are not read as a whole
    assert read["hyper-connections"] / dense == pytest.approx(0.39, abs=0.01)
    assert sum(read.values()) == pytest.approx(3.9e9, rel=0.02)
    assert sum(_active(t) for n, t in spec.tensors().items() if part_of(n) != "table") == pytest.approx(6.7e9, rel=0.01)


def _active(tensor: Tensor) -> float:
    return float(tensor.count * tensor.share)


def test_records_of_a_sequence(spec):
    slot = {part.name: part for part in slot_record(spec, "bf16")}
    assert slot["state"].bytes == pytest.approx(113.2e6, rel=0.001) and slot["conv"].bytes == 36 * 3 * 10240 * 2
    assert (slot["ple_conv"].shape, slot["ple_conv"].bytes) == ((1, 9, 10240), 184_320)
    assert slot["index_raw"].shape == (12, 8, 128)
    assert record_bytes(sink_record(spec)) * 7 == pytest.approx(11.0e6, rel=0.01)  # a ring of six pages, and the sink


def test_a_page_holds_keys_of_blocks_beside_keys_and_values(spec):
    page = {part.name: part for part in page_record(spec, lambda width: width // 4 + 4)}
    assert page["index"].shape == (12, 16, 128) and page["index"].bytes == 64 * 768
    assert page["k"].bytes + page["v"].bytes == 64 * 3264
    assert sum(part.bytes for part in page.values()) == 258_048
    assert 262_144 // 64 * record_bytes(tuple(page.values())) == pytest.approx(1.06e9, rel=0.005)
    dense = page_record(spec, lambda width: 2 * width)
    assert record_bytes(dense) == 64 * (24_576 + 768)


def test_a_checkpoint_carries_the_streams_and_no_raw_keys(spec):
    record = {part.name: part for part in checkpoint_record(spec, 4, Dtypes("fp16", "bf16"))}
    assert list(record) == ["state", "conv", "ple_conv", "window_k", "window_v", "hidden"]
    assert record["state"].bytes == pytest.approx(56.6e6, rel=0.001)
    assert record["hidden"].shape == (10240,) and record["ple_conv"].bytes == 184_320


def test_two_ranks_share_five_blocks_of_an_expert_unequally(spec):
    assert [n for n in range(1, 6) if can_share(spec, n)] == [1, 2]
    parts = [of_rank(spec, rank, 2) for rank in range(2)]
    assert [block.width for part in parts for block in part.distinct if isinstance(block, Moe)] == [256, 384]
    whole = spec.tensors(draft=True)
    for rank, part in enumerate(parts):
        assert {n: t.shard.shape(t.shape, rank, 2) for n, t in whole.items()} == {
            n: t.shape for n, t in part.tensors(draft=True).items()
        }
    kept = {part_of(n) for n, t in whole.items() if t.shard.axis is None and t.role == "linear"}
    assert kept == {"hyper-connections", "routers", "n-gram input", "attention", "draft"}  # the indexer's, of attention
    experts = whole["model.layers.0.mlp.experts.gate_up_proj"]
    assert list(experts.shard.parts(1, 2)) == [(256, 640), (896, 1280)] and float(experts.shard.largest(2)) == 0.6


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (flash_next.with_text(hc_scale=2), "hc_scale is not known of qwen4_exp_text"),
        (flash_next.with_text(indexer_window=128), "indexer_window is not known"),
        (flash_next.with_text(ple_gate="tanh"), "ple_gate is not known"),
        (flash_next.with_text(ngram_hash="murmur"), "ngram_hash is not known"),
        (flash_next.with_text(mlp_only_layers=[0]), "mlp_only_layers is not known"),
        (flash_next.with_text(norm_topk_prob=False), "norm_topk_prob is false"),
        (flash_next.with_text(indexer_kv_heads=2), "indexer_kv_heads is 2"),
        (flash_next.with_text(indexer_budget=2046), "must divide indexer_budget 2046"),
        (flash_next.with_text(output_gate_type="relu"), "output_gate_type 'relu'"),
        (flash_next.with_text(ple_layer_ids=[49]), "there is no layer 49 of 48"),
        (flash_next.with_text(ple_layer_ids=[0]), "there is no layer 0 of 48"),
        (flash_next.with_text(num_experts_per_tok=513), "513 of 512 experts"),
        (flash_next.with_text(layer_types=["full_attention"]), "1 entries for 48 layers"),
        (flash_next.with_text(mtp_use_dedicated_embeddings=True), "mtp_use_dedicated_embeddings"),
        (flash_next.with_text(eos_token_id=None), "eos_token_id is None; n-grams begin anew"),
        (flash_next.with_text(ple_embed_dim=2568), "2568 must divide by 16 n-gram heads"),
        (flash_next.with_text(indexer_head_dim=32), "indexer_head_dim 32 is less than the 64"),
        (flash_next.without("hc_count"), "lacks the key 'hc_count'"),
        (flash_next.without("indexer_compress_ratio"), "lacks the key 'indexer_compress_ratio'"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(config, words):
    with pytest.raises(CheckpointError, match=words):
        spec_of(config, planned=True)


def test_a_directory_is_refused_where_it_would_be_served(written):
    assert load_spec(written, planned=True).layers
    with pytest.raises(UsageError, match="not serve it yet"):
        load_spec(written)
