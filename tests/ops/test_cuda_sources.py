"""The CUDA sources compile for every card that is promised, without spilling, in the shared memory that all have.

Nine seconds a card: `make test` compiles each kernel for one of them, the sweep for all.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings and NVRTC (Linux)")

from kakera.errors import KakeraError
from kakera.ops.cuda import compiler

pytestmark = pytest.mark.compile
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_120")  # A100, RTX 30, 40, H100/H200, RTX 50
SHARED_BYTES = 48 * 1024  # of a block, unless a kernel asks for more
TWO_THREE = "EACH_RATE=X(4) X(6)"  # in half bits
KERNELS = [  # name, defines, bytes a thread may spill
    ("rotate", ("BF16",), 0),
    *(("trellis_few", (f"GROUPS={groups}", "CODEBOOK=MCG", TWO_THREE), 0) for groups in (1, 2, 4)),
    ("trellis_few", ("GROUPS=1", "CODEBOOK=MUL1", "EACH_RATE=X(5) X(8)", "BF16"), 48),  # alone 0 and 4
    ("trellis_few", ("GROUPS=2", "CODEBOOK=MUL1", "EACH_RATE=X(4) X(5)"), 64),  # 4 bits of mul1 alone spill 108
    ("trellis_weight", ("CODEBOOK=MCG", "RATE=4"), 32),  # outside its loops; a fourth block on an SM is worth more
    ("trellis_weight", ("CODEBOOK=INST3", "RATE=16"), 32),
    ("trellis_weight", ("CODEBOOK=MUL1", "RATE=7"), 32),
    ("int8_few", ("GROUPS=1",), 0),
    ("int8_few", ("GROUPS=4", "BF16"), 0),
    ("attention_decode", ("DIM=256", "GROUPS=1", "CODES=1", "WARPS=8"), 0),
    ("attention_decode", ("DIM=256", "GROUPS=4", "CODES=1", "WARPS=8"), 256),  # small groups, seldom wanted
    ("attention_decode", ("DIM=128", "GROUPS=1", "CODES=0", "WARPS=8"), 0),
    ("attention_merge", ("DIM=256", "CODES=1", "TURN=1", "BF16"), 0),
    ("attention_finish", ("DIM=128", "TURN=1"), 0),
    ("kv_write", ("DIM=256", "ROTARY=64", "GROUP=256", "BF16"), 0),
    ("kv_write", ("DIM=128", "ROTARY=128", "GROUP=32"), 0),
    ("kv_write", ("DIM=256", "ROTARY=64", "GROUP=0"), 0),
    ("gdn_step", ("GROUP=3", "BF16"), 80),  # 64 registers for two blocks on an SM; what is spilled is used once
    ("gdn_step", ("GROUP=1", "STATE16"), 80),
    ("add_norm", ("VECTORS=3", "BF16"), 0),
    ("add_norm", ("VECTORS=4",), 0),
    ("exchange_norm", ("VECTORS=3", "BF16"), 0),
    ("exchange_norm", ("VECTORS=4",), 0),
    ("swiglu", ("BF16",), 0),
    ("host_rows", ("CODED", "BF16"), 0),
    ("host_rows", ("CODED",), 0),
    ("host_rows", ("BF16",), 0),
    ("dense_few", ("ROWS=8", "VECTORS=5", "BF16"), 0),
    ("dense_few", ("ROWS=1", "VECTORS=8"), 0),
]


@pytest.fixture
def kept(pytestconfig, tmp_path):
    """Where a run keeps the assembler's words for the next."""
    cache = getattr(pytestconfig, "cache", None)  # there is none with -p no:cacheprovider
    return cache.mkdir("kernels") if cache else tmp_path


@pytest.mark.sweep
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_kernels_compile_for_every_card(arch, kept):
    for kernel in KERNELS:
        check(*kernel, arch, kept)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_each_kernel_compiles_for_one_card_and_some_for_each(arch, kept):
    for kernel in KERNELS[ARCHITECTURES.index(arch) :: len(ARCHITECTURES)]:
        check(*kernel, arch, kept)


def check(name: str, defines: tuple[str, ...], spills: int, arch: str, kept: Path) -> None:
    report = compile_report(name, defines, arch, kept)
    spilled = [int(n) for n in re.findall(r"(\d+) bytes spill stores", report)]
    shared = [int(n) for n in re.findall(r"(\d+) bytes smem", report)]
    assert spilled and max(spilled) <= spills, f"{name} {defines}: {report}"
    assert max(shared, default=0) <= SHARED_BYTES


def compile_report(name: str, defines: tuple[str, ...], arch: str, kept: Path) -> str:
    """The assembler's words, which are kept by all that they depend on: all of them take 49 s."""
    path = kept / compiler.cache_name(name, defines, arch)
    if not path.is_file():
        made = compiler.compile_source(name, defines, arch)
        assert made.cubin[:4] == b"\x7fELF"
        path.write_text(made.report)
    return path.read_text()


def test_a_kernel_is_compiled_once_and_again_when_its_defines_change(tmp_path, monkeypatch):
    first = compiler.cached_cubin("rotate", (), "sm_80", tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    compiler.cached_cubin("rotate", ("BF16",), "sm_80", tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    monkeypatch.setattr(compiler, "compile_source", None)  # a second compilation would fail
    assert compiler.cached_cubin("rotate", (), "sm_80", tmp_path) == first


def test_a_home_that_can_not_be_written_costs_the_cache_only(tmp_path):
    (tmp_path / "file").touch()
    assert compiler.cached_cubin("rotate", (), "sm_80", tmp_path / "file" / "kernels")


def test_an_error_has_the_compilers_words():
    with pytest.raises(KakeraError, match=r"rotate.cu does not compile for sm_80:\n.*error"):
        compiler.compile_source("rotate", ("launch_dependents=#",), "sm_80")
