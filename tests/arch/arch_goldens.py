"""What is folded over a declaration, as digests: plans, random weights, quantised files, checkpoints' shapes.

`PYTHONPATH=tests python tests/arch/arch_goldens.py` writes them anew; do that only when bytes are meant to change.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from kakera.errors import PlanRefused, UsageError
from kakera.plan.budget import make_plan
from kakera.plan.plan import Wishes
from kakera.quantize.convert import quantize_checkpoint
from kakera.quantize.recipe import Recipe
from kakera.target.devices import Device, Machine
from kakera.target.target import CPU, CUDA
from kakera.weights import trellis
from kakera.weights.files import read_header
from random_model import ESCHA

FILE = Path(__file__).with_name("goldens.json")
GB = 10**9


def _cards(*sizes: float) -> Machine:
    return Machine(CUDA, tuple(Device(f"{size}GB", int(size * GB)) for size in sizes), 32 * len(sizes) * GB, 2 * GB)


MACHINES = {
    "cpu": Machine(CPU, (Device("cpu", 16 * GB, 2 * GB),), 16 * GB, 2 * GB),
    "8": _cards(8),
    "12": _cards(12.8),
    "24": _cards(24),
    "12,12": _cards(12.8, 12.8),
    "16,24": _cards(16, 24),
    "80x4": _cards(80, 80, 80, 80),
}
CODECS = {"int2": {}, "int2-128": {"kv_group": 128, "kv_window": 512}, "bf16": {"kv": "bf16"}, "fp32": {"kv": "fp32"}}
VARIANTS: dict[str, dict[str, Any]] = {
    "escha": {},
    "plain": {"quantization_config": None},
    "tied": {"tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "quantization_config": None},
}


def plans(shapes: dict[str, tuple[Any, Any]]) -> dict[str, list[Any]]:
    """By model, machine, codec and context: the sizes of a plan and the bytes of its rows; of a refusal its text."""
    found = {}
    for name, (spec, weights) in shapes.items():
        for place, machine in MACHINES.items():
            for codec, changes in CODECS.items():
                for context in (None, 4096, spec.max_positions):
                    wishes = Wishes(context=context, **changes)
                    case = f"{name} {place} {codec} {context}"
                    try:
                        plan = make_plan(spec, wishes, machine, weights)
                    except (PlanRefused, UsageError) as refusal:
                        found[case] = [_digest(str(refusal))]
                        continue
                    sizes = (plan.context, plan.pages, plan.slots, plan.chunk, plan.host_cache, len(plan.device_names))
                    records = (plan.checkpoint_bytes, plan.sink_bytes, plan.page_bytes)
                    rows = [row.bytes for row in plan.rows]
                    notes = [(row.name, row.place, row.note, row.meter) for row in plan.rows]
                    found[case] = [*sizes, *records, *rows, _digest(repr(notes))]
    return found


def weights(made: Any) -> dict[str, str]:
    """Digests of all random tensors of small configs. `made`: config -> tensors."""
    found = {}
    for name, changes in VARIANTS.items():
        tensors = made({**ESCHA, **changes, "random_weights": 3})
        listing = [f"{t.name} {t.dtype} {t.shape} {_bytes(t.read())}" for t in tensors]
        found[name] = _digest("\n".join(listing))
    return found


def quantised(made: Any, recipe_of: Any) -> dict[str, str]:
    """Digests of what a tiny checkpoint becomes: names, dtypes and shapes, configs. `made`: config -> tensors;
    `recipe_of`: (format, bits, source) -> Recipe."""
    found = {}
    for format, bits in (("exl3", 2.5), ("escha", 2.25)):
        for prefix in ("model.", "model.language_model."):
            with tempfile.TemporaryDirectory() as directory:
                source = _source(Path(directory) / "source", prefix, made)
                recipe: Recipe = recipe_of(format, bits, source)
                quantize_checkpoint(source, Path(directory) / "out", recipe, encode=encode)
                out = sorted((Path(directory) / "out").iterdir())
                files = [f"{p.name} {_stored(p)}" for p in out if p.name != "quantization_report.json"]
                found[f"{format} {prefix}"] = _digest(recipe.digest() + "\n".join(files))
    return found


def _stored(path: Path) -> str:
    if path.suffix == ".json":
        return path.read_text()
    return repr([(t.name, t.dtype, t.shape, t.offset) for t in read_header(path)])


def _source(directory: Path, prefix: str, made: Any) -> Path:
    """A plain checkpoint with a draft layer, some of whose linears no codec takes."""
    directory.mkdir()
    config = {**ESCHA, "vocab_size": 256, "mtp_num_hidden_layers": 1, "quantization_config": None}
    (directory / "config.json").write_text(json.dumps(config))
    tensors = {t.name: t.read() for t in made({**config, "random_weights": 3})}
    layer = {
        n.replace("model.layers.3", "mtp.layers.0"): t.clone() for n, t in tensors.items() if "model.layers.3." in n
    }
    draft = layer | {"mtp.fc.weight": tensors["model.layers.0.mlp.down_proj.weight"] * 2}
    text = {n.replace("model.", prefix, 1) if n.startswith("model.") else n: t for n, t in tensors.items()}
    save_file(text | draft, directory / "model.safetensors")
    return directory


def encode(targets: torch.Tensor, bits: int) -> torch.Tensor:
    """Sound states without a search."""
    symbols = ((targets.clamp(-2, 2) + 2) / 4 * ((1 << bits) - 1)).round().to(torch.int32)
    return trellis.unpack(trellis.pack(symbols, bits))


def _bytes(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def computed() -> Iterator[tuple[str, Any]]:
    """(what, digests by case)."""
    from kakera.arch.registry import ARCHITECTURES, load_spec, spec_of
    from kakera.cli.model import shape_of
    from kakera.plan.known import KNOWN
    from kakera.plan.weights import from_config
    from kakera.weights.synthetic import RandomTensor, random_tensors

    tied = {**ESCHA, "tie_word_embeddings": True}
    plain = {**ESCHA, "model_type": "qwen3", "quantization_config": None}
    small = {
        name: (spec_of(config), from_config(spec_of(config), config))
        for name, config in (("tied", tied), ("qwen3", plain))
    }
    served = (name for name, config in KNOWN.items() if config["model_type"] in ARCHITECTURES)
    yield "plans", plans({name: shape_of(name) for name in (*served, "mini")} | small)

    def made(config: dict[str, Any]) -> list[RandomTensor]:
        return random_tensors(spec_of(config), config, Path("m"))

    yield "weights", weights(made)
    yield (
        "quantised",
        quantised(made, lambda format, bits, source: Recipe.for_bits(format, bits, load_spec(source))),
    )


if __name__ == "__main__":
    text = {key: json.dumps(value) if key != "plans" else value for key, value in computed()}
    lines = [json.dumps(k) + ": " + json.dumps(v) for k, v in text.pop("plans").items()]
    rest = [json.dumps(k) + ": " + v for k, v in text.items()]
    FILE.write_text('{"plans": {\n' + ",\n".join(lines) + "},\n" + ",\n".join(rest) + "}\n")
