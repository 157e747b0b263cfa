"""One core of a server of the parameter server, step by step."""

from ps_simulation import Members
from ps_simulation_message_types import Request

from ringcomm.ps.control.agreement import Member
from ringcomm.ps.control.commands import Migrate
from ringcomm.ps.placement.partitions import Move
from ringcomm.ps.protocol.frames import FrameHeader, FrameKind
from ringcomm.ps.server.core import events as on
from ringcomm.ps.server.core.core import Core
from ringcomm.ps.server.core.core_table import ServedTable
from ringcomm.ps.server.core.unit import AppliedHere, Unit

KEY = (1, 0)


def core_of(mode, workers=(1, 2), *, index=0, is_ready=True):
    """Return server 0 or 1 of two; server 0 leads, and has the one partition of a dense table."""
    core = Core(index, lambda: Members(workers, (9,), (0, 1), 0))
    core.add_table(ServedTable(1, "w", mode, True, [0]))
    if index == 0:
        core.add_unit(Unit(KEY, mode, AppliedHere(), workers, is_ready=is_ready))
    return core


def push(worker, sequence, *, view=0, clock=0):
    header = FrameHeader(
        FrameKind.PUSH, origin=worker, sequence=sequence, view=view, table=1, clock=clock
    )
    return Request(worker, header, body=f"of {worker}")


def arrive(core, request, *, is_held=False):
    """Let a push arrive, and be decoded if it is carried out; return the names of what follows."""
    actions = core.handle(on.Arrived(request, KEY, request.header.clock), 0.0)
    if names(actions) == ["Carry"]:
        event = on.Contributed(KEY, request, request.body, is_held=is_held)
        actions = core.handle(event, 0.0)
    return names(actions)


def give(core, what, **more):
    """Give an order of a migration; return the names of what follows."""
    return names(core.handle(order(what, **more), 0.0))


def order(what, **more):
    header = FrameHeader(FrameKind.ORDER)
    return on.MoveOrdered(Request(0, header), what, KEY, more)


def ask_for_move(core, rank=1):
    """Let a rank ask that the partition goes to server 1; return what follows."""
    move = Migrate((Move(KEY, 0, 1),), rank, 1)
    return core.handle(on.Asked(push(rank, 1), move), 0.0)


def answer(core, tell, content=None):
    """Let a server answer an order; return what follows."""
    member = Member(tell.dest, is_server=True)
    return core.handle(on.Answered(member, tell.step, content), 0.0)


def leave(core, worker):
    return names(core.handle(on.Left(worker), 0.0))


def names(actions):
    return [type(action).__name__ for action in actions]


def freeze(core):
    """Let the partition stand still, and be sent to server 1."""
    assert give(core, "freeze") == ["Close", "Reply"]
    assert give(core, "give", moves=[(0, 1)]) == ["Export"]
