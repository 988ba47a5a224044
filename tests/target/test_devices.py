"""--gpus: sizes, names, the CPU, and what NVML and the container say."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest

from kakera.errors import UsageError
from kakera.target import cards, devices
from kakera.target.target import CPU, CUDA


def test_sizes_are_decimal_unless_they_say_otherwise() -> None:
    machine = devices.resolve("12GB,12GiB")
    assert [d.bytes for d in machine.devices] == [12 * 10**9, 12 * 2**30]
    assert machine.target is CUDA


@pytest.mark.parametrize("text", ["rtx5070", "RTX 5070", "NVIDIA GeForce RTX 5070", "rtx-5070"])
def test_known_card_by_any_spelling(text: str) -> None:
    (device,) = devices.resolve(text).devices
    assert device.bytes == 12227 * 2**20
    assert device.bandwidth == 672e9


def test_neighbours_of_a_known_name_are_not_that_card() -> None:
    assert cards.find("rtx5070ti") is cards.CARDS["rtx5070ti"]
    assert cards.find("NVIDIA GeForce RTX 5070 Ti") is cards.CARDS["rtx5070ti"]
    assert cards.find("rtx5075") is None
    assert cards.find("NVIDIA H100 80GB HBM3") is cards.CARDS["h100"]
    assert cards.find("NVIDIA L40S") is cards.CARDS["l40s"]
    assert cards.find("") is None


@pytest.mark.parametrize("text", ["", "rtx9999", "12GB,", "12XB", "-3GB", "500MB", "4070 rtx"])
def test_unknown_card_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match="--gpus"):
        devices.resolve(text)


@pytest.mark.parametrize(
    ("text", "count"), [("2GB", 2 * 10**9), ("512MiB", 2**29), ("1.5g", 1_500_000_000), ("4096", 4096), ("8 kib", 8192)]
)
def test_parse_bytes(text: str, count: int) -> None:
    assert devices.parse_bytes(text) == count


def test_cpu_is_the_host_memory() -> None:
    machine = devices.resolve("cpu")
    (cpu,) = machine.devices
    assert machine.target is CPU
    assert cpu.bytes == machine.ram > cpu.used == machine.ram_used > 0


class FakeNvml:
    """Cards, of which another process holds `used` bytes each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, used: int, processes: list[int] | None, cards: int = 1):
        self.cards = cards
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        self.memory = SimpleNamespace(total=12227 * 2**20, used=used)
        self.processes = processes
        names = ("nvmlInit", "nvmlShutdown", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetName")
        names += ("nvmlDeviceGetUUID", "nvmlDeviceGetHandleByUUID")
        for name in (*names, "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetComputeRunningProcesses"):
            monkeypatch.setattr(pynvml, name, getattr(self, name))

    def nvmlInit(self) -> None: ...

    def nvmlShutdown(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return self.cards

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}{handle}ab-cd"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        if uuid != "MIG-7":
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return 7

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "NVIDIA GeForce RTX 5070"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return self.memory

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[SimpleNamespace]:
        if self.processes is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return [SimpleNamespace(pid=pid) for pid in self.processes]


def test_auto_finds_a_card_and_its_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeNvml(monkeypatch, used=10**8, processes=[])
    machine = devices.resolve("auto")
    assert (machine.target, machine.devices[0].bandwidth, machine.warnings) == (CUDA, 672e9, ())


def test_auto_warns_about_who_holds_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeNvml(monkeypatch, used=1_300_000_000, processes=[4711])
    (warning,) = devices.resolve("auto").warnings
    assert "process 4711 holds 1.3 GB" in warning


def test_wsl_hides_processes_but_not_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeNvml(monkeypatch, used=1_300_000_000, processes=None)
    (warning,) = devices.resolve("auto").warnings
    assert "another process or the desktop holds 1.3 GB" in warning


def test_a_part_of_the_host_is_taken_as_if_it_were_all_and_nobody_else_there() -> None:
    machine = devices.resolve("cpu:1500MB")
    assert machine == devices.Machine(CPU, (devices.Device("cpu:1500MB", 1_500_000_000),), 1_500_000_000)
    (warning,) = devices.resolve("cpu:900TB").warnings
    assert "this machine has" in warning
    for wrong in ("cpu:", "cpu:many", "cpu:4GB,cpu:4GB"):
        with pytest.raises(UsageError, match="is not a size"):
            devices.resolve(wrong)


def test_a_cpu_that_is_named_several_times_has_a_process_for_each_in_one_memory(monkeypatch) -> None:
    monkeypatch.setattr(devices, "host_memory", lambda: (16 * 10**9, 10**9))
    one, three = devices.resolve("cpu"), devices.resolve(" CPU,cpu, cpu ")
    assert (one.ranks, three.ranks) == (1, 3) and (one.devices, one.ram) == (three.devices, three.ram)
    assert devices.resolve_to_compute("cpu,cpu").ranks == 2
    assert devices.resolve("rtx5070,rtx5070").ranks == 2


@pytest.mark.parametrize(
    ("named", "found"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("-1", []),
        ("1", [1]),
        ("2, 0", [2, 0]),
        ("1,5,0", [1]),
        ("GPU-22ab-cd,GPU-00", [2, 0]),
        ("GPU-9", []),
        ("MIG-7", [7]),
        ("MIG-8", []),
        ("none", []),
    ],
)
def test_cards_are_those_that_cuda_shows(monkeypatch: pytest.MonkeyPatch, named: str | None, found: list[int]) -> None:
    FakeNvml(monkeypatch, used=0, processes=[], cards=3)
    if named is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert devices.visible_cards(pynvml) == found
    assert devices.resolve("auto").target is (CUDA if found else CPU)


def test_of_several_cards_the_first_computes_and_a_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeNvml(monkeypatch, used=1_300_000_000, processes=[4711], cards=3)
    assert len(devices.resolve("auto").devices) == 3  # a plan may look ahead
    machine = devices.resolve_to_compute("auto")
    assert len(machine.devices) == 1
    held, one = machine.warnings
    assert held.startswith("GPU 0 ") and "first, NVIDIA GeForce RTX 5070, and not on 2 more" in one
    with pytest.raises(UsageError, match="one card so far; name one"):
        devices.resolve_to_compute("12GB,12GB")
    assert devices.resolve_to_compute("cpu").target is CPU


def test_auto_without_a_driver_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", no_driver)
    assert devices.resolve("auto").target is CPU


def test_container_limit_counts_without_the_page_cache(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("4000000000\n")
    (tmp_path / "memory.current").write_text("1500000000\n")
    (tmp_path / "memory.stat").write_text("anon 400000000\nfile 1000000000\n")
    assert devices._cgroup_limit(tmp_path) == (4_000_000_000, 500_000_000)


def test_container_without_a_limit(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("max\n")
    assert devices._cgroup_limit(tmp_path) == (None, 0)


@pytest.mark.parametrize("gpus", ["9" * 400 + "GB", "cpu:" + "9" * 400, "99999999999TB"])
def test_more_memory_than_any_machine_has_is_refused_in_words(gpus):
    with pytest.raises(UsageError, match="more than any machine has"):
        devices.resolve(gpus)
