"""Status page, last words and guardian, with real processes but without MPI."""

import os
import re
import signal
import subprocess
import textwrap
import time
from pathlib import Path

import pytest
from guarded_ranks import WAITING, wait_until_running
from harness import wait_until

from ringcomm._core import StatusPage, monotonic_ns
from ringcomm.launch.job.records import parse_guardian_file
from ringcomm.launch.run import _REPORT
from ringcomm.launched.process_stat import ProcessStat
from ringcomm.status.ending_text import how_it_ended
from ringcomm.status.guardian import Guardian, Ward
from ringcomm.status.page_enums import Ending, OpState, PageState
from ringcomm.transport.node.neighbours import Neighbour, Neighbours, Offer
from ringcomm.transport.presence import Presence


def page(nonce=7, **fields):
    facts = {"job": "test", "host": "here", "rank": 0, "size": 1, "local_rank": 0} | fields
    return StatusPage.create(**facts, nonce=nonce)


def test_what_is_written_can_be_read_through_another_mapping():
    mine = page(rank=3, size=5, local_rank=1)
    mine.set_step(17)
    mine.begin_op("allreduce[w]", 42, 4096)
    theirs = StatusPage.open(os.getpid(), mine.fd, 7)
    seen = theirs.snapshot()
    assert (seen["job"], seen["host"], seen["pid"]) == ("test", "here", os.getpid())
    assert (seen["rank"], seen["size"], seen["local_rank"]) == (3, 5, 1)
    assert (seen["step"], seen["state"]) == (17, PageState.STARTING)
    assert (seen["op_name"], seen["op_sequence"], seen["op_nbytes"]) == ("allreduce[w]", 42, 4096)
    assert seen["op_state"] == OpState.RUNNING
    assert 0 <= monotonic_ns() - seen["op_start_ns"] < 10e9
    mine.end_op(OpState.IDLE)
    assert theirs.snapshot()["op_state"] == OpState.IDLE


def test_the_latest_value_of_each_scalar_is_on_the_page():
    mine = page()
    for step in range(3):
        assert mine.log_scalar("loss", step, 1.0 / (step + 1))
        assert mine.log_scalar("grad/norm", -1, float(step))
    seen = StatusPage.look(os.getpid(), mine.fd)
    latest = [(name, step, value) for name, step, value, _ in seen.scalars()]
    assert latest == [("loss", 2, 1 / 3), ("grad/norm", -1, 2.0)]
    for i in range(30):
        assert mine.log_scalar(f"s{i}", 0, 0.0)
    assert not mine.log_scalar("one too many", 0, 0.0)
    assert mine.log_scalar("loss", 3, 0.5)
    assert mine.log_scalar("a" * 100, 0, 0.0) is False


def test_events_are_kept_until_there_are_64_later_ones():
    mine = page()
    for i in range(100):
        mine.note_event(f"event {i} Ä")
    seen = StatusPage.look(os.getpid(), mine.fd).events()
    assert [text for _, text in seen] == [f"event {i} Ä" for i in range(36, 100)]
    times = [time_ns for time_ns, _ in seen]
    assert times == sorted(times)


def test_arrivals_at_operations_and_their_ends_are_on_the_page():
    mine = page()
    for i in range(300):
        mine.begin_op(f"op {i}", i, 10 * i)
        mine.end_op(OpState.IDLE)
    mine.end_op(OpState.IDLE)  # nothing is under way
    mine.begin_op("last", 300, 5)
    seen = StatusPage.look(os.getpid(), mine.fd)
    arrivals = seen.arrivals()
    assert [sequence for sequence, *_ in arrivals] == list(range(45, 301))
    assert all(0 < start <= end for *_, start, end in arrivals[:-1])
    assert (arrivals[-1][1:3], arrivals[-1][4]) == (("last", 5), 0)
    mine.count_op(7)
    facts = seen.snapshot()
    assert (facts["n_ended_ops"], facts["ended_nbytes"]) == (301, 10 * 299 * 150 + 7)
    busy = sum(end - start for *_, start, end in arrivals[:-1])
    assert busy <= facts["busy_ns"] < 10e9


def test_who_looks_at_a_page_cannot_write_and_needs_no_nonce(start_rank):
    rank = start_rank(1, "time.sleep(60)")
    seen = StatusPage.look(rank.ward.pid, rank.ward.page_fd)
    assert (seen.snapshot()["pid"], seen.snapshot()["rank"]) == (rank.ward.pid, 1)


@pytest.mark.parametrize("content", [b"", b"x" * 100_000, b"1mocgnir" + bytes(100)])
def test_what_is_no_page_of_this_version_is_refused(content, tmp_path):
    (tmp_path / "file").write_bytes(content)
    with open(tmp_path / "file") as file, pytest.raises(RuntimeError, match="status page: "):
        StatusPage.look(os.getpid(), file.fileno())


