"""The memory of GPUs that each process uses, as nvidia-smi shows it: by NVIDIA's library NVML.

NVML comes with the driver. Structures and numbers are those of nvml.h.
"""

from __future__ import annotations

import ctypes
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final

_LIBRARY: Final = "libnvidia-ml.so.1"
_FIRST_S: Final = 1.0
_OK, _TOO_SMALL = 0, 7
_NOT_KNOWN: Final = (1 << 64) - 1
_ROOM: Final = 64  # processes of a GPU


class _ProcessInfo(ctypes.Structure):
    """nvmlProcessInfo_v2_t."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("nbytes", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


class ProcessMemory:
    """Asks NVML in a thread of its own: its calls do not return while a GPU does not answer."""

    def __init__(self, library: str = _LIBRARY) -> None:
        self._latest: Mapping[int, int] = {}
        self._is_asked, self._has_answered = threading.Event(), threading.Event()
        try:
            self._nvml = ctypes.CDLL(library)
        except OSError:  # there is no driver
            self._has_answered.set()
        else:
            threading.Thread(target=self._answer, name="ringcomm NVML", daemon=True).start()

    def by_pid(self) -> Mapping[int, int]:
        """Return pid -> bytes on all GPUs of this host, as of the last call or now.

        A process that uses none is left out; {} if NVML cannot be used, or sees other pids, as in a
        container that has its own. Waits 1 s at most, and that once.
        """
        self._is_asked.set()
        self._has_answered.wait(_FIRST_S)
        self._has_answered.set()
        return self._latest

    def _answer(self) -> None:
        try:
            is_there = self._nvml.nvmlInit_v2() == _OK
            while is_there:
                self._is_asked.wait()
                self._is_asked.clear()
                self._latest = _used(self._nvml)
                self._has_answered.set()
        except AttributeError:  # NVML of a driver before 510 lacks a function
            self._latest = {}
        self._has_answered.set()


def _used(nvml: ctypes.CDLL) -> Counter[int]:
    used: Counter[int] = Counter()
    count, device = ctypes.c_uint(), ctypes.c_void_p()
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    for index in range(count.value):
        if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) == _OK:
            for info in _processes(nvml, device):
                used[info.pid] += info.nbytes if info.nbytes != _NOT_KNOWN else 0
    return +used


def _processes(nvml: ctypes.CDLL, device: ctypes.c_void_p) -> Iterator[_ProcessInfo]:
    room = _ROOM
    while True:
        infos, count = (_ProcessInfo * room)(), ctypes.c_uint(room)
        code = nvml.nvmlDeviceGetComputeRunningProcesses_v3(device, ctypes.byref(count), infos)
        if code != _TOO_SMALL:
            break
        room = 2 * max(room, count.value)
    if code == _OK:
        yield from infos[: count.value]
