"""Energy counters: the GPUs' (NVML), or the processors' own (RAPL). Never an estimate.

They count all that the device does, for any process, including idling.
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

    def joules(self) -> float:
        """The counter's value."""


class Rapl:
    """The processor packages' counters under Linux, in microjoules; only root can read them.

    A counter wraps around at its range, after a quarter of an hour of work or so. Two readings must
    be less than one range apart.
    """

    source = "RAPL, processor packages"

    def __init__(self, packages: list[Path]):
        self._packages = packages
        self._ranges = [int((p / "max_energy_range_uj").read_text()) for p in packages]
        self._last = self._read()
        self._total = 0

    @classmethod
    def find(cls, root: Path = POWERCAP) -> Rapl | None:
        """The machine's packages; None if there are none or they cannot be read."""
        packages = []
        for path in sorted(root.glob("intel-rapl:*")):
            # "intel-rapl:0" is a package (AMD's too); "intel-rapl:0:1" is a part of one.
            if path.name.count(":") == 1 and (path / "name").read_text().startswith("package"):
                packages.append(path)
        try:
            return cls(packages) if packages else None
        except (OSError, ValueError):
            return None

    def _read(self) -> list[int]:
        return [int((p / "energy_uj").read_text()) for p in self._packages]

    def joules(self) -> float:
        now = self._read()
        for new, old, counter_range in zip(now, self._last, self._ranges, strict=True):
            self._total += new - old
            if new < old:  # the counter wrapped around
                self._total += counter_range
        self._last = now
        return self._total / 1e6


class Nvml:
    """The energy counters of the visible NVIDIA GPUs, in millijoules, from the driver."""

    source = "NVML, GPUs"

    def __init__(self, nvml):
        nvml.nvmlInit()
        self._nvml = nvml
        self._gpus = _visible_gpus(nvml)
        self.joules()  # raises here if a GPU has no counter

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


def _visible_gpus(nvml) -> list:
    """Handles of the GPUs that this process may use, by index or UUID."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").replace(" ", "")
    if not visible:
        return [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    handles = []
    for name in visible.split(","):
        if name.isdigit():
            handles.append(nvml.nvmlDeviceGetHandleByIndex(int(name)))
        else:
            handles.append(nvml.nvmlDeviceGetHandleByUUID(name))
    return handles


def find_meter(platform: str) -> EnergyMeter | None:
    """The counter of JAX's platform (``cpu``, ``gpu``, …); None if it has none."""
    if platform == "gpu":
        return Nvml.find()
    if platform == "cpu":
        return Rapl.find()
    return None