@pytest.mark.long
def test_the_heart_beats_while_python_holds_the_lock_and_stops_with_the_process(start_rank):
    rank = start_rank(0, "sum(range(10**11))")

    def beat():
        return rank.page.snapshot()["heartbeat_ns"]

    rank.go()
    first = beat()
    wait_until(lambda: beat() > first, "no heartbeat")
    os.kill(rank.ward.pid, signal.SIGSTOP)
    wait_until(lambda: monotonic_ns() - beat() > 1e9, "it beats although the process is stopped")
    os.kill(rank.ward.pid, signal.SIGCONT)
    wait_until(lambda: monotonic_ns() - beat() < 1e9, "it does not go on")


@pytest.mark.parametrize(
    ("enum", "store"),
    [
        (PageState, lambda page, code: page.set_state(code)),
        (OpState, lambda page, code: page.end_op(code)),
        (Ending, lambda page, code: page.record_end(code, 0, "", "", "")),
    ],
)
def test_a_page_takes_the_codes_of_python_s_enums_and_no_others(enum, store):
    store(page(), max(enum))
    for code in (-1, max(enum) + 1):
        with pytest.raises(ValueError, match=f"{code}: the codes are 0 to {max(enum)}"):
            store(page(), code)


def test_a_page_with_another_nonce_is_not_ours():
    mine = page(nonce=7)
    with pytest.raises(RuntimeError, match="belongs to another process"):
        StatusPage.open(os.getpid(), mine.fd, 8)


def test_something_else_is_no_page(tmp_path):
    with open(tmp_path / "x", "w+b") as file:
        file.write(b"x" * 100_000)
        file.flush()
        with pytest.raises(RuntimeError, match="another process"):
            StatusPage.open(os.getpid(), file.fileno(), 7)


def test_long_texts_are_cut_and_a_traceback_keeps_its_tail():
    mine = page(host="h" * 500)
    mine.begin_op("n" * 500, 1, 1)
    mine.record_end(Ending.EXCEPTION, 1, "w" * 500, "x" * 5000, "a" * 20_000 + "THE END")
    seen = mine.snapshot()
    assert seen["host"] == "h" * 63
    assert seen["op_name"] == "n" * 127
    assert seen["end_trace"].endswith("aTHE END")


@pytest.mark.parametrize("text", ["ü" * 3000, "€" * 3000, "💥" * 3000, "a" + "💥" * 3000])
def test_long_texts_are_cut_between_characters(text):
    mine = page(host=text)
    mine.begin_op(text, 1, 1)
    mine.record_end(Ending.EXCEPTION, 1, text, text, text)
    seen = mine.snapshot()
    for field in ("host", "op_name", "end_what", "end_where", "end_trace"):
        assert seen[field] in text, field
        assert seen[field]


def test_a_neighbour_s_page_tells_whom_it_followed():
    followed, failed, left = page(), page(), page()
    followed.record_end(Ending.PEER_FAILED, 4, "PeerFailedError", "", "")
    failed.record_end(Ending.EXCEPTION, 1, "ValueError", "train.py:3\nValueError: boom", "")
    left.set_state(PageState.LEFT)
    presence = object.__new__(Presence)  # which needs no MPI to read pages
    presence._neighbours, presence.deaths, presence._ended = Neighbours(), [], set()
    presence.membership = None
    for rank, its in enumerate((followed, failed, left), 1):
        offer = Offer(os.getpid(), 7, its.fd, its.lifeline_fd)
        presence._neighbours.add(rank, Neighbour.reached(offer))
    for rank in (1, 2, 3, 5):
        presence._note_end(rank)
    assert [(died.rank, died.blames) for died in presence.deaths] == [(1, 4), (2, 2), (5, 5)]
    assert presence.deaths[1].reason == "raised ValueError: boom"
    presence._neighbours.close()


def test_the_first_record_stands():
    mine = page()
    assert mine.record_end(Ending.EXCEPTION, 1, "ValueError", "", "")
    assert not mine.record_end(Ending.EXCEPTION, 1, "KeyError", "", "")
    assert mine.snapshot()["end_what"] == "ValueError"


@pytest.mark.parametrize(
    ("kind", "code", "expected"),
    [
        (Ending.EXCEPTION, 1, "raised ValueError: boom"),
        (Ending.SYS_EXIT, 3, "called sys.exit(3)"),
        (Ending.OS_EXIT, 0, "called os._exit(0)"),
        (Ending.MPI_ABORT, 7, "called MPI_Abort(7)"),
        (Ending.FATAL_SIGNAL, signal.SIGSEGV, "died of SIGSEGV"),
        (Ending.PEER_FAILED, 2, "stopped because rank 2 failed"),
        (Ending.TERMINATED, 15, "was ended by SIGTERM"),
    ],
)
def test_endings_in_words(kind, code, expected):
    mine = page()
    mine.record_end(kind, code, "ValueError", "File x\nValueError: boom", "")
    assert how_it_ended(mine.snapshot()) == expected


def test_no_record_is_a_death_without_a_word():
    assert "without a word" in how_it_ended(page().snapshot())


