"""prterun and prted let in their own user alone: PMIx believes who a connection says it is."""

import os
import shlex
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from harness import DEADLINE_S, run_command
from other_users import AS_ANOTHER, IS_ROOT

from ringcomm.launched import launcher_door
from ringcomm.launched.launcher_door import agent_with_door, with_door

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
        ("prted", "127.0.0.1", "127.0.0.1", ""),
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


@pytest.mark.parametrize("given", ["", "libm.so.6"])
@pytest.mark.parametrize(("name", "has_it"), [("prterun", False), ("prted", False), ("sh", True)])
def test_what_the_launcher_starts_does_not_inherit_the_library(name, has_it, given, tmp_path):
    program = tmp_path / name
    program.symlink_to("/bin/sh")
    done = subprocess.run(
        [program, "-c", "echo $LD_PRELOAD"],
        env={"LD_PRELOAD": with_door(given)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    )
    assert done.stdout.strip() == (with_door(given) if has_it else given)


# Stands for prted: says what it was given, and of the last word, which is a folder, its mode.
PRTED = 'echo "$LD_PRELOAD"; for each; do echo "$each"; done; stat -c %a "$each" 2>&1; exit 7'
PLACE = "prte_remote_tmpdir_base"


def start_prted(*arguments, agent=None, **environ):
    """Run the command that starts prted on another host; return how it ends, and its lines."""
    argv = [*shlex.split(agent or agent_with_door("sh")), "-c", PRTED, "prted", *arguments]
    done = run_command(argv, env={"PATH": os.environ["PATH"], **environ})
    assert done.returncode == 7, done
    return done, done.stdout.splitlines()


@pytest.mark.parametrize("given", ["", "libm.so.6"])
def test_prted_of_another_host_has_the_library_after_those_of_the_user(given):
    done, lines = start_prted(**({"LD_PRELOAD": given} if given else {}))
    assert (lines[0], done.stderr) == (with_door(given), "")


def test_a_host_that_lacks_the_library_says_so_and_starts_prted(tmp_path):
    missing = str(tmp_path / "door.so")
    done, lines = start_prted(agent=agent_with_door("sh").replace(with_door(""), missing))
    assert lines[0] == ""
    assert f"host {os.uname().nodename} has no {missing}" in done.stderr


@pytest.mark.parametrize(("mode", "is_there"), [(0o1777, True), (0o777, False), (0o700, True)])
def test_the_session_of_prted_is_in_a_new_folder_that_goes_with_it(mode, is_there, tmp_path):
    tmp_path.chmod(mode)
    others = "/tmp/ringcomm-prted-abcdefghij"  # of the daemon that has started this one
    given = ["--prtemca", PLACE, others, "--prtemca", "plm", "a b"]
    done, lines = start_prted(*given, TMPDIR=str(tmp_path))
    *words, folder, folder_mode = lines[1:]
    assert (words, folder_mode) == ([*given, "--prtemca", PLACE], "700")
    assert Path(folder).parent == (tmp_path if is_there else Path("/dev/shm"))
    assert not Path(folder).exists()
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("given", "environ"),
    [
        (["--prtemca", "prte_tmpdir_base", "/scratch"], {}),
        (["--prtemca", PLACE, "/scratch"], {}),
        ([], {f"PRTE_MCA_{PLACE}": "/scratch"}),
        ([], {"PRTE_MCA_prte_tmpdir_base": "/scratch"}),
        (["--daemonize"], {}),  # it would end before prted does
    ],
)
def test_the_users_place_for_the_session_is_kept(given, environ, tmp_path):
    _, lines = start_prted(*given, TMPDIR=str(tmp_path), **environ)
    assert lines[1 : 1 + len(given)] == given
    assert not any("ringcomm-prted" in each for each in lines)


def test_a_host_where_no_folder_can_be_made_says_so_and_starts_prted(tmp_path):
    done, lines = start_prted("one", TMPDIR=str(tmp_path / "missing"))
    assert lines[1] == "one"
    assert f"no folder can be made in {tmp_path / 'missing'}" in done.stderr


def test_the_folder_is_removed_if_prted_is_ended_by_a_signal(tmp_path):
    argv = [*shlex.split(agent_with_door("sh")), "-c", "echo; exec sleep 1000", "prted"]
    env = {"PATH": os.environ["PATH"], "TMPDIR": str(tmp_path)}
    options = {"stdout": subprocess.PIPE, "start_new_session": True}
    with subprocess.Popen(argv, env=env, **options) as process:
        process.stdout.readline()
        assert len(list(tmp_path.iterdir())) == 1
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []


def test_the_users_own_way_to_start_prted_is_kept():
    assert agent_with_door("valgrind -q prted").endswith(f" {with_door('')} valgrind -q prted")
    assert agent_with_door("").endswith(f" {with_door('')} prted")


@pytest.mark.parametrize("name", ["a b", "a=b", "a$b", "a'b", "a;b"])
def test_a_path_that_a_shell_would_read_is_not_sent_to_other_hosts(name, tmp_path, monkeypatch):
    monkeypatch.setattr(launcher_door, "_library", lambda: str(tmp_path / name))
    assert agent_with_door("") == ""
