"""torch tensors in host memory. Imported when the first tensor arrives, never before."""

from __future__ import annotations

import numpy as np
import torch

from ringcomm.arrays.base import AnyAdapter, ArrayAdapter, Flat
from ringcomm.arrays.dtypes import DTYPES, DType
from ringcomm.arrays.overlap import overlaps

_KNOWN = {getattr(torch, name): dtype for name, dtype in DTYPES.items() if hasattr(torch, name)}


class TorchTensors(AnyAdapter):
    """Base of the adapters of dense tensors, wherever they are. Results carry no autograd history.

    Attributes:
        device_type: "cpu" or "cuda".
    """

    device_type: str

    def dtype(self, x: torch.Tensor) -> DType:
        """Return the dtype. Raises TypeError if x is sparse, quantised or on another device."""
        if x.layout is not torch.strided:
            raise TypeError(f"cannot communicate a {x.layout} tensor: use .to_dense()")
        if x.device.type != self.device_type:
            raise TypeError(f"cannot communicate a tensor on {x.device} here. Use .cpu()")
        known = _KNOWN.get(x.dtype)
        if known is None:
            raise TypeError(f"cannot communicate dtype {x.dtype}; known: {', '.join(DTYPES)}")
        return known

    def is_contiguous(self, x: torch.Tensor) -> bool:
        """Return True for an aligned C-ordered tensor, no conjugation or negation pending."""
        is_aligned = x.data_ptr() % x.element_size() == 0
        return x.is_contiguous() and is_aligned and not x.is_conj() and not x.is_neg()

    def copy(self, x: torch.Tensor) -> torch.Tensor:
        """Return a C-ordered copy."""
        plain = x.detach().resolve_conj().resolve_neg()
        return plain.clone(memory_format=torch.contiguous_format)

    def empty(self, like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Return an uninitialised tensor of like's dtype."""
        return torch.empty(shape, dtype=like.dtype, device=like.device)

    def assign(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy source into target; autograd does not see it."""
        with torch.no_grad():
            target.copy_(source)

    def require_writable(self, x: torch.Tensor) -> None:
        """Raise ValueError for a tensor whose elements overlap (expand(), as_strided())."""
        if not x.is_contiguous() and overlaps(x.shape, x.stride()):
            raise ValueError("cannot write in place: elements overlap in memory. Pass a copy")

    def written(self, x: torch.Tensor) -> None:
        """Tell autograd, which refuses a backward through values that have changed since."""
        torch.autograd.graph.increment_version(x)


class _TorchAdapter(TorchTensors, ArrayAdapter):
    """ArrayAdapter of tensors in host memory."""

    kind = "torch"
    device_type = "cpu"

    def make(self, dtype: DType, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape, dtype=getattr(torch, dtype.name))

    def flat(self, x: torch.Tensor) -> Flat:
        dtype = self.dtype(x)
        return Flat(np.asarray(_Interface(x)), dtype)


class _Interface:
    """Shows a contiguous tensor's memory as bytes; keeps it alive, but not from being resized.

    Tensor.numpy() would let nobody resize the tensor from then on; DLPack takes 3 times as long.

    Raises:
        TypeError: x has less memory than its shape says, or none.
    """

    __slots__ = ("__array_interface__", "_storage")

    def __init__(self, x: torch.Tensor) -> None:
        self._storage = storage = x.untyped_storage()  # x may get another one at any time
        address, nbytes = x.data_ptr(), x.nbytes
        if nbytes and (not address or address + nbytes > storage.data_ptr() + storage.nbytes()):
            raise TypeError(
                f"cannot communicate a {type(x).__name__} {tuple(x.shape)} without memory: where "
                "its storage was resized, resize it back; of a DTensor, pass .to_local()"
            )
        self.__array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


TORCH = _TorchAdapter()