def guarded(capfd, culprit, bystander, *, grace_s=0.1, is_fault_tolerant=False, is_hydra=False):
    """Run two ranks under a guardian until both are gone; return what the guardian wrote."""
    guardian = Guardian(
        [bystander.ward, culprit.ward],
        grace_s=grace_s,
        is_fault_tolerant=is_fault_tolerant,
        is_hydra=is_hydra,
    )
    bystander.go()
    wait_until_running(bystander)
    culprit.go()
    return guardian


DEEDS = {
    "exception": ('raise ValueError("boom")', "raised ValueError after step 17 - exit 1"),
    "KeyboardInterrupt of its own": (
        "raise KeyboardInterrupt",
        "raised KeyboardInterrupt after step 17",
    ),
    "thread": (
        "threading.Thread(target=lambda: 1 / 0).start(); time.sleep(60)",
        "raised ZeroDivisionError after step 17 - exit 1",
    ),
    "sys.exit": (
        "page.set_state(PageState.LEAVING); sys.exit(3)",
        "called sys.exit after step 17 - exit 3",
    ),
    "os._exit": ("os._exit(0)", r"called os._exit(0) before ringcomm.shutdown() after step 17"),
    "SIGSEGV": ("os.kill(os.getpid(), signal.SIGSEGV)", "died of SIGSEGV after step 17"),
    "SIGABRT": ("os.abort()", "died of SIGABRT after step 17"),
    "raise SystemExit": (
        "page.set_state(PageState.LEAVING); raise SystemExit(5)",
        "ended after step 17 - exit 5",
    ),
    "exit(0) in C code": (
        "page.set_state(PageState.RUNNING); import ctypes; ctypes.CDLL(None).exit(0)",
        "ended in its middle after step 17 - exit 0",
    ),
    "exit in C code": (
        "import ctypes; ctypes.CDLL(None).exit(14)",
        "was ended inside C code after step 17 - exit 14 (MPI does so",
    ),
}


def test_who_has_failed_likewise_does_not_wait(start_rank, capfd):
    body = 'page.begin_op("allreduce[w]", 1, 8); 1 / 0'
    ranks = [start_rank(rank, body) for rank in range(2)]
    guardian = Guardian([rank.ward for rank in ranks], grace_s=3, is_fault_tolerant=False)
    for rank in ranks:
        rank.go()
    for rank in ranks:
        rank.end()
    guardian.wait()
    report = capfd.readouterr().err
    assert re.search(r"    ZeroDivisionError: division by zero\n  likewise: rank \d\n\Z", report)


@pytest.mark.parametrize("deed", DEEDS)
def test_the_guardian_names_the_culprit_and_ends_the_others(deed, start_rank, capfd):
    body, expected = DEEDS[deed]
    bystander, culprit = start_rank(0, WAITING), start_rank(1, body)
    guardian = guarded(capfd, culprit, bystander)
    assert bystander.end()[0] == -signal.SIGTERM
    code, _, _ = culprit.end()
    guardian.wait()
    report = capfd.readouterr().err
    assert f"x rank 1 (host here, pid {culprit.ward.pid}) {expected}" in report
    assert "waiting at that moment: rank 0 in allreduce[w] (4.2 MB) for 0." in report
    assert report.count("x rank") == 1
    assert code != 0


EVIDENCE = {
    "exception": ('raise ValueError("boom")', ("own", 1)),
    "SIGKILL": ("os.kill(os.getpid(), signal.SIGKILL)", ("killed", 137)),
    "SIGTERM": ("os.kill(os.getpid(), signal.SIGTERM)", ("asked", 143)),
    "abort": ("os.abort()", ("own", 134)),
    "exit in C code": ("import ctypes; ctypes.CDLL(None).exit(14)", ("mpi", 14)),
}


@pytest.mark.parametrize("deed", EVIDENCE)
def test_a_record_says_when_a_rank_failed_and_by_what_this_is_known(
    deed, start_rank, capfd, monkeypatch, tmp_path
):
    body, expected = EVIDENCE[deed]
    monkeypatch.setenv("RINGCOMM_RUN_FOLDER", f"{os.getpid()} {tmp_path}")
    bystander, culprit = start_rank(0, WAITING), start_rank(1, body)
    before = time.time_ns()
    guardian = guarded(capfd, culprit, bystander)
    culprit.process.wait(60)
    after = time.time_ns()
    bystander.end()
    guardian.wait()
    (path,) = tmp_path.glob("guardian-*")
    (failure,) = parse_guardian_file(path.read_bytes()).failures
    is_of_old_kernel = failure.evidence == "silent" and deed == "SIGKILL"
    assert is_of_old_kernel or (failure.evidence, failure.code) == expected
    assert failure.rank == 1
    assert before - 5e6 < failure.time_ns < after + 5e7  # the guardian sees a death a moment later


