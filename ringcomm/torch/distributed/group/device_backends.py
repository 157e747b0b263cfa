"""Makes torch's own backend for a device other than the CPU, when its first tensor arrives."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from ringcomm.torch.distributed.compat import backends_of, make_device_backend


class Devices:
    """The backends of one process group, by type of device, with the group's ranks and timeout.

    If a process group is written in Python, torch up to 2.13 passes all tensors to it, even
    those of a device that has another backend ("cpu:ringcomm,cuda:nccl").
    """

    def __init__(self, store: Any, rank: int, size: int, timeout_s: float | None) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
        self._made: dict[str, Any] = {}

    @property
    def types(self) -> list[torch.device]:
        return [torch.device(each) for each in self._made]

    def of(self, *tensors: torch.Tensor) -> Any:
        """Return the backend of the tensors' device. Raises ValueError if they are on several."""
        types = {x.device.type for x in tensors}
        if len(types) > 1:
            raise ValueError(
                f"tensors of one call are on {', '.join(sorted(types))}; "
                "all must be on one type of device"
            )
        return self.by_type(tensors[0].device)

    def by_type(self, device: Any) -> Any:
        """Return a device's backend; the first call for a type is collective.

        Raises:
            RuntimeError: torch has no backend for the type.
        """
        kind = torch.device(device).type
        if kind not in self._made:
            try:
                self._made[kind] = make_device_backend(
                    kind, self._store, self._rank, self._size, self._timeout
                )
            except ValueError as error:  # NCCL raises it if there is no GPU
                raise RuntimeError(f"ringcomm: no backend for {kind}: {error}") from error
        return self._made[kind]

    def shutdown(self) -> None:
        for backend in self._made.values():
            backend.shutdown()
        self._made.clear()


def carries(group: Any, kind: str) -> bool:
    """Return True if a process group itself carries tensors of a type of device.

    "cpu:ringcomm,cuda:nccl" leaves those on GPUs to NCCL.
    """
    return kind == "cpu" or (kind == "cuda" and backends_of(group).get(kind) in (None, "ringcomm"))


def is_foreign(group: Any, *tensors: torch.Tensor) -> bool:
    if all(x.is_cpu for x in tensors):
        return False
    types = {x.device.type for x in tensors}
    return len(types) > 1 or not all(carries(group, kind) for kind in types)
