"""prterun lets in connections of its own user: PMIx believes who a connection says it is."""

import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from harness import DEADLINE_S
from other_users import AS_ANOTHER, IS_ROOT

from ringcomm.launched.launcher_door import with_door

LISTENS = """
import select, socket, sys
is_6 = ":" in sys.argv[1]
family = socket.AF_INET6 if is_6 else socket.AF_INET
with socket.create_server((sys.argv[1], 0), family=family, dualstack_ipv6=is_6) as listener:
    listener.setblocking(False)
    print(listener.getsockname()[1], flush=True)
    while True:
        select.select([listener], [], [])
        try:
            with listener.accept()[0] as let_in:
                let_in.sendall(b"in")
        except BlockingIOError:
            pass
"""
KNOCKS = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as at:
    try:
        print(at.recv(2).decode())
    except ConnectionResetError:
        print()
"""
PLAIN = [os.path.realpath(sys.executable), "-I", "-S", "-c"]


@contextmanager
def listening(name, address, folder):
    """Yield the port of a process of this name that has the library."""
    program = folder / name
    program.symlink_to(PLAIN[0])
    argv = [program, *PLAIN[1:], LISTENS, address]
    env = {"LD_PRELOAD": with_door("")}
    with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()


def knock(address, port, who=()):
    argv = [*who, "/usr/bin/python3" if who else PLAIN[0], *PLAIN[1:], KNOCKS, address, port]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_connection_of_the_same_user_is_let_in(address, tmp_path):
    with listening("prterun", address, tmp_path) as port:
        assert knock(address, port) == "in"


@pytest.mark.skipif(
    not IS_ROOT or not Path("/usr/bin/python3").exists(), reason="no other user can be tried"
)
@pytest.mark.parametrize(
    ("name", "bound", "address", "answer"),
    [
        ("prterun", "127.0.0.1", "127.0.0.1", ""),
        ("prterun", "::", "127.0.0.1", ""),  # IPv4 in IPv6
        ("prterun", "::1", "::1", ""),
        ("another", "127.0.0.1", "127.0.0.1", "in"),  # ranks may serve whom they like
    ],
)
def test_a_connection_of_another_user_is_closed_before_a_byte_is_read(
    name, bound, address, answer, tmp_path
):
    with listening(name, bound, tmp_path) as port:
        assert knock(address, port, AS_ANOTHER) == answer
        assert knock(address, port) == "in"  # it still listens


def test_the_library_is_the_last_of_those_that_the_user_has(tmp_path):
    assert with_door("/a.so:/b.so") == f"/a.so:/b.so:{with_door('')}"
