"""`python -m kakera.quantize SRC OUT --format exl3 --bits 3`: the quantiser where only torch and safetensors are."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from kakera.arch.registry import load_spec
from kakera.errors import KakeraError
from kakera.quantize.convert import quantize_checkpoint
from kakera.quantize.progress import console_progress
from kakera.quantize.recipe import Recipe
from kakera.target.as_torch import device_called


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 done, otherwise the error's own."""
    parser = argparse.ArgumentParser(prog="python -m kakera.quantize", description=__doc__)
    parser.add_argument("source", type=Path, help="directory of a plain checkpoint")
    parser.add_argument("out", type=Path, help="new directory, or one of an interrupted run")
    parser.add_argument("--format", choices=("exl3", "escha"), default="exl3")
    parser.add_argument("--bits", type=float, default=3.0, help="mean bits per coded weight of the layers")
    parser.add_argument("--head-bits", type=int)
    parser.add_argument("--kind-bits", action="append", default=[], metavar="KIND=BITS", help="such as mlp.down=4")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shard-mb", type=float, default=5000)
    parser.add_argument("--device", default="auto")
    options = parser.parse_args(arguments)
    try:
        overrides = {kind: int(bits) for kind, bits in (item.split("=") for item in options.kind_bits)}
    except ValueError:
        parser.error("--kind-bits takes KIND=BITS, such as mlp.down=4")
    started = time.monotonic()
    try:
        device = device_called(options.device)
        spec = load_spec(options.source)
        recipe = Recipe.for_bits(
            options.format, options.bits, spec, head_bits=options.head_bits, overrides=overrides, seed=options.seed
        )
        print(f"{recipe.mean_bits(spec):.3f} bits a coded weight: {dict(recipe.bits)}", file=sys.stderr)
        with console_progress() as progress:
            summary = quantize_checkpoint(
                options.source, options.out, recipe, device, progress, shard_bytes=int(options.shard_mb * 1e6)
            )
    except KakeraError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    print(summary.table())
    print(f"{time.monotonic() - started:.1f} s on {device}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
