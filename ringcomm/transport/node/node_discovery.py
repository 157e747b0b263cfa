"""The ranks of a host find out which of them form a node, and begin to watch each other."""

from __future__ import annotations

import array
import contextlib
import ctypes
import os
import socket
import struct
from dataclasses import dataclass, field
from typing import Any, Protocol

from ringcomm.transport.node.divide_host import node_of, separations
from ringcomm.transport.node.neighbours import Neighbour, Neighbours, Offer

# --- descriptors that are passed on ---------------------------------------------------------------
# In a container with its own users, or in a sandbox, a rank may not open /proc/PID/fd/N of another
# rank. A message between Unix sockets carries descriptors without that right. The sockets have
# abstract names, which leave no file and are valid within one network namespace. Every user sees
# them in /proc/net/unix, and can send. So a filter of the kernel drops what lacks the inbox's key.
# It does not go by the sender's uid: ranks of a container with its own users have another one.
_TOKEN = struct.Struct("=Q")
_CREDENTIALS = struct.Struct("=3i")  # pid, uid, gid
_MOST = 8  # descriptors in a message
_KEY_NBYTES = 8
_SO_ATTACH_FILTER = 26
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06  # of BPF: a big-endian word at an offset


class Inbox:
    """The socket at which this rank receives descriptors.

    `address` is a secret of the job: the name of the socket, and a key that no other user sees.
    Raises OSError if no socket can be made.
    """

    def __init__(self) -> None:
        name, self._key = f"\0ringcomm-{os.urandom(16).hex()}", os.urandom(_KEY_NBYTES)
        self.address = f"{name}/{self._key.hex()}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        with contextlib.suppress(OSError):  # a sandbox without filters
            self._let_in_with_key()
        self._socket.bind(name)

    def _let_in_with_key(self) -> None:
        one, two = struct.unpack(">2I", self._key)
        program = b"".join(
            struct.pack("=HBBI", *step)
            for step in [
                (_LOAD, 0, 0, 0),
                (_JUMP_IF_EQUAL, 0, 3, one),
                (_LOAD, 0, 0, 4),
                (_JUMP_IF_EQUAL, 0, 1, two),
                (_RETURN, 0, 0, _KEY_NBYTES + _TOKEN.size + 1),  # so many bytes are kept
                (_RETURN, 0, 0, 0),
            ]
        )
        code = ctypes.create_string_buffer(program)
        facts = struct.pack("@HP", 6, ctypes.addressof(code))
        self._socket.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, facts)

    def take(self, token: int) -> tuple[int, list[int]]:
        """Return the giver's pid and descriptors, which the caller must close; never waits.

        The pid is the one that this process sees; it is 0 if the giver is in a pid namespace that
        is invisible here. Drops messages of others. Raises OSError if no message with this
        token is there, or if `ulimit -n` allows no more descriptors.
        """
        room = socket.CMSG_SPACE(4 * _MOST) + socket.CMSG_SPACE(_CREDENTIALS.size)
        while True:
            data, ancillary, flags, _ = self._socket.recvmsg(
                _KEY_NBYTES + _TOKEN.size + 1, room, socket.MSG_CMSG_CLOEXEC
            )
            pid, descriptors = _unpacked(ancillary)
            is_for_us = data == self._key + _TOKEN.pack(token)
            if is_for_us and not flags & socket.MSG_CTRUNC:
                return pid, descriptors
            for each in descriptors:
                os.close(each)
            if is_for_us:
                raise OSError("descriptors were lost on the way: `ulimit -n` allows no more")

    def close(self) -> None:
        """Close the socket, and the descriptors that were not taken."""
        self._socket.close()


def give(address: str, token: int, descriptors: list[int]) -> None:
    """Send descriptors to an Inbox; they stay open here, too. Never waits.

    Raises OSError if the inbox cannot be reached, or is full.
    """
    name, _, key = address.partition("/")
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        sender.sendmsg([bytes.fromhex(key), _TOKEN.pack(token)], [rights], 0, name)


