"""What is folded over a declaration, as digests: random weights and quantised files. Plans have theirs in tests/plan/.

`PYTHONPATH=.:tests python tests/quantize/declared_goldens.py` writes them anew; only when bytes are meant to change.
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
from tests.quantize.tiny import cheap_encode

from kakera.quantize.convert import quantize_checkpoint
from kakera.quantize.recipe import Recipe
from kakera.weights.files import read_header
from random_model import ESCHA

FILE = Path(__file__).with_name("declared_goldens.json")


VARIANTS: dict[str, dict[str, Any]] = {
    "escha": {},
    "plain": {"quantization_config": None},
    "tied": {"tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "quantization_config": None},
}


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
                quantize_checkpoint(source, Path(directory) / "out", recipe, encode=cheap_encode)
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


def _bytes(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def computed() -> Iterator[tuple[str, Any]]:
    """(what, digests by case)."""
    from kakera.arch.registry import load_spec, spec_of
    from kakera.weights.synthetic import RandomTensor, random_tensors

    def made(config: dict[str, Any]) -> list[RandomTensor]:
        return random_tensors(spec_of(config), config, Path("m"))

    yield "weights", weights(made)
    yield (
        "quantised",
        quantised(made, lambda format, bits, source: Recipe.for_bits(format, bits, load_spec(source))),
    )


if __name__ == "__main__":
    FILE.write_text("{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in computed()) + "\n}\n")
