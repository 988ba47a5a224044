"""Host memory that a card reads and writes where it lies: registered with the driver, which says at which address the
card sees it. That need not be the host's address."""

from __future__ import annotations

from typing import Any

import torch

from kakera.errors import KakeraError


def register(address: int, size: int) -> int:
    """Pin `size` bytes at `address` for all devices of this process; the address for the current one. They must stay
    where they are until `unregister`. Raises KakeraError if the driver refuses."""
    from cuda.bindings import driver

    torch.zeros(1, device="cuda")  # the device's context must be current
    options = driver.CU_MEMHOSTREGISTER_PORTABLE | driver.CU_MEMHOSTREGISTER_DEVICEMAP
    _check(driver.cuMemHostRegister(address, size, options), size)
    (found,) = _check(driver.cuMemHostGetDevicePointer(address, 0), size)
    return int(found)


def unregister(address: int) -> None:
    """No kernel may use it any more. Without this what lies at its address next could not be registered."""
    from cuda.bindings import driver

    _check(driver.cuMemHostUnregister(address), 0)


def _check(result: tuple[Any, ...], size: int) -> tuple[Any, ...]:
    if int(result[0]) != 0:
        raise KakeraError(f"the driver does not let the card see {size / 1e9:.2f} GB of host memory: {result[0]!r}")
    return result[1:]