def _unpacked(ancillary: list[tuple[int, int, bytes]]) -> tuple[int, list[int]]:
    pid, descriptors = 0, array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(data[: len(data) // 4 * 4])
        elif level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
            with contextlib.suppress(struct.error):
                pid, _, _ = _CREDENTIALS.unpack(data)
    return pid, list(descriptors)


class Comm(Protocol):
    """The part of an mpi4py communicator that this module uses."""

    rank: int
    size: int

    def allgather(self, sendobj: Any) -> list[Any]: ...

    def Barrier(self) -> None: ...


@dataclass(frozen=True)
class Candidate:
    """The data that a rank of this host sends to the others."""

    rank: int  # its rank in the job
    offer: Offer  # descriptors for the others
    missing: dict[int, str] = field(default_factory=dict)  # unreachable rank -> why
    address: str = ""  # address of its Inbox; "" if it has none
    unsent: dict[int, str] = field(default_factory=dict)  # rank that did not get `offer` -> why


def meet(
    comm: Comm, rank: int, offer: Offer, neighbours: Neighbours
) -> tuple[list[int], list[str]]:
    """Find the ranks of this node, and watch them; collective over `comm`.

    MPI recognises a host by its name. The ranks of such a host may be in containers or sandboxes,
    and unable to open each other's descriptors. Then ranks hand descriptors over; ranks for which
    that fails, too, form nodes of their own.

    Args:
        comm: the ranks that MPI reports on this host.
        rank: this rank, in the job.
        offer: this rank's descriptors, for the others to open.
        neighbours: the object to which the other ranks of this node are added.

    Returns:
        The ranks of this node, this one included; and texts, on the first rank of the host only,
        that say for each further node why it is separate.

    Cost: two allgathers if every rank can open the descriptors of the others.
    """
    everyone = comm.allgather(Candidate(rank, offer))
    missing = _reach(everyone, rank, neighbours)
    inbox = _inbox_or_none(missing) if missing else None
    mine = Candidate(rank, offer, missing, "" if inbox is None else inbox.address)
    # Once this call returns, all ranks have opened the descriptors, so ranks may close them.
    everyone = comm.allgather(mine)
    if any(each.missing for each in everyone):
        everyone = comm.allgather(_hand_over(comm, everyone, inbox, neighbours))
    if inbox is not None:
        inbox.close()
    others = {each.rank for each in everyone}
    opened = {each.rank: others - {each.rank} - set(each.missing) for each in everyone}
    node = node_of(rank, opened)
    for other in set(neighbours.ranks).difference(node):
        neighbours.drop(other)
    return node, separations(opened, _reasons(everyone)) if comm.rank == 0 else []


def _reach(everyone: list[Candidate], rank: int, neighbours: Neighbours) -> dict[int, str]:
    """Watch the ranks whose descriptors this process can open; return the others, and why."""
    missing = {}
    for each in everyone:
        if each.rank == rank:
            continue
        try:
            neighbours.add(each.rank, Neighbour.reached(each.offer))
        except (OSError, RuntimeError) as error:
            missing[each.rank] = str(error)
    return missing


def _inbox_or_none(missing: dict[int, str]) -> Inbox | None:
    try:
        return Inbox()
    except OSError as error:
        for rank, why in missing.items():
            missing[rank] = f"{why}; no socket to take descriptors: {error}"
        return None


def _hand_over(
    comm: Comm, everyone: list[Candidate], inbox: Inbox | None, neighbours: Neighbours
) -> Candidate:
    """Send descriptors to the ranks that lack them; take the ones that this rank lacks.

    In every round each rank sends to at most one other, so no inbox is ever full.
    """
    here = comm.rank
    mine = everyone[here]
    missing, unsent = dict(mine.missing), {}
    for distance in range(1, comm.size):
        to, source = (everyone[(here + step) % comm.size] for step in (distance, -distance))
        if mine.rank in to.missing and to.address:
            try:
                give(to.address, mine.offer.nonce, mine.offer.descriptors)
            except OSError as error:
                unsent[to.rank] = f"they could not be handed over: {error}"
        comm.Barrier()  # now the descriptors are in the inboxes
        if source.rank in missing and inbox is not None:
            problem = _take(source, inbox, neighbours)
            if problem is None:
                del missing[source.rank]
            else:
                missing[source.rank] += f"; {problem}"
    return Candidate(mine.rank, mine.offer, missing, mine.address, unsent)


def _take(source: Candidate, inbox: Inbox, neighbours: Neighbours) -> str | None:
    """Take a rank's descriptors from the inbox, and watch that rank; return the problem, if any."""
    try:
        seen_pid, descriptors = inbox.take(source.offer.nonce)
        neighbours.add(source.rank, Neighbour.handed(source.offer, seen_pid, descriptors))
    except BlockingIOError:
        return "no descriptors were handed over"
    except (OSError, RuntimeError) as error:
        return f"the descriptors that were handed over are of no use: {error}"
    return None


def _reasons(everyone: list[Candidate]) -> dict[int, dict[int, str]]:
    """Return, for each rank, the ranks that it could not reach -> the reasons of both sides."""
    unsent = {(each.rank, to): why for each in everyone for to, why in each.unsent.items()}
    return {
        each.rank: {
            other: "; ".join(filter(None, (why, unsent.get((other, each.rank)))))
            for other, why in each.missing.items()
        }
        for each in everyone
    }
