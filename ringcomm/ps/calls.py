"""Functions of the user that run at the servers, a client's side: marked, and called."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from ringcomm.ps import plain
from ringcomm.ps.client import Ask
from ringcomm.ps.frames import Kind
from ringcomm.ps.functions import register
from ringcomm.ps.future import Future
from ringcomm.ps.job import Session, require_not_begun

if TYPE_CHECKING:
    from ringcomm.ps.link import Delivery
    from ringcomm.ps.table import Table

F = TypeVar("F", bound=Callable[..., Any])


def function(f: F) -> F:
    """Mark a function that servers can run on the blocks of a table: table.call(name, ...).

    To be marked on all ranks before ps.init(). It is called as f(values, **arguments), where
    `values` is one block of the table, flat: shape (elements,), of the table's dtype. It may change
    them in place, and return what table.call() is to tell. While it runs its server does nothing
    else; of ringcomm it must call nothing.

    Raises:
        ConfigError: ps.init() has run already, or another function has this name.
    """
    require_not_begun("ps.function", "servers learn of it then")
    register(f)
    return f


def call(current: Session, table: Table, name: str, arguments: dict[str, Any]) -> Future[list[Any]]:
    """Run a function on every block of a table; see Table.call()."""
    label = f"call[{table.name}]"
    require_known(label, name, current.functions)
    body = plain.packed(f"{label}: arguments of {name}()", [name, arguments])
    results: dict[int, Any] = {}

    def noting(part: int) -> Callable[[Delivery], None]:
        def note(reply: Delivery) -> None:
            results[part] = plain.unpacked(reply.body)

        return note

    asks = [
        Ask(
            Kind.CALL,
            (table.number, part),
            body=table.staged(body, part),
            on_reply=noting(part),
        )
        for part in range(table.n_partitions)
    ]
    client = current.client
    future = Future(
        client, label, len(asks), lambda: [results[part] for part in sorted(results)],
        client.timestamp(),
    )  # fmt: skip
    client.ask(asks, future)
    return future


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