@pytest.mark.parametrize(
    "name",
    [
        "mpich_shm_",
        "sm_segment.",
        "vader_segment.",
        "Intel_MPI_",
        "ringcomm-mpi-a_test/sm_segment.",
    ],
)
def test_no_file_of_mpi_outlives_ranks_that_are_killed(name, start_rank, capfd):
    path = Path(f"/dev/shm/{name}{os.getpid()}")
    path.parent.mkdir(exist_ok=True)
    body = f"""
    import mmap
    with open({str(path)!r}, "w+b") as file:
        file.truncate(4096)
        memory = mmap.mmap(file.fileno(), 4096)
    """
    try:
        bystander = start_rank(0, textwrap.dedent(body) + WAITING)
        culprit = start_rank(1, DEEDS["SIGABRT"][0])
        bystander.go()
        wait_until_running(bystander)
        guardian = Guardian([bystander.ward, culprit.ward], grace_s=0.1, is_fault_tolerant=False)
        assert path.exists()
        culprit.go()
        bystander.end()
        culprit.end()
        guardian.wait()
        assert not path.exists()
    finally:
        path.unlink(missing_ok=True)
        if "/" in name:
            path.parent.rmdir()


ENDS_OF_ALL = {
    # how all ranks end, evidence of each, how many texts tell of it
    "raise": ('raise ValueError("boom")', "own", 1),
    "os._exit": ("os._exit(3)", "own", 1),
    "abort": ("os.abort()", "own", 1),
    "SIGKILL": ("os.kill(os.getpid(), signal.SIGKILL)", "killed", 3),
    "SIGTERM": ("os.kill(os.getpid(), signal.SIGTERM)", "asked", 1),
}


@pytest.mark.parametrize("way", ENDS_OF_ALL)
def test_where_the_job_goes_on_the_end_of_each_rank_is_recorded_and_like_ones_are_told_once(
    way, start_rank, capfd, monkeypatch, tmp_path
):
    body, evidence, n_texts = ENDS_OF_ALL[way]
    monkeypatch.setenv("RINGCOMM_RUN_FOLDER", f"{os.getpid()} {tmp_path}")
    ranks = [start_rank(rank, body) for rank in range(3)]
    guardian = Guardian([each.ward for each in ranks], grace_s=5, is_fault_tolerant=True)
    os.kill(guardian._process.pid, signal.SIGSTOP)  # it sees all deaths at once, as on a busy node
    for rank in ranks:
        rank.go()
    wait_until(lambda: all(each.page.snapshot()["end_kind"] for each in ranks) or way == "SIGKILL",
               "they end")  # fmt: skip
    os.kill(guardian._process.pid, signal.SIGCONT)
    for rank in ranks:
        rank.end()
    guardian.wait()
    (path,) = tmp_path.glob("guardian-*")
    failures = parse_guardian_file(path.read_bytes()).failures
    found = {each.rank: each.evidence for each in failures if each.rank is not None}
    assert found.keys() == {0, 1, 2}
    assert {*found.values()} <= {evidence, "silent" if evidence == "killed" else evidence}
    assert sum(bool(each.text) for each in failures) == n_texts
    capfd.readouterr()


@pytest.mark.parametrize("n", [1, 2])
def test_where_the_job_goes_on_those_that_are_terminated_are_named(
    n, start_rank, capfd, monkeypatch, tmp_path
):
    monkeypatch.setenv("RINGCOMM_RUN_FOLDER", f"{os.getpid()} {tmp_path}")
    ranks = [start_rank(rank, WAITING) for rank in range(3)]
    guardian = Guardian([each.ward for each in ranks], grace_s=0.5, is_fault_tolerant=True)
    for rank in ranks:
        rank.go()
        wait_until_running(rank)
    for rank in ranks[:n]:
        rank.process.terminate()
        rank.end()
    (path,) = tmp_path.glob("guardian-*")

    def told():
        return parse_guardian_file(path.read_bytes()).failures

    wait_until(lambda: len({each.rank for each in told()} - {None}) == n, "the records")
    text = "x rank 0 (host here" if n == 1 else "x ranks 0,1 were ended from outside (SIGTERM)"
    assert told()[0].text.startswith(text)
    assert not ranks[2].page.snapshot()["is_reported"]
    ranks[2].process.kill()
    ranks[2].end()
    guardian.wait()
    capfd.readouterr()


NAMES_SIGNALS = tuple(map(int, re.findall(r"\d+", os.uname().release)[:2])) >= (6, 15)


@pytest.mark.skipif(not NAMES_SIGNALS, reason="an older kernel never says which signal it was")
@pytest.mark.parametrize("role", ["server 0", "rank 1"])
def test_sigkill_is_named_though_the_launcher_hears_of_it_late(role, start_rank, capfd):
    bystander = start_rank(0, WAITING)
    culprit = start_rank(1, f"page.set_role({role!r}); page.set_step(18); time.sleep(60)")
    guardian = guarded(capfd, culprit, bystander)
    wait_until(lambda: culprit.page.snapshot()["step"] == 18, "the role")
    culprit.process.kill()
    wait_until(lambda: ProcessStat.of(culprit.ward.pid).is_dead, "its end")
    time.sleep(0.06)  # a launcher on a busy host: it has not waited for the process yet
    assert culprit.process.wait(60) == -signal.SIGKILL
    bystander.end()
    guardian.wait()
    who = f"x rank 1 (host here, pid {culprit.ward.pid}){', server 0,' * (role == 'server 0')}"
    deed, report = "was killed by SIGKILL (out of memory?) after step 18", capfd.readouterr().err
    assert f"{who} {deed}\n" in report
    assert _REPORT.match(report.strip()).groups() == ("1", deed)


