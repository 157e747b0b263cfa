"""Lets torch's CPU tensors count as tensors on this process's simulated GPU.

torch computes at once, so its stream is simulated_gpu.HOST: where a real stream would wait, the
host does. What the library does on streams of its own is as asynchronous as on any GPU.
"""

import contextlib
import ctypes

import numpy as np
import simulated_gpu as sim
import torch

from ringcomm.arrays import Span, add_device_adapter
from ringcomm.arrays.torch import TorchTensors

_gpu = None


def count_as_gpu(gpu):
    """From now on torch tensors of this process are on this GPU; None: no more."""
    global _gpu  # noqa: PLW0603 - one of the process
    _gpu = gpu


class _Adapter(TorchTensors):
    kind = "torch cuda"
    place = "cuda"
    device_type = "cpu"

    def make(self, dtype, shape):
        return torch.empty(shape, dtype=getattr(torch, dtype.name))

    def span(self, x):
        return Span(x.data_ptr(), x.numel(), self.dtype(x), x)

    def device(self, x):
        return _gpu.index

    def current_device(self):
        return _gpu.index

    def wrap(self, memory, shape, device):
        raw = (ctypes.c_uint8 * memory.nbytes).from_address(memory.address)
        raw.owner = memory.owner
        line = torch.from_numpy(np.ctypeslib.as_array(raw))
        return line.view(getattr(torch, memory.dtype.name)).view(shape)

    def stream(self, device):
        return sim.HOST

    def stream_owner(self, device):
        return None

    def on_stream(self, device, stream):
        """Let torch's copies come behind what the stream has been given: torch itself cannot."""
        if stream not in (sim.HOST, 0):
            _gpu.finish(stream)
        return contextlib.nullcontext()


add_device_adapter(lambda x: _gpu is not None and isinstance(x, torch.Tensor), _Adapter())
