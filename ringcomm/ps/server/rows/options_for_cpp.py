"""Makes the options of a hash table for the C++ core."""

from __future__ import annotations

from typing import Any

import numpy as np

from ringcomm import _core
from ringcomm.arrays.dtypes import DTYPES
from ringcomm.ps.initializers import Initializer, zeros
from ringcomm.ps.optim import Updater
from ringcomm.ps.row_policies import Admit, Evict


def row_spec(
    dim: int,
    updater: Updater,
    *,
    table: int = 0,
    dtype: str = "float32",
    init: Initializer | None = None,
    admit: Admit | None = None,
    evict: Evict | None = None,
) -> _core.RowSpec:
    """Return the options from which `_core.Shard` makes partitions.

    Args:
        dim: columns of a row.
        updater: its class, and those of its hyper-parameters that decide on state, are fixed.
        table: initializers.table_number(name).
        dtype: of values and state, float32 or float64.
        init: zeros() if not given.
        admit: every key at once if not given.
        evict: no row if not given.
    """
    admission: dict[str, Any] = {} if admit is None else admit.to_json()
    init = zeros() if init is None else init
    if evict is not None:
        admission |= {"ttl_s": evict.ttl_s, "is_lfu": evict.policy == "lfu"}
        admission |= {} if evict.max_rows is None else {"max_rows": evict.max_rows}
    return _core.RowSpec(
        dim=dim,
        dtype=DTYPES[np.dtype(dtype).name].kernel,
        code=updater.code,
        hyper=updater.hyper,
        init_code=init.code,
        init_parameters=init.packed,
        seed=init.seed,
        table=table,
        **admission,
    )