@pytest.mark.parametrize("n", [400, 2000])
def test_a_long_error_is_cut_at_a_word_if_at_all(n, start_rank, capfd):
    text = " ".join(f"wörd{i}" for i in range(400))[:n]
    bystander, culprit = start_rank(0, WAITING), start_rank(1, f"raise ValueError({text!r})")
    guardian = guarded(capfd, culprit, bystander)
    culprit.end()
    bystander.end()
    guardian.wait()
    (shown,) = re.findall(r"^    ValueError: (.*)$", capfd.readouterr().err, re.MULTILINE)
    if n == 400:
        assert shown == text
    else:
        assert shown.endswith(" ...")
        assert text.startswith(shown.removesuffix("..."))
        assert len(shown) > 700


def test_sigkill_is_named(start_rank, capfd):
    bystander, culprit = start_rank(0, WAITING), start_rank(1, "time.sleep(60)")
    guardian = guarded(capfd, culprit, bystander)
    culprit.process.kill()
    culprit.process.wait(60)
    bystander.end()
    guardian.wait()
    report = capfd.readouterr().err
    assert "x rank 1" in report
    assert "was killed by SIGKILL" in report or "ended without a word" in report


@pytest.mark.parametrize("first", [0, 1])
def test_of_several_deaths_the_first_is_named_however_late_the_guardian_looks(
    first, start_rank, capfd
):
    ranks = [start_rank(r, WAITING) for r in range(2)]
    guardian = guarded(capfd, ranks[1], ranks[0])
    os.kill(guardian._process.pid, signal.SIGSTOP)
    for rank in (ranks[first], ranks[1 - first]):
        rank.process.kill()
        rank.process.wait(60)
    os.kill(guardian._process.pid, signal.SIGCONT)
    guardian.wait()
    assert re.findall(r"x rank (\d)", capfd.readouterr().err) == [str(first)]


def test_who_is_buried_first_is_not_taken_for_the_first_to_die(start_rank, capfd):
    """A launcher hears of a closed socket, and kills the others before the first is buried."""
    bystander = start_rank(0, WAITING)
    culprit = start_rank(1, "os.closerange(3, 100); " + WAITING)
    guardian = guarded(capfd, culprit, bystander)
    wait_until_running(culprit)
    os.kill(guardian._process.pid, signal.SIGSTOP)
    for rank in (bystander, culprit):
        rank.process.kill()
        rank.process.wait(60)
    os.kill(guardian._process.pid, signal.SIGCONT)
    guardian.wait()
    assert re.findall(r"x rank (\d)", capfd.readouterr().err) == ["1"]


def test_a_forked_child_does_not_keep_its_parent_s_lifeline(start_rank, capfd):
    forking = "os.fork() or time.sleep(1) or os._exit(0); " + WAITING
    bystander, culprit = start_rank(0, WAITING), start_rank(1, forking)
    guardian = guarded(capfd, culprit, bystander)
    wait_until_running(culprit)
    os.kill(guardian._process.pid, signal.SIGSTOP)
    for rank in (culprit, bystander):
        rank.process.kill()
        os.waitid(os.P_PID, rank.process.pid, os.WEXITED | os.WNOWAIT)
    os.kill(guardian._process.pid, signal.SIGCONT)
    guardian.wait()
    assert re.findall(r"x rank (\d)", capfd.readouterr().err) == ["1"]


def test_a_rank_that_becomes_another_program_is_lost(start_rank, capfd):
    bystander = start_rank(0, WAITING)
    culprit = start_rank(1, 'os.execvp("sleep", ["sleep", "60"])')
    guardian = guarded(capfd, culprit, bystander)
    assert [rank.end()[0] for rank in (bystander, culprit)] == [-signal.SIGTERM] * 2
    guardian.wait()
    assert "became another program (exec of sleep) after step 17" in capfd.readouterr().err


def test_a_rank_that_closes_its_descriptors_is_not_lost(start_rank, capfd):
    body = """
    os.closerange(3, 100)
    time.sleep(0.2)  # that nothing happens cannot be waited for: the guardian looks several times
    page.set_state(PageState.LEFT)
    """
    rank = start_rank(0, body)
    guardian = Guardian([rank.ward], grace_s=0.1, is_fault_tolerant=False)
    rank.go()
    assert rank.end()[0] == 0
    guardian.wait()
    assert capfd.readouterr().err == ""


LEAVES_BY_C = "import ctypes; ctypes.CDLL(None)._exit(0)"


