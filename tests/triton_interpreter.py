"""Import this before a module with Triton kernels: where torch sees no GPU they run in Triton's interpreter."""

import contextlib
import os

import torch


def patch_once_a_kernel() -> None:
    """The interpreter replaces all functions of Triton's language before each call of a function that a kernel calls,
    though the kernel's start has done so: half of its time. Here once a kernel and module of functions."""
    from triton.runtime import interpreter

    start, patch = interpreter.GridExecutor.__call__, interpreter._patch_lang
    patched: set[str] = set()

    def start_kernel(self, *args, **kwargs):
        patched.clear()
        return start(self, *args, **kwargs)

    def patch_module(function):
        if function.__module__ in patched:
            return None  # what to restore, which the kernel's start alone asks for
        patched.add(function.__module__)
        return patch(function)

    interpreter.GridExecutor.__call__, interpreter._patch_lang = start_kernel, patch_module


if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel's module is imported
    with contextlib.suppress(ImportError, AttributeError):  # no Triton, or one made otherwise: slower, and the same
        patch_once_a_kernel()
