"""Machines to plan for, without looking at this one."""

from __future__ import annotations

from kakera.target.devices import Device, Machine
from kakera.target.target import CPU, CUDA

GB = 10**9


def cards(*sizes_gb: float, ram_gb: float = 32, used: int = 0) -> Machine:
    devices = tuple(Device(f"{size}GB", int(size * GB), used) for size in sizes_gb)
    return Machine(CUDA, devices, int(ram_gb * GB), 2 * GB)


def laptop(ram_gb: float, used_gb: float = 2) -> Machine:
    total, used = int(ram_gb * GB), int(used_gb * GB)
    return Machine(CPU, (Device("cpu", total, used),), total, used)
