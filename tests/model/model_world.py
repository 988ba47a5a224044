"""Tiny random models, saved as transformers saves them, and a driver that feeds ours in chunks or token by token."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kakera.arch.layout import Dtypes, checkpoint_record
from kakera.arch.spec import ModelSpec
from kakera.contract.grid import PAGE
from kakera.contract.step import Segment
from kakera.kv.batch import Batch, CheckpointTensors, Save, Span
from kakera.kv.cache import KVCache
from kakera.model.qwen3_5 import HybridModel
from kakera.model.state import StatePool
from kakera.plan.kv_format import KvFormat
from kakera.run.step.runner import positions_of
from kakera.target.as_torch import DTYPES, activation_of

SLOTS, PAGES_PER_SLOT = 4, 5
VOCAB = 211


@dataclass
class Harness:
    """A model with a cache of SLOTS sequences; slot s owns pages 5 s .. 5 s + 4, in reverse order."""

    model: HybridModel
    kv: KVCache = field(init=False)
    states: StatePool = field(init=False)

    def __post_init__(self) -> None:
        self.kv = KVCache(self.spec, KvFormat("fp32"), SLOTS * PAGES_PER_SLOT, SLOTS)
        self.states = StatePool(self.spec, SLOTS)

    @property
    def spec(self) -> ModelSpec:
        return self.model.spec

    def pages(self, slot: int) -> list[int]:
        return [slot * PAGES_PER_SLOT + i for i in reversed(range(PAGES_PER_SLOT))]

    def run(self, *rows: Row) -> list[Tensor]:
        """One forward pass; the logits [N, vocabulary] of all tokens of each row."""
        spans, offset = [], 0
        for row in rows:
            pages = torch.tensor(self.pages(row.slot))
            saves = tuple(Save(into) for into in row.saves)
            spans.append(Span(offset, len(row.tokens), row.start, row.slot, pages, saves))
            offset += len(row.tokens)
        decode = sum(row.decode for row in rows)
        batch = Batch(
            tokens_T=torch.cat([row.tokens for row in rows]),
            positions_T=positions_of([row.segment for row in rows]),
            decode=tuple(spans[:decode]),
            prefill=tuple(spans[decode:]),
            logit_rows=torch.arange(offset),
            images=tuple(
                (s.offset + at, embeds) for s, row in zip(spans, rows, strict=True) for at, embeds in row.images
            ),
        )
        logits = self.model.forward(batch, self.kv.backend, self.states)
        return [logits[span.rows] for span in spans]

    def prefill(self, tokens: Tensor, cuts: list[int], slot: int = 0, start: int = 0) -> Tensor:
        """Logits of tokens start .. end, computed in chunks that end at `cuts` and at the end."""
        if start == 0:
            self.states.reset(slot)
        ends = [cut for cut in cuts if start < cut < len(tokens)] + [len(tokens)]
        begins = [start, *ends[:-1]]
        return torch.cat([self.run(Row(tokens[a:b], a, slot))[0] for a, b in zip(begins, ends, strict=True)])

    def checkpoint(self, position: int, dtype: torch.dtype = torch.float32) -> CheckpointTensors:
        record = checkpoint_record(self.spec, 0, Dtypes(activation_of(dtype), "fp32"))
        return CheckpointTensors(position, {p.name: torch.zeros(p.shape, dtype=DTYPES[p.dtype]) for p in record})

    def cached(self, slot: int, tokens: int) -> Tensor:
        """Keys and values of a slot's full pages before `tokens`."""
        return torch.stack([page.clone() for page in self.kv.store.read_pages(self.pages(slot)[: tokens // PAGE])])

    def state(self, slot: int) -> tuple[Tensor, Tensor]:
        return self.states.state_LSVKD[:, slot].clone(), self.states.conv_LSWC[:, slot].clone()


@dataclass
class Row:
    tokens: Tensor
    start: int
    slot: int = 0
    decode: bool = False
    saves: tuple[CheckpointTensors, ...] = ()
    positions: tuple[tuple[int, ...], ...] = ()  # as of a Segment
    images: tuple[tuple[int, Tensor], ...] = ()  # embeddings, and the row's token that they begin with

    @property
    def segment(self) -> Segment:
        return Segment("", self.slot, tuple(self.tokens.tolist()), self.start, positions=self.positions)


def hybrid_config(heads: int, kv_heads: int, **changes: Any) -> dict[str, Any]:
    """Four layers, two of each kind; sizes that are no powers of two where the architecture allows it."""
    return {
        "vocab_size": VOCAB,
        "hidden_size": 96,
        "intermediate_size": 112,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 32,
        "linear_num_key_heads": 3,
        "linear_num_value_heads": 9,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 1024,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
        "tie_word_embeddings": False,
        **changes,
    }


def moe_config(experts: int, top: int, **changes: Any) -> dict[str, Any]:
    """The same with routed experts in place of the MLP; widths are multiples of 32, so that bits can be compared."""
    dense = {key: value for key, value in hybrid_config(6, 2).items() if key != "intermediate_size"}
    routed = {"num_experts": experts, "num_experts_per_tok": top, "moe_intermediate_size": 32}
    return {**dense, **routed, "shared_expert_intermediate_size": 64, **changes}


def save_model(directory: Path, kind: str, config: dict[str, Any], prefix: str = "") -> Any:
    """A random transformers model, saved to `directory`."""
    import transformers as t
    from safetensors.torch import load_file, save_file

    makers = {
        "qwen3": (t.Qwen3ForCausalLM, t.Qwen3Config),
        "qwen3_5_text": (t.Qwen3_5ForCausalLM, t.Qwen3_5TextConfig),
        "qwen3_5_moe_text": (t.Qwen3_5MoeForCausalLM, t.Qwen3_5MoeTextConfig),
    }
    made, configured = makers[kind]
    torch.manual_seed(1)
    model = save_random(directory, made(configured(**config)))
    if prefix:
        path = directory / "model.safetensors"
        tensors = {name.replace("model.", prefix, 1): tensor for name, tensor in load_file(path).items()}
        save_file(tensors, path)
    return model


def save_random(directory: Path, model: Any) -> Any:
    """A transformers model with random weights, saved to `directory`; every norm scale, decay and bias is drawn too.

    Fresh norms hide a doubled (1 + w). Larger weights would test less: at twice these, transformers' own chunk and
    recurrent forms differ by 2e-4 in the logits. Weights are fp16 numbers, as a CPU holds them, so that what differs is
    arithmetic; `test_linear` tests the rounding.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(
                    std=0.5 if "conv1d" in name else 1.0 if "embed" in name else 0.6 * parameter.shape[-1] ** -0.5
                )
                if name.endswith("mlp.gate.weight"):
                    parameter.mul_(5)  # a router whose margins are real
                parameter.copy_(parameter.half())
            elif "norm" in name or "bias" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model.float().eval().save_pretrained(directory)
    return model
