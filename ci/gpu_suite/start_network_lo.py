"""Puts up the network interface "lo" if it is down, as it may be on a machine without network.

The ranks of one machine meet over it. Like `ip link set lo up`, which such a machine may lack.
"""

import fcntl
import socket
import struct

GET_FLAGS, SET_FLAGS, UP = 0x8913, 0x8914, 1  # SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP
REQUEST = struct.Struct("16sh22x")  # of the kernel, "ifreq": a name, then flags


def main():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        answer = fcntl.ioctl(asker, GET_FLAGS, REQUEST.pack(b"lo", 0))
        _, flags = REQUEST.unpack(answer)
        if not flags & UP:
            fcntl.ioctl(asker, SET_FLAGS, REQUEST.pack(b"lo", flags | UP))


if __name__ == "__main__":
    main()
