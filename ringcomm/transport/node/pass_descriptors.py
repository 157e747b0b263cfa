"""Passes descriptors between processes of a host that may not open them through /proc.

In a container with its own users, or in a sandbox, a rank may not open /proc/PID/fd/N of another
rank. A message between Unix sockets carries descriptors without that right. The sockets have
abstract names, which leave no file and are valid within one network namespace.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
import struct

_TOKEN = struct.Struct("=Q")
_CREDENTIALS = struct.Struct("=3i")  # pid, uid, gid
_MOST = 8  # descriptors in a message


class Inbox:
    """The socket at which this rank receives descriptors. `address` is a secret of the job.

    Raises OSError if no socket can be made.
    """

    def __init__(self) -> None:
        self.address = f"\0ringcomm-{os.urandom(16).hex()}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind(self.address)

    def take(self, token: int) -> tuple[int, list[int]]:
        """Return the giver's pid and descriptors, which the caller must close; never waits.

        The pid is the one that this process sees; it is 0 if the giver is in a pid namespace that
        is invisible here. Drops messages with other tokens. Raises OSError if no message with this
        token is there, or if `ulimit -n` allows no more descriptors.
        """
        room = socket.CMSG_SPACE(4 * _MOST) + socket.CMSG_SPACE(_CREDENTIALS.size)
        while True:
            data, ancillary, flags, _ = self._socket.recvmsg(
                _TOKEN.size + 1, room, socket.MSG_CMSG_CLOEXEC
            )
            pid, descriptors = _unpacked(ancillary)
            if data == _TOKEN.pack(token) and not flags & socket.MSG_CTRUNC:
                return pid, descriptors
            for each in descriptors:
                os.close(each)
            if flags & socket.MSG_CTRUNC:
                raise OSError("descriptors were lost on the way: `ulimit -n` allows no more")

    def close(self) -> None:
        """Close the socket, and the descriptors that were not taken."""
        self._socket.close()


def give(address: str, token: int, descriptors: list[int]) -> None:
    """Send descriptors to an Inbox; they stay open here, too. Never waits.

    Raises OSError if the inbox cannot be reached, or is full.
    """
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        sender.sendmsg([_TOKEN.pack(token)], [rights], 0, address)


def _unpacked(ancillary: list[tuple[int, int, bytes]]) -> tuple[int, list[int]]:
    pid, descriptors = 0, array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(data[: len(data) // 4 * 4])
        elif level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
            with contextlib.suppress(struct.error):
                pid, _, _ = _CREDENTIALS.unpack(data)
    return pid, list(descriptors)
