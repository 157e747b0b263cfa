"""Runs functions of the user at the servers, where the values are; a server's side.

One runs on a copy of a block, which becomes the block's values when it has returned: no pull sees
half of what it does, and one that raises has changed nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ringcomm.errors import ConfigError, RingcommError
from ringcomm.ps.protocol import function_arguments

if TYPE_CHECKING:
    from ringcomm.ps.protocol.link import Delivery
    from ringcomm.ps.server.core.unit import Unit
    from ringcomm.ps.server.dense.partition import DensePartition
    from ringcomm.ps.server.replies import Replies

Function = Callable[..., Any]
_registered: Final[dict[str, Function]] = {}


def register(function: Function) -> None:
    """Make a function known to servers by its name.

    Raises:
        ConfigError: there is one of this name.
    """
    name = function.__name__
    if name in _registered:
        raise ConfigError(
            f"ps.function: there are two functions {name!r}, in {_registered[name].__module__} and "
            f"{function.__module__}. Give one of them another name"
        )
    _registered[name] = function


def registered() -> dict[str, Function]:
    return dict(_registered)


class Calls:
    """Runs functions on the blocks of one server.

    Args:
        index: of the server.
        reply: sends answers.
        functions: that it has, by name.
    """

    def __init__(self, index: int, reply: Replies, functions: Mapping[str, Function]) -> None:
        self._index, self._reply = index, reply
        self._functions = functions

    def on_call(self, request: Delivery, part: DensePartition, unit: Unit) -> None:
        """Run a function on one block, once; reply with what it returns."""
        if unit.came_before(request):
            raise RingcommError(
                f"call[{part.spec.name}]: it came twice, and was carried out the first time; what "
                "it returned then is not known any more"
            )
        name, arguments = function_arguments.unpacked(request.body)
        function = self._functions.get(name)
        if function is None:
            raise KeyError(
                f"call[{part.spec.name}]: server {self._index} has no function {name!r}, "
                f"but {sorted(self._functions)}"
            )
        body = self._run(part, function, arguments, request.header.partition)
        header = request.header
        part.note_last(header.origin, header.sequence)
        self._reply(request, body=body, clock=part.version)

    def _run(
        self, part: DensePartition, function: Function, arguments: dict[str, Any], number: int
    ) -> Any:
        label = f"call[{part.spec.name}]: {function.__name__}()"
        where = f"server {self._index}, block {number}"
        if not part.is_ready:
            raise RingcommError(f"{label}: {where} has no values yet: the chief sends them")
        began_at = time.perf_counter()
        before = part.values
        values = before.copy()
        try:
            result = function_arguments.packed(f"{label} returned", function(values, **arguments))
        except (Exception, SystemExit) as error:  # sys.exit() would end one server after the other
            raise RingcommError(
                f"{label} raised {type(error).__name__}: {error} (at {where}, elements "
                f"{part.start} to {part.stop}, which it has not changed)"
            ) from error
        if not np.array_equal(before.view(np.uint8), values.view(np.uint8)):
            part.replace(values)
        part.counts.calls += 1
        part.counts.apply_s += time.perf_counter() - began_at
        return result
