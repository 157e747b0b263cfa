"""What one rank refuses is the same error on all ranks, whoever is how late."""

import os
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager

import pytest
from harness import DEADLINE_S, errors_of_ranks, outcomes, run_ranks
from other_users import IS_ROOT, OTHER

import ringcomm as rc
from ringcomm.engine.api import one_error_for_all
from ringcomm.engine.api.one_error_for_all import gather_or_raise, raise_together
from ringcomm.status import error_printer


def failing(error, on_rank):
    return lambda rank: gather_or_raise("file[x]", rank, error if rank == on_rank else None)


def test_without_an_error_all_get_what_all_have_said():
    assert run_ranks(3, failing(None, 0)) == [[0, 1, 2]] * 3


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (rc.ConfigError("it is damaged"), "file[x]: rank 1: it is damaged"),
        (OSError(13, "No access"), "file[x]: rank 1: PermissionError: [Errno 13] No access"),
        (TypeError("no number"), "file[x]: rank 1: no number"),
    ],
)
def test_an_error_of_one_rank_is_that_of_all_and_names_it(error, text):
    errors = errors_of_ranks(3, failing(error, 1))
    kind = TypeError if isinstance(error, TypeError) else rc.RingcommError
    assert [type(each) for each in errors] == [kind] * 3
    assert {str(each) for each in errors} == {text}
    assert len({"".join(getattr(each, "__notes__", [])) for each in errors}) == 1
    assert all(each.__cause__ is None for each in errors), "only one rank of a host prints it"


def test_an_error_that_nobody_expects_says_where_it_rose():
    def body(rank):
        try:
            _ = {}["absent"] if rank == 1 else None
        except KeyError as error:
            gather_or_raise("file[x]", None, error)
        gather_or_raise("file[x]", None)

    for error in errors_of_ranks(2, body):
        [note] = error.__notes__
        assert note.startswith("Rank 1 failed here:")
        assert '_ = {}["absent"]' in note


def test_an_error_of_an_operation_stays_what_it_is():
    lost = rc.PeerFailedError("rank 1 is lost", rank=1, reason="is lost")
    with pytest.raises(rc.PeerFailedError):
        gather_or_raise("file[x]", None, lost)


def test_nobody_ends_with_the_error_before_all_know_it(monkeypatch):
    """Who heard of an end first would take it for a loss."""
    order = []
    barrier = one_error_for_all.collectives.barrier

    def recorded(**options):
        barrier(**options)
        order.append("met")

    monkeypatch.setattr(one_error_for_all.collectives, "barrier", recorded)

    def body(rank):
        try:
            failing(rc.ConfigError("no"), 1)(rank)
        except rc.RingcommError:
            order.append("raised")
            raise

    errors_of_ranks(3, body)
    assert order.count("met") == order.count("raised") == 3
    assert order[0] == "met"


def test_a_rank_that_dies_meanwhile_does_not_hide_the_error():
    def body(rank):
        if rank == 2:
            raise ValueError("it dies before the others meet")
        raise_together(rc.RingcommError("refused"))

    one, two, _ = outcomes(3, body)
    assert str(one) == str(two) == "refused"


OF_A_RANK = """
import sys
from ringcomm.engine.api import one_error_for_all
from ringcomm.errors import RingcommError
from ringcomm.status import error_printer

one_error_for_all.collectives.barrier = lambda **_: None
error_printer._SKEW_S = float("inf")
error_printer.time.sleep = lambda seconds: sys.stdin.read() if seconds > 1 else None
error_printer.note_watch(lambda: True)
print("ready", flush=True)
sys.stdin.readline()
one_error_for_all.raise_together(RingcommError("refused"))
"""


def test_a_claim_is_held_until_the_process_ends_and_no_warning_is_about_it():
    code = (
        "import os; from ringcomm.status.error_printer import _claim; "
        "name = f'ringcomm.test.{os.getpid()}'; _claim(name).close(); assert not _claim(name)"
    )
    command = [sys.executable, "-P", "-X", "dev", "-W", "error", "-c", code]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=DEADLINE_S)
    assert (ended.returncode, ended.stderr) == (0, "")


@contextmanager
def claimed_by_another(name, monkeypatch):
    """Let another user hold a name, for each kind of socket; without root, this one is another."""
    ready, tell = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if IS_ROOT:
                os.setuid(OTHER)
            kinds = (socket.SOCK_DGRAM, socket.SOCK_STREAM)
            held = [socket.socket(socket.AF_UNIX, kind) for kind in kinds]
            for each in held:
                each.bind(f"\0{name}")
            held[1].listen()
            os.write(tell, b"!")
            signal.pause()
        finally:
            os._exit(1)
    if not IS_ROOT:
        monkeypatch.setattr(os, "geteuid", lambda: OTHER)
    try:
        assert os.read(ready, 1) == b"!"
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ready)
        os.close(tell)


def test_a_name_that_another_user_has_claimed_silences_nobody(monkeypatch):
    name = f"ringcomm.test.{os.getpid()}"
    with claimed_by_another(f"{name}.printed", monkeypatch):
        assert not error_printer._is_printed(name)
    with error_printer._claim(f"{name}.printed"):
        monkeypatch.undo()
        assert error_printer._is_printed(name)


def test_ranks_tell_the_one_that_prints_and_strangers_do_not_count(monkeypatch):
    """It gathers as long as it takes, until all ranks have told it."""
    name = f"ringcomm.test.{os.getpid()}"
    monkeypatch.setattr(error_printer, "_GATHERING_S", 60.0)
    monkeypatch.setattr(error_printer, "_SKEW_S", 60.0)
    monkeypatch.setattr(error_printer, "launched_local_size", lambda: 3)
    uids = iter([OTHER, os.geteuid(), os.geteuid()])
    monkeypatch.setattr(error_printer, "_uid_of_peer", lambda _: next(uids))
    with error_printer._claim(name) as claim:
        for rank in (7, 1, 2):
            monkeypatch.setattr(error_printer, "launched_rank", lambda rank=rank: rank)
            error_printer._tell(name)
        assert error_printer._others_that_raise_it(claim) == {1, 2}


def test_who_prints_it_stays_until_late_ranks_have_found_it_printed(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("PMIX_NAMESPACE", "a-job")
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    command = [sys.executable, "-c", OF_A_RANK]
    with (
        subprocess.Popen(command, text=True, **pipes) as first,
        subprocess.Popen(command, text=True, **pipes) as late,
    ):
        assert first.stdout.readline() == late.stdout.readline() == "ready\n"
        first.stdin.write("go on\n")
        first.stdin.flush()
        while not (line := first.stderr.readline()).endswith("RingcommError: refused\n"):
            assert line, "the first one has not printed it"
        with pytest.raises(subprocess.TimeoutExpired):
            first.wait(timeout=1)
        assert late.communicate("go on\n", timeout=DEADLINE_S) == ("", "")
        assert first.poll() is None
        assert first.communicate(timeout=DEADLINE_S) == ("", "")
