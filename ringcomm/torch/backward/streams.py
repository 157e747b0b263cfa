"""The streams on which gradients come to a bucket on a GPU: autograd runs on those of forward()."""

from __future__ import annotations

import torch


class Streams:
    """Streams that have written to one tensor since the last join(); none if it is not on a GPU."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._device = tensor.device if tensor.is_cuda else None
        self._seen: set[torch.cuda.Stream] = set()

    def note(self) -> None:
        """The current stream has been given something that writes."""
        if self._device is not None:
            self._seen.add(torch.cuda.current_stream(self._device))

    def join(self) -> None:
        """Make the current stream wait for the others."""
        if self._device is None:
            return
        current = torch.cuda.current_stream(self._device)
        for stream in self._seen - {current}:
            current.wait_stream(stream)
        self._seen.clear()