def test_output_stays_open_until_the_launcher_knows_of_a_bad_end(start_rank, capfd):
    """MPICH's launcher waits for one process each time that it reads, while output is open."""
    bystander = start_rank(0, WAITING)
    culprit = start_rank(1, LEAVES_BY_C)
    guardian = guarded(capfd, culprit, bystander, is_hydra=True)
    assert culprit.process.wait(120) == 0
    bystander.process.kill()
    written = []
    wait_until(
        lambda: written.append(capfd.readouterr().err) or "".join(written).endswith("\n\n\n"), ""
    )
    assert bystander.end()[0] == -signal.SIGKILL
    guardian.wait()


def test_a_launcher_that_keeps_all_codes_gets_the_report_alone(start_rank, capfd):
    bystander, culprit = start_rank(0, WAITING), start_rank(1, LEAVES_BY_C)
    guardian = guarded(capfd, culprit, bystander)
    assert culprit.process.wait(120) == 0
    bystander.process.kill()  # and not waited for, so that there would be reason for more
    guardian.wait()
    assert "\n\n" not in capfd.readouterr().err
    bystander.end()


def test_the_report_shows_the_user_s_line_and_not_ours(start_rank, capfd):
    body = """
    def collate():
        raise ValueError("boom")
    collate()
    """
    bystander, culprit = start_rank(0, WAITING), start_rank(1, body)
    guardian = guarded(capfd, culprit, bystander)
    culprit.end()
    bystander.end()
    guardian.wait()
    report = capfd.readouterr().err
    assert ", in collate\n    ValueError: boom\n" in report


def test_a_rank_that_raised_but_lingers_is_ended(start_rank, capfd):
    body = 'threading.Thread(target=time.sleep, args=(60,)).start(); raise ValueError("boom")'
    bystander, culprit = start_rank(0, WAITING), start_rank(1, body)
    guardian = guarded(capfd, culprit, bystander)
    assert culprit.end()[0] == -signal.SIGTERM
    bystander.end()
    guardian.wait()
    assert "raised ValueError" in capfd.readouterr().err


def test_a_rank_that_ignores_sigterm_is_killed(start_rank, capfd):
    stubborn = "signal.signal(signal.SIGTERM, signal.SIG_IGN); " + WAITING
    bystander, culprit = start_rank(0, stubborn), start_rank(1, "os._exit(1)")
    guardian = guarded(capfd, culprit, bystander)
    assert bystander.end()[0] == -signal.SIGKILL
    culprit.end()
    guardian.wait()


@pytest.mark.long
def test_under_fault_tolerance_nobody_else_is_ended(start_rank, capfd):
    survivor = 'page.begin_op("allreduce[w]", 1, 8); time.sleep(1); '
    survivor += "page.end_op(OpState.IDLE); "
    survivor += "page.set_state(PageState.LEAVING); page.set_state(PageState.LEFT)"
    bystander, culprit = start_rank(0, survivor), start_rank(1, "os._exit(1)")
    guardian = guarded(capfd, culprit, bystander, is_fault_tolerant=True)
    assert bystander.end()[0] == 0
    culprit.end()
    guardian.wait()
    assert capfd.readouterr().err.count("x rank 1") == 1


def test_under_fault_tolerance_a_rank_that_fails_later_waits_for_its_own_report(start_rank, capfd):
    later = WAITING.replace("time.sleep(60)", "sys.stdin.readline(); raise KeyError('later')")
    bystander, culprit = start_rank(0, later + "\n    "), start_rank(1, "os._exit(1)")
    guardian = guarded(capfd, culprit, bystander, is_fault_tolerant=True)
    culprit.end()
    wait_until(lambda: culprit.page.snapshot()["is_reported"], "the first report")
    assert not bystander.page.snapshot()["is_reported"]
    bystander.go()
    bystander.end()
    guardian.wait()
    assert bystander.page.snapshot()["is_reported"]
    assert "x rank 0 (host here" in capfd.readouterr().err


def test_after_a_death_the_guardian_removes_mpi_s_files_though_the_others_leave_in_order(
    start_rank, capfd
):
    path = f"/dev/shm/sm_segment.a-test.{os.getpid()}"
    survivor = f"""
    import mmap
    with open({path!r}, "w+b") as file:
        file.truncate(4096)
        mapped = mmap.mmap(file.fileno(), 4096)
    page.begin_op("allreduce[w]", 1, 8)
    sys.stdin.readline()
    page.begin_op("allreduce[w]", 1, 8)
    sys.stdin.readline()
    page.set_state(PageState.LEFT)
    sys.stdin.readline()
    """
    bystander, culprit = start_rank(0, survivor), start_rank(1, "os._exit(1)")
    bystander.go()
    wait_until_running(bystander)
    guardian = Guardian([bystander.ward, culprit.ward], grace_s=0.1, is_fault_tolerant=True)
    bystander.go()
    culprit.go()
    culprit.end()
    wait_until(lambda: culprit.page.snapshot()["is_reported"], "the report")
    bystander.go()
    wait_until(lambda: bystander.page.snapshot()["state"] == PageState.LEFT, "it leaves")
    assert os.path.exists(path)
    bystander.go()
    bystander.end()
    guardian.wait()
    assert not os.path.exists(path)
    capfd.readouterr()


