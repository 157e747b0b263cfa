"""Input (events) and output (actions) of state_machine.py. Pure."""

from __future__ import annotations

from typing import NamedTuple

from ringcomm.transport.membership.messages import MembershipMessage
from ringcomm.transport.membership.view import View


# --- events ---------------------------------------------------------------------------------------
class Lost(NamedTuple):
    processes: frozenset[int]


class Heard(NamedTuple):
    source: int
    message: MembershipMessage


class Arrive(NamedTuple):
    """This process, which was outside, may become a member."""


class Resize(NamedTuple):
    """The view is to have this number of members, from the next agreement on."""

    size: int


class Heal(NamedTuple):
    """This rank has stopped its operations, as one of them had failed or others want to join."""


class Cleared(NamedTuple):
    """This process has done what the action Clear asks for."""


class Finish(NamedTuple):
    """The run of this rank is done."""


class Leave(NamedTuple):
    """This rank begins no operation any more."""


class Withdraw(NamedTuple):
    """This process takes part no more: it gives up, or ends."""


class GiveUp(NamedTuple):
    """This process waits in vain, and may not have the others killed: the job ends."""


class EvictRanks(NamedTuple):
    """These processes hang, and must be killed."""

    processes: frozenset[int]


Event = (
    Lost
    | Heard
    | Arrive
    | Resize
    | Heal
    | Cleared
    | Finish
    | Leave
    | Withdraw
    | GiveUp
    | EvictRanks
)


# --- actions --------------------------------------------------------------------------------------
class SendMessage(NamedTuple):
    to: tuple[int, ...]
    message: MembershipMessage


class Clear(NamedTuple):
    """Clear the shared memory of this process, then report Cleared."""


class Install(NamedTuple):
    """Work in this view."""

    view: View


class EndRun(NamedTuple):
    """The run is over on all ranks."""


class GoneOn(NamedTuple):
    """Another rank goes on without this one."""

    process: int


class KillHere(NamedTuple):
    """Kill those of these processes that are on this host."""

    processes: frozenset[int]


Action = SendMessage | Clear | Install | EndRun | GoneOn | KillHere
