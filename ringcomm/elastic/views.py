"""The view of this process, and the registry of those who must know that there is a new one."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable

from ringcomm.engine.api.init_rank_size import engine
from ringcomm.engine.control.missed_commands import take_missed_commands
from ringcomm.transport.membership.view import View

_listeners: list[Callable[[], Callable[[], None] | None]] = []


def view() -> View:
    """Return the view in which this rank works: its number, and the members by rank.

    The number is how many processes were lost or have come, and how often the size was to change.
    A member has the rank that it had after init().
    """
    current: View = engine().transport.view
    return current


def on_new_view(listener: Callable[[], None]) -> None:
    """Call `listener` in each new view, after rank() and size() have changed.

    It runs on all ranks of the view, before the state is restored, in the order in which listeners
    were registered; it may communicate. Groups, process sets and samplers that were made for the
    old ranks can be made anew here. A method is called as long as its object lives.
    """
    is_method = inspect.ismethod(listener)
    _listeners.append(weakref.WeakMethod(listener) if is_method else lambda: listener)


def begin_in_new_view() -> None:
    """Take the commands that this rank missed meanwhile, and call the listeners. Collective."""
    take_missed_commands(in_new_view=True)
    tell_listeners()


def tell_listeners() -> None:
    for each in tuple(_listeners):
        listener = each()
        if listener is None:
            _listeners.remove(each)
        else:
            listener()
