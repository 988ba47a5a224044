"""A coded checkpoint on a GPU, its weights staying coded, gives the logits of the decoded one. Needs a GPU."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from formats_world import mixed, write_coded, write_source
from safetensors.torch import load_file, save_file
from torch import Tensor

import kakera
from kakera.kv.batch import Batch, Span
from kakera.kv.cache import KVCache
from kakera.model import reader
from kakera.model.coded import CodedProjection
from kakera.model.qwen3_5 import HybridModel
from kakera.model.state import StatePool
from kakera.ops.host_rows import HostRows
from kakera.plan.kv_format import KvFormat

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
MINI = Path(kakera.__file__).parent / "data" / "mini"
PROMPT, STEPS = 150, 4  # the prompt goes through W_eff, each later token through the codes


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = tmp_path_factory.mktemp("coded")
    source = write_source(made / "source")
    for name in ("escha", "exl3"):
        write_coded(source, made / name, name)
    shutil.copytree(made / "exl3", made / "mixed")
    save_file(mixed(load_file(made / "exl3" / "model.safetensors")), made / "mixed" / "model.safetensors")
    return {"mini": MINI} | {name: made / name for name in ("escha", "exl3", "mixed")}


def logits(directory: Path, **options: bool) -> tuple[HybridModel, Tensor]:
    cuda = torch.device("cuda", 0)
    model = HybridModel.load(directory, torch.float16, cuda, **options)
    kv = KVCache(model.spec, KvFormat("bf16"), 4, 1, None, cuda)
    states = StatePool(model.spec, 1, cuda, torch.float16)
    tokens_T = torch.randint(0, model.spec.vocab, (PROMPT + STEPS,), generator=torch.Generator().manual_seed(1)).cuda()
    found = []
    for begin, end in [(0, PROMPT), *((PROMPT + i, PROMPT + i + 1) for i in range(STEPS))]:
        span = Span(0, end - begin, begin, 0, torch.arange(-(-end // 64), device=cuda))
        spans = ((), (span,)) if begin == 0 else ((span,), ())
        rows = torch.arange(end - begin, device=cuda)
        found.append(model.forward(Batch(tokens_T[begin:end], rows + begin, *spans, rows), kv.backend, states))
    return model, torch.cat(found)


@pytest.mark.parametrize(
    ("name", "options"), [("escha", {}), ("escha", {"escha_bias": True}), ("exl3", {}), ("mixed", {}), ("mini", {})]
)
def test_logits_of_coded_and_decoded_weights_agree(directories, name, options, monkeypatch):
    model, coded = logits(directories[name], **options)
    assert isinstance(model.weights.layers[0][1].block.gate_up, CodedProjection)
    attention = model.weights.layers[-1][
        0
    ].block.proj_in  # query and gate are told apart in whole blocks of 128, or not
    assert isinstance(attention, CodedProjection) == (model.spec.head_dim % 128 == 0)
    monkeypatch.setattr(reader, "keeps_codes", lambda *_: False)
    _, decoded = logits(directories[name], **options)
    assert ((coded - decoded).norm() / decoded.norm()).item() < 1e-2
    assert (coded.argmax(-1) == decoded.argmax(-1)).float().mean().item() > 0.95


@pytest.mark.parametrize("name", ["escha", "exl3", "mini"])
def test_an_embedding_on_the_host_changes_no_bit(directories, name):
    _, device = logits(directories[name])
    model, host = logits(directories[name], embedding_on_host=True)
    assert isinstance(model.weights.embedding, HostRows) and model.weights.embedding.device.type == "cuda"
    assert torch.equal(device, host)