def test_the_one_that_left_while_others_waited_is_blamed(start_rank, capfd):
    blaming = 'page.begin_op("allreduce[w]", 2, 8); page.wait_for_report(0.2); '
    blaming += 'raise PeerFailedError("rank 1 left", rank=1, reason="left the job")'
    bystander, culprit = start_rank(0, blaming), start_rank(1, "page.set_state(PageState.LEAVING)")
    guardian = guarded(capfd, culprit, bystander, grace_s=60)  # it ends in its own way
    assert culprit.end()[0] == 0
    code, _, err = bystander.end()
    guardian.wait()
    assert code == 1
    assert "ringcomm: stopped at File" in err
    assert "Traceback" not in err
    report = capfd.readouterr().err
    assert "x rank 1" in report
    assert "left the job after step 17 while others waited for it" in report


def test_the_one_that_left_is_blamed_for_that_though_the_launcher_kills_it_then(start_rank, capfd):
    blaming = 'page.begin_op("allreduce[w]", 2, 8); page.wait_for_report(0.2); '
    blaming += 'raise PeerFailedError("rank 1 left", rank=1, reason="left the job")'
    leaving = "page.set_state(PageState.LEAVING); page.wait_for_report(60)"
    bystander, culprit = start_rank(0, blaming), start_rank(1, leaving)
    guardian = guarded(capfd, culprit, bystander, grace_s=60)  # it ends in its own way
    assert bystander.end()[0] == 1
    culprit.process.kill()
    culprit.end()
    guardian.wait()
    report = capfd.readouterr().err
    assert "x rank 1" in report
    assert "left the job after step 17 while others waited for it" in report


def test_a_good_end_is_silent(start_rank, capfd):
    leave = 'page.begin_op("x", 1, 1); page.end_op(OpState.IDLE); page.set_state(PageState.LEFT)'
    ranks = [start_rank(r, leave) for r in range(2)]
    guardian = Guardian([r.ward for r in ranks], grace_s=0.1, is_fault_tolerant=False)
    for rank in ranks:
        rank.go()
        assert rank.end()[0] == 0
    guardian.wait()
    assert capfd.readouterr().err == ""


def test_being_terminated_from_outside_is_no_rank_s_fault(start_rank, capfd):
    ranks = [start_rank(r, WAITING) for r in range(2)]
    guardian = Guardian([r.ward for r in ranks], grace_s=5, is_fault_tolerant=False)
    for rank in ranks:
        rank.go()
    for rank in ranks:
        rank.process.terminate()
        time.sleep(0.1)  # the others of a job on a busy machine hear of it later
    assert [rank.end()[0] for rank in ranks] == [-signal.SIGTERM] * 2
    guardian.wait()
    assert "x the job was ended from outside (SIGTERM)" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ((0, 1, 2), "x the job was ended from outside (SIGTERM)"),
        ((1, 0, 2), "x rank 1 (host here, pid {pid}) "),
    ],
)
def test_a_rank_killed_without_a_word_is_the_cause_only_if_it_died_first(
    order, expected, start_rank, capfd
):
    """A launcher that ends a job kills a rank that had no time to act on SIGTERM."""
    ranks = [start_rank(r, WAITING) for r in range(3)]
    guardian = Guardian([r.ward for r in ranks], grace_s=5, is_fault_tolerant=False)
    for rank in ranks:
        rank.go()
        wait_until_running(rank)
    os.kill(guardian._process.pid, signal.SIGSTOP)  # it sees all deaths at once, as on a busy node
    for r in order:
        ranks[r].process.send_signal(signal.SIGKILL if r == 1 else signal.SIGTERM)
        ranks[r].end()
    os.kill(guardian._process.pid, signal.SIGCONT)
    guardian.wait()
    report = capfd.readouterr().err
    assert expected.format(pid=ranks[1].ward.pid) in report
    assert report.count("x ") == 1


@pytest.mark.parametrize(
    ("is_hydra", "is_by_parent", "expected"),
    [
        (True, True, "x the job was ended from outside (SIGTERM)"),
        (True, False, "x rank 0 (host here, pid {pid}) was ended by SIGTERM"),
        (False, True, "x rank 0 (host here, pid {pid}) was ended by SIGTERM"),
    ],
)
def test_whom_hydra_ends_first_is_not_blamed_for_the_kill_of_the_others(
    is_hydra, is_by_parent, expected, start_rank, capfd
):
    """It ends one rank after the other, and kills the rest as soon as one is gone."""
    ranks = [start_rank(r, WAITING) for r in range(2)]
    wards = [each.ward for each in ranks]
    guardian = Guardian(wards, grace_s=5, is_fault_tolerant=False, is_hydra=is_hydra)
    for rank in ranks:
        rank.go()
        wait_until_running(rank)
    pid = ranks[0].ward.pid
    if is_by_parent:
        os.kill(pid, signal.SIGTERM)
    else:
        subprocess.run(["kill", "-TERM", str(pid)], check=True)
    ranks[0].end()
    ranks[1].process.kill()
    ranks[1].end()
    guardian.wait()
    assert expected.format(pid=pid) in capfd.readouterr().err


