"""What counts as an integer in arguments: whatever operator.index() takes, but no bool.

So numpy's integers do, arrays of no dimension, and tensors of one integer; floats do not.
"""

from __future__ import annotations

import operator
from typing import Any


def is_integer(value: Any) -> bool:
    if isinstance(value, bool):
        return False
    try:
        operator.index(value)
    except TypeError:
        return False
    return True
