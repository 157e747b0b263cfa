"""Counters of the kernel for the TCP connections of some processes of this host: sock_diag(7).

Any process of the host may ask; the job takes no part in it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections import defaultdict
from collections.abc import Collection, Iterator
from typing import Final

from ringcomm.launch.watch.slow_link import Traffic

_NETLINK_SOCK_DIAG: Final = 4
_SOCK_DIAG_BY_FAMILY, _NLMSG_ERROR, _NLMSG_DONE = 20, 2, 3
_REQUEST_AND_DUMP: Final = 0x301
_ESTABLISHED: Final = 1 << 1  # of the states of TCP
_INFO: Final = 2  # the attribute with struct tcp_info
_HEADER: Final = struct.Struct("=IHHII")
_QUESTION: Final = struct.Struct("=BBBxI48x")  # struct inet_diag_req_v2
_ANSWER_SIZE: Final = 72  # struct inet_diag_msg
_SIZES: Final = {socket.AF_INET: 4, socket.AF_INET6: 16}
# Where struct tcp_info has them; old kernels have a shorter one.
_RTT_US, _BYTES_ACKED, _BUSY_US, _RWND_LIMITED_US, _INFO_SIZE = 68, 120, 168, 176, 184


def traffic_of(pids: Collection[int]) -> dict[tuple[str, str], Traffic]:
    """Return (own address, other address) -> the sum of these processes' connections.

    Returns {} if the kernel does not answer, as in some containers.
    """
    inodes = {inode for pid in pids for inode in _sockets_of(pid)}
    found: defaultdict[tuple[str, str], list[Traffic]] = defaultdict(list)
    with contextlib.suppress(OSError):
        for family in _SIZES:
            for inode, ends, traffic in _connections(family):
                if inode in inodes and not ends[1].startswith(("127.", "::1")):
                    found[ends].append(traffic)
    return {ends: sum(each[1:], each[0]) for ends, each in found.items()}


def _sockets_of(pid: int) -> Iterator[int]:
    folder = f"/proc/{pid}/fd"
    with contextlib.suppress(OSError):  # it has ended
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):
                target = os.readlink(f"{folder}/{name}")
                if target.startswith("socket:["):
                    yield int(target[8:-1])


def _connections(family: socket.AddressFamily) -> Iterator[tuple[int, tuple[str, str], Traffic]]:
    """Yield inode, (own address, other address) and counters of each connection of this host."""
    question = _QUESTION.pack(family, socket.IPPROTO_TCP, 1 << (_INFO - 1), _ESTABLISHED)
    head = _HEADER.pack(_HEADER.size + len(question), _SOCK_DIAG_BY_FAMILY, _REQUEST_AND_DUMP, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _NETLINK_SOCK_DIAG) as link:
        link.settimeout(1.0)
        link.send(head + question)
        while True:
            data = link.recv(1 << 16)
            while data:
                size, kind, *_ = _HEADER.unpack_from(data)
                if kind in (_NLMSG_DONE, _NLMSG_ERROR):
                    return
                body, data = data[_HEADER.size : size], data[(size + 3) & ~3 :]
                if (traffic := _counters(body[_ANSWER_SIZE:])) is not None:
                    (inode,) = struct.unpack_from("=I", body, _ANSWER_SIZE - 4)
                    yield inode, _ends(family, body), traffic


def _ends(family: socket.AddressFamily, body: bytes) -> tuple[str, str]:
    size = _SIZES[family]
    own, other = body[8 : 8 + size], body[24 : 24 + size]
    return tuple(  # type: ignore[return-value]  # two
        socket.inet_ntop(family, each).removeprefix("::ffff:") for each in (own, other)
    )


def _counters(attributes: bytes) -> Traffic | None:
    while len(attributes) >= 4:
        size, kind = struct.unpack_from("=HH", attributes)
        if size < 4:
            return None
        info, attributes = attributes[4:size], attributes[(size + 3) & ~3 :]
        if kind == _INFO and len(info) >= _INFO_SIZE:
            (rtt_us,) = struct.unpack_from("=I", info, _RTT_US)
            (nbytes,) = struct.unpack_from("=Q", info, _BYTES_ACKED)
            (busy_us,) = struct.unpack_from("=Q", info, _BUSY_US)
            (limited_us,) = struct.unpack_from("=Q", info, _RWND_LIMITED_US)
            return Traffic(nbytes, max(busy_us - limited_us, 0), rtt_us)
    return None
