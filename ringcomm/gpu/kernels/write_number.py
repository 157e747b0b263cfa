"""The kernel that writes a number to host memory, for drivers that write none by a stream. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ringcomm.gpu.kernels.base import Argument, Kernel, number


@dataclass(frozen=True)
class WriteKernel(Kernel):
    """Writes 32 bits, after all earlier work of its stream."""

    target: int  # address
    value: int

    def _macros(self) -> dict[str, object]:
        return {"KERNEL": "WRITE"}

    def _arguments(self) -> tuple[Argument, ...]:
        return number("u8", self.target), number("u4", self.value)

    def _n_blocks(self) -> int:
        return 1
