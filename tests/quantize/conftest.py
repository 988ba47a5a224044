"""Modules with Triton kernels run in its interpreter where there is no GPU."""

import triton_interpreter  # noqa: F401
