"""numpy arrays; bfloat16 needs ml_dtypes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringcomm.arrays.base import ArrayAdapter, Flat
from ringcomm.arrays.dtypes import DTYPES, DType
from ringcomm.arrays.self_overlap import overlaps

_seen: dict[np.dtype[Any], DType] = {}  # numpy takes 8 us to name a dtype


class _NumpyAdapter(ArrayAdapter):
    kind = "numpy"

    def dtype(self, x: NDArray[Any]) -> DType:
        seen = _seen.get(x.dtype) if type(x) is np.ndarray else None
        return seen or self._checked(x)

    def _checked(self, x: NDArray[Any]) -> DType:
        if hasattr(x, "mask"):  # a masked array; its class is in numpy.ma, an import of 20 ms
            raise TypeError(
                "cannot communicate a masked array: its mask would be lost. Use .filled()"
            )
        if not x.dtype.isnative:
            raise TypeError(
                f"cannot communicate dtype {x.dtype.str}: foreign byte order. "
                "Use x.astype(x.dtype.newbyteorder('='))"
            )
        known = DTYPES.get(x.dtype.name)
        if known is None:
            raise TypeError(f"cannot communicate dtype {x.dtype}; known: {', '.join(DTYPES)}")
        _seen[x.dtype] = known
        return known

    def is_contiguous(self, x: NDArray[Any]) -> bool:
        return x.flags.c_contiguous and x.flags.aligned

    def copy(self, x: NDArray[Any]) -> NDArray[Any]:
        return np.array(x, order="C", copy=True, subok=False)

    def empty(self, like: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
        return np.empty(shape, like.dtype)

    def make(self, dtype: DType, shape: tuple[int, ...]) -> NDArray[Any]:
        if dtype.name != "bfloat16":
            return np.empty(shape, dtype.name)
        try:
            from ml_dtypes import bfloat16
        except ModuleNotFoundError as error:
            raise TypeError("numpy has bfloat16 only with: pip install ml_dtypes") from error
        return np.empty(shape, bfloat16)

    def flat(self, x: NDArray[Any]) -> Flat:
        return Flat(np.asarray(x).reshape(-1).view(np.uint8), self.dtype(x))

    def assign(self, target: NDArray[Any], source: NDArray[Any]) -> None:
        target[...] = source

    def require_writable(self, x: NDArray[Any]) -> None:
        if not x.flags.writeable:
            raise ValueError("cannot write in place: the array is read-only. Pass a writable one")
        # The last dimension is of bytes, so that elements that overlap in part are found, too.
        if not x.flags.c_contiguous and overlaps((*x.shape, x.itemsize), (*x.strides, 1)):
            raise ValueError("cannot write in place: elements overlap in memory. Pass a copy")


NUMPY = _NumpyAdapter()
