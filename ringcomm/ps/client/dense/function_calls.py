"""ps.function() and Table.call(): runs functions of the user at the servers; a client's side."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from ringcomm.ps.client.request import Request
from ringcomm.ps.protocol import function_arguments
from ringcomm.ps.protocol.frames import FrameKind
from ringcomm.ps.server.user_functions import register
from ringcomm.ps.session import require_not_begun

if TYPE_CHECKING:
    from ringcomm.ps.client.dense.blocks import Blocks
    from ringcomm.ps.client.future import Future

F = TypeVar("F", bound=Callable[..., Any])


def function(f: F) -> F:
    """Mark a function that servers can run on the blocks of a table: table.call(name, ...).

    It must be marked on all ranks before ps.init(). It is called as f(values, **arguments), where
    `values` is one block of the table, flat: shape (elements,), of the table's dtype. It may change
    them in place, and table.call() returns what it returns. While it runs its server does nothing
    else; it must call nothing of ringcomm.

    Raises:
        ConfigError: ps.init() has run already, or another function has this name.
    """
    require_not_begun("ps.function", "servers learn of it then")
    register(f)
    return f


def call_function(blocks: Blocks, name: str, arguments: dict[str, Any]) -> Future[list[Any]]:
    """Run a function on every block of a table; see Table.call()."""
    label = f"call[{blocks.spec.name}]"
    require_known(label, name, blocks.session.functions)
    body = function_arguments.packed(f"{label}: arguments of {name}()", [name, arguments])
    requests = [
        Request(FrameKind.CALL, (blocks.number, part), body=blocks.staged(part, body))
        for part in range(blocks.spec.partitions)
    ]
    return blocks.client.gather(
        label, requests, lambda reply: function_arguments.unpacked(reply.body)
    )


def require_known(label: str, name: str, functions: dict[int, tuple[str, ...]]) -> None:
    """Raise KeyError unless all servers have a function.

    Args:
        label: for the error.
        name: of the function.
        functions: names of those that each rank has marked; of servers, and of this rank as -1.
    """
    lacking = [rank for rank, names in functions.items() if rank >= 0 and name not in names]
    if not lacking:
        return
    own, theirs = list(functions[-1]), list(functions[lacking[0]])
    raise KeyError(
        f"{label}: no function {name!r} on rank {lacking[0]}, a server, which has {theirs}; this "
        f"rank has {own}. Mark it with @ps.function before ps.init() in the script of every rank"
    )
