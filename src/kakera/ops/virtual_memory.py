"""Device memory under addresses that stay, in chunks that can be given back to the driver and taken again.

Kernels and captured graphs keep the addresses; whoever gives chunks back sees to it that nothing reads or writes them.
"""

from __future__ import annotations

import contextlib
from typing import Any, Protocol

import torch
from torch import Tensor

from kakera.errors import KakeraError


class Mapper(Protocol):
    """The driver's calls, by addresses and bytes. Each raises KakeraError if it fails."""

    granularity: int  # bytes: sizes and addresses are multiples of it

    def reserve(self, size: int) -> int:
        """Addresses for so many bytes, with no memory behind them."""
        ...

    def map(self, address: int, size: int) -> None:
        """Put memory behind addresses that have none, all zeros: what is masked must not read as NaN."""
        ...

    def unmap(self, address: int, size: int) -> None:
        """Give the memory back of exactly what one `map` took. Waits for all that the device still does."""
        ...

    def release(self, address: int, size: int) -> None:
        """Give back what `reserve` gave."""
        ...

    def tensor(self, address: int, size: int, owner: object) -> Tensor:
        """uint8 [size] over these addresses, which keeps `owner` alive."""
        ...


class VirtualMemory:
    """`size` bytes, of which chunk i holds those from chunk * i on. All chunks are there at first. Memory and addresses
    go back when neither this object nor a tensor over it is left."""

    def __init__(self, size: int, chunk: int, mapper: Mapper):
        """Raises KakeraError where the card or its driver can not do this, or has too little memory."""
        self._mapper, self._chunk, self._size = mapper, chunk, size
        self._there: list[bool] = []
        if chunk % mapper.granularity:
            raise KakeraError(f"memory is mapped in multiples of {mapper.granularity} bytes here, not in {chunk}")
        chunks = -(-size // chunk)
        self.address = mapper.reserve(chunks * chunk)
        self._there = [False] * chunks
        if not self.take(0, chunks):
            self._release()
            raise KakeraError(f"the driver has no {size / 1e9:.2f} GB of memory to map")

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the driver may be gone at the end of a process
            self._release()

    def _release(self) -> None:
        if self._there:
            self.give_back(0, len(self._there))
            self._mapper.release(self.address, len(self._there) * self._chunk)
            self._there = []

    def tensor(self) -> Tensor:
        """uint8 [size]."""
        return self._mapper.tensor(self.address, self._size, self)

    def take(self, first: int, last: int) -> bool:
        """Have memory behind the chunks `first` to before `last`. False if the driver has too little: what this call
        took stays, and another one takes the rest."""
        for i in range(first, last):
            if not self._there[i]:
                try:
                    self._mapper.map(self.address + i * self._chunk, self._chunk)
                except KakeraError:
                    return False
                self._there[i] = True
        return True

    def give_back(self, first: int, last: int) -> None:
        """What the chunks hold is lost."""
        for i in range(first, last):
            if self._there[i]:
                self._mapper.unmap(self.address + i * self._chunk, self._chunk)
                self._there[i] = False

    @property
    def held(self) -> int:
        """Bytes."""
        return sum(self._there) * self._chunk

    def holes(self) -> list[tuple[int, int]]:
        """Bytes (begin, end) that must not be read: they have no memory."""
        chunk = self._chunk
        return [(i * chunk, min(self._size, (i + 1) * chunk)) for i, there in enumerate(self._there) if not there]


class CudaMapper:
    """CUDA's virtual memory management, for one device that torch has used. Raises KakeraError where it is missing."""

    def __init__(self, device: torch.device):
        try:
            from cuda.bindings import driver
        except ImportError:
            raise KakeraError("NVIDIA's Python bindings are missing") from None
        self._driver: Any = driver
        self._index = torch.cuda.current_device() if device.index is None else device.index
        torch.zeros(1, device=f"cuda:{self._index}")  # makes the context current
        (handle,) = self._call(driver.cuDeviceGet(self._index))
        attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        (supported,) = self._call(driver.cuDeviceGetAttribute(attribute, handle))
        if not supported:
            raise KakeraError("the driver maps no memory")
        self._properties = driver.CUmemAllocationProp()
        self._properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._properties.location.id = self._index
        self._access = driver.CUmemAccessDesc()
        self._access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._access.location.id = self._index
        self._access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        flags = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        (found,) = self._call(driver.cuMemGetAllocationGranularity(self._properties, flags))
        self.granularity = int(found)

    def reserve(self, size: int) -> int:
        (address,) = self._call(self._driver.cuMemAddressReserve(size, 0, 0, 0))
        return int(address)

    def map(self, address: int, size: int) -> None:
        (handle,) = self._call(self._driver.cuMemCreate(size, self._properties, 0))
        try:
            self._call(self._driver.cuMemMap(address, size, 0, handle, 0))
        finally:
            self._call(self._driver.cuMemRelease(handle))  # the mapping keeps the memory, and its end frees it
        try:
            self._call(self._driver.cuMemSetAccess(address, size, [self._access], 1))
            self._call(self._driver.cuMemsetD8(address, 0, size))
        except KakeraError:
            self._call(self._driver.cuMemUnmap(address, size))
            raise
        torch.cuda.synchronize(self._index)

    def unmap(self, address: int, size: int) -> None:
        torch.cuda.synchronize(self._index)
        self._call(self._driver.cuMemUnmap(address, size))

    def release(self, address: int, size: int) -> None:
        self._call(self._driver.cuMemAddressFree(address, size))

    def tensor(self, address: int, size: int, owner: object) -> Tensor:
        found = torch.as_tensor(_Memory(address, size, owner), device=f"cuda:{self._index}")
        if found.data_ptr() != address:
            raise KakeraError("torch has copied mapped memory")
        return found

    @staticmethod
    def _call(result: tuple[Any, ...]) -> tuple[Any, ...]:
        if int(result[0]) != 0:
            raise KakeraError(f"the CUDA driver says {result[0]!r}")
        return result[1:]


class _Memory:
    """What torch makes a tensor of without a copy, and keeps as long as the tensor's memory is used."""

    def __init__(self, address: int, size: int, owner: object):
        self._owner = owner
        shape, data = (size,), (address, False)
        self.__cuda_array_interface__ = {"shape": shape, "typestr": "|u1", "data": data, "strides": None, "version": 3}
