"""Descriptors that pass from one process of a host to another, where /proc does not let them.

A container with users of its own, or a sandbox, may refuse to open /proc/PID/fd/N of another rank.
A descriptor in a message between Unix sockets needs no such right. Abstract names leave no file,
and end where the network namespace does.
"""

from __future__ import annotations

import array
import contextlib
import os
import secrets
import socket
import struct

_TOKEN = struct.Struct("=Q")
_CREDENTIALS = struct.Struct("=3i")  # pid, uid, gid
_MOST = 8  # descriptors in a message


class Inbox:
    """Where this rank takes descriptors.

    Attributes:
        address: for give(); nobody but the ranks of the job is to know it.

    Raises:
        OSError: there is no socket to be had.
    """

    def __init__(self) -> None:
        self.address = f"\0ringcomm-{secrets.token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind(self.address)

    def take(self, token: int) -> tuple[int, list[int]]:
        """Return the pid of who gave with this token, and the descriptors, which are the caller's.

        It has been given by now: this does not wait. The pid is what this process sees; 0 if the
        other is in a pid namespace that it does not see.

        Raises:
            OSError: nothing has come, or this process may have no more descriptors.
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
        """Take nothing more; what has come is closed."""
        self._socket.close()


def give(address: str, token: int, descriptors: list[int]) -> None:
    """Send descriptors to an Inbox; they stay open here as well. Never waits.

    Raises:
        OSError: it cannot be reached, or has no room.
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
