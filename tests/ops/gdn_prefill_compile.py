"""Compiles Gated DeltaNet's prefill kernels: architecture, name, shared bytes, registers, stack bytes of each.

Run as a script, without TRITON_INTERPRET and without a GPU: `python gdn_prefill_compile.py 86 90`.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kakera.arch.blocks import GdnSpec
from kakera.ops import gdn_prefill_kernels as kernels
from kakera.ops.gdn_prefill import INVERT_WARPS, NORM_WARPS, tile_of
from kakera.target.kernels import has_large_tiles

ARCHITECTURES = (80, 86, 89, 90, 120)  # A100, RTX 30, 40, H100/H200, RTX 50
SPEC = GdnSpec(16, 48, 128, 128, 4)
POINTERS = {
    name: kind
    for kind, names in {
        "*bf16": "mixed columns saved_columns y",
        "*fp16": "qk v scores inverse o saved",
        "*fp32": "taps rate dt_bias overlap decays state scale",
        "fp32": "eps q_scale",
    }.items()
    for name in names.split()
}


def compiled(kernel: Any, constants: dict[str, int | bool], arch: int, warps: int) -> Any:
    names = [parameter.name for parameter in kernel.params]
    signature = {name: "constexpr" if name in constants else POINTERS.get(name, "i32") for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")}
    values = {(i,): constants[name] for i, name in enumerate(names) if name in constants}
    source = ASTSource(kernel, signature, values, aligned)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": warps})


def used(made: Any) -> tuple[int, int, int]:
    """Shared bytes, registers of a thread and bytes of its stack, as the binary has them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", report)
    assert found, report
    return made.metadata.shared, int(found[1]), int(found[2])


def main(arch: int) -> None:
    sizes = {"STRIDE": 16480, "J": SPEC.k_heads, "V": SPEC.v_heads, "K": SPEC.k_dim, "D": SPEC.v_dim}
    tile = tile_of(has_large_tiles((arch // 10, arch % 10)), SPEC)
    taps = {"TAPS": SPEC.conv_taps}
    passing = {"SAVE": True, "BLOCK_D": tile.columns, "STAGES": tile.stages}
    for kernel, constants, warps in (
        (kernels.prepare, {**sizes, **taps}, tile.prepare_warps),
        (kernels.invert, sizes, INVERT_WARPS),
        (kernels.advance, {**sizes, **taps, **passing}, tile.warps),
        (kernels.normalise, sizes, NORM_WARPS),
    ):
        made = compiled(kernel, constants, arch, warps)
        print(arch, kernel.fn.__name__, *used(made), flush=True)


if __name__ == "__main__":
    for each in sys.argv[1:]:
        main(int(each))