def test_a_caught_sys_exit_is_no_failure(start_rank, capfd):
    body = """
    try:
        sys.exit(3)
    except SystemExit as caught:
        assert caught.code == 3
    assert words.failure is None
    page.set_state(PageState.LEAVING)
    time.sleep(0.2)  # that nothing happens cannot be waited for: the guardian looks several times
    page.set_state(PageState.LEFT)
    """
    rank = start_rank(0, body)
    guardian = Guardian([rank.ward], grace_s=0.1, is_fault_tolerant=False)
    rank.go()
    code, _, err = rank.end()
    assert code == 0, err
    guardian.wait()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("body", "headline"),
    [
        ("raise ValueError('\\udcff' + chr(0x1F4A5) * 4000)", "ValueError: ?"),
        ("raise ValueError('two\\nlines')", "ValueError: two"),
        ("e = ValueError('boom'); e.add_note('a hint'); raise e", "ValueError: boom"),
        ("raise ValueError", "ValueError"),
        ("raise type('Odd', (Exception,), {'__str__': lambda self: 1 / 0})", "Odd: <its text"),
    ],
)
def test_any_error_is_recorded_by_its_first_line(body, headline, start_rank):
    rank = start_rank(0, body)
    rank.go()
    assert rank.end()[0] == 1
    seen = rank.page.snapshot()
    assert seen["end_kind"] == Ending.EXCEPTION
    assert seen["end_where"].splitlines()[-1].startswith(headline)


def test_an_excepthook_set_later_does_not_hide_the_exception(start_rank):
    body = """
    import atexit
    atexit.register(lambda: words.notice_unseen_exception())
    sys.excepthook = lambda *_: None
    raise ValueError("boom")
    """
    rank = start_rank(0, body)
    rank.go()
    code, out, _ = rank.end()
    assert code == 1
    assert "told: Failure(reason='raised ValueError: boom'" in out


def test_an_exception_in_a_thread_is_a_bad_end_although_the_main_thread_ends_well(start_rank):
    rank = start_rank(0, "t = threading.Thread(target=lambda: 1 / 0); t.start(); t.join()")
    rank.go()
    assert rank.end()[0] == 1


def test_the_guardian_outlives_signals_that_a_scheduler_sends_to_all_processes(start_rank, capfd):
    bystander, culprit = start_rank(0, WAITING), start_rank(1, "1 / 0")
    guardian = Guardian([bystander.ward, culprit.ward], grace_s=0.1, is_fault_tolerant=False)
    bystander.go()
    wait_until_running(bystander)
    for name in ("HUP", "INT", "QUIT", "USR1", "USR2", "ALRM", "TERM"):
        os.kill(guardian._process.pid, getattr(signal, f"SIG{name}"))
    culprit.go()
    assert bystander.end()[0] == -signal.SIGTERM
    guardian.wait()
    assert "x rank 1" in capfd.readouterr().err


def test_one_rank_stopped_by_sigterm_is_named(start_rank, capfd):
    bystander, culprit = start_rank(0, WAITING), start_rank(1, "time.sleep(60)")
    guardian = guarded(capfd, culprit, bystander)
    culprit.process.terminate()
    assert bystander.end()[0] == -signal.SIGTERM
    culprit.end()
    guardian.wait()
    report = capfd.readouterr().err
    assert "x rank 1" in report
    assert "was ended by SIGTERM" in report
    assert report.count("x ") == 1


def test_disarmed_hooks_are_taken_back(start_rank):
    body = """
    words.disarm()
    import ringcomm
    assert sys.excepthook is ringcomm._print_error, sys.excepthook
    assert threading.excepthook is threading.__excepthook__
    assert sys.exit.__module__ == "sys" and os._exit.__module__ == "posix"
    os._exit(0)
    """
    rank = start_rank(0, body)
    rank.go()
    code, out, err = rank.end()
    assert (code, "told" in out) == (0, False), err


def test_a_forked_child_does_not_speak_for_the_rank(start_rank):
    body = """
    pid = os.fork()
    if pid == 0:
        raise ValueError("in the child")
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 1
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert words.failure is None
    assert page.snapshot()["end_kind"] == 0
    """
    rank = start_rank(0, body)
    rank.go()
    code, out, err = rank.end()
    assert code == 0, err
    assert "in the child" in err
    assert "told" not in out


def test_a_guardian_that_cannot_see_the_pages_says_so(start_rank, capfd):
    rank = start_rank(0, "pass")
    wrong = Ward(rank.ward.pid, rank.ward.page_fd, 999)
    with pytest.raises(OSError, match="did not start to watch"):
        Guardian([wrong], grace_s=0.1, is_fault_tolerant=False)
    assert "belongs to another process" in capfd.readouterr().err
