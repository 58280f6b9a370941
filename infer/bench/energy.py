"""Energy counters: the GPU's (NVML), or the processors' own (RAPL). Never an estimate.

What they count is all that the device does, whoever asked for it, idling included.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Protocol

POWERCAP = Path("/sys/class/powercap")


class EnergyMeter(Protocol):
    """A counter of joules that never falls; ``source`` names it in reports."""

    source: str

    def joules(self) -> float: ...


class Rapl:
    """The processor packages' counters under Linux (microjoules, readable by root alone).

    A counter starts again at its range, a quarter of an hour's work or so: two readings must
    lie less than that apart.
    """

    source = "RAPL, processor packages"

    def __init__(self, packages: list[Path]):
        self._packages = packages
        self._ranges = [int((p / "max_energy_range_uj").read_text()) for p in packages]
        self._last = self._read()
        self._total = 0

    @classmethod
    def find(cls, root: Path = POWERCAP) -> Rapl | None:
        """The machine's packages; None where there are none or they cannot be read."""
        # "intel-rapl:0" is a package (AMD's too); "intel-rapl:0:1" a part of one.
        packages = sorted(
            p
            for p in root.glob("intel-rapl:*")
            if p.name.count(":") == 1 and (p / "name").read_text().startswith("package")
        )
        try:
            return cls(packages) if packages else None
        except (OSError, ValueError):
            return None

    def _read(self) -> list[int]:
        return [int((p / "energy_uj").read_text()) for p in self._packages]

    def joules(self) -> float:
        now = self._read()
        for new, old, span in zip(now, self._last, self._ranges, strict=True):
            self._total += new - old if new >= old else new - old + span
        self._last = now
        return self._total / 1e6


class Nvml:
    """The energy counters of the NVIDIA GPUs in sight (millijoules), from the driver."""

    source = "NVML, GPUs"

    def __init__(self, nvml):
        nvml.nvmlInit()
        self._nvml = nvml
        self._gpus = _visible(nvml)
        self.joules()

    @classmethod
    def find(cls) -> Nvml | None:
        """None without the ``energy`` extra, a driver, or a GPU that counts (Volta and later)."""
        try:
            import pynvml
        except ImportError:
            return None
        with contextlib.suppress(pynvml.NVMLError):
            return cls(pynvml)
        return None

    def joules(self) -> float:
        return sum(map(self._nvml.nvmlDeviceGetTotalEnergyConsumption, self._gpus)) / 1e3


def _visible(nvml) -> list:
    """Handles of the GPUs that this process may use."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "").replace(" ", "")
    if not named:
        return [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    by_index, by_uuid = nvml.nvmlDeviceGetHandleByIndex, nvml.nvmlDeviceGetHandleByUUID
    return [by_index(int(n)) if n.isdigit() else by_uuid(n) for n in named.split(",")]


def find_meter(platform: str) -> EnergyMeter | None:
    """The counter of what JAX computes on (``cpu``, ``gpu``, …), or None: then it is "n/a"."""
    if platform == "gpu":
        return Nvml.find()
    return Rapl.find() if platform == "cpu" else None
