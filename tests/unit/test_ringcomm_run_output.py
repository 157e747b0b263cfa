"""`ringcomm run` shows what ranks write, however they write it and whoever reads it."""

import errno
import os
import re
import resource

import pytest
from harness import BIN, run_command

from ringcomm.launch.job import command, supervisor
from ringcomm.launch.job.output_lines import LinesOf
from ringcomm.launch.job.run_folder import RunFolder
from ringcomm.launch.job.show import show
from ringcomm.launch.job.supervisor import Supervisor
from ringcomm.launch.job.verdict import Verdict


class EndlessFile:
    """A log whose rank writes faster than anybody reads."""

    n_reads = 0

    def read(self, nbytes):
        self.n_reads += 1
        assert self.n_reads < 100, "nothing is shown, and no signal is heard"
        return b"y\n" * (nbytes // 2)


def test_a_rank_that_writes_faster_than_is_shown_holds_nothing_up():
    log = supervisor._Log(EndlessFile(), LinesOf(b""))
    assert log.news()
    assert log.has_more


def test_the_rest_of_a_log_ends_though_a_child_that_was_left_behind_writes_on(tmp_path):
    path = tmp_path / "rank-0.log"
    path.write_bytes(b"y\n" * supervisor._PIECE)
    with path.open("ab", buffering=0) as writer:
        shown = 0
        for lines in supervisor._Log(path.open("rb", buffering=0), LinesOf(b"")).rest():
            shown += len(lines)
            writer.write(b"y\n" * supervisor._PIECE)
            assert shown <= 2 * supervisor._PIECE
    assert shown == 2 * supervisor._PIECE


def test_a_line_without_an_end_takes_limited_memory_and_nothing_is_lost():
    lines, shown = LinesOf(b""), b""
    for _ in range(64):
        shown += lines.add(b"\0" * (1 << 16))
    assert len(shown.replace(b"\n", b"")) >= 3 << 20
    shown += lines.flush()
    assert shown.replace(b"\n", b"") == bytes(4 << 20)


def lost_terminal():
    controller, terminal = os.openpty()
    os.close(controller)
    return terminal


def lost_reader():
    reader, writer = os.pipe()
    os.close(reader)
    return writer


@pytest.mark.parametrize(
    ("opened", "number"),
    [
        (lost_terminal, errno.EIO),
        (lost_reader, errno.EPIPE),
        (lambda: os.open("/dev/full", os.O_WRONLY), errno.ENOSPC),
    ],
)
def test_output_that_nobody_can_read_ends_no_job(opened, number, capfd):
    with open(opened(), "w") as stream:
        with pytest.raises(OSError, match=re.escape(os.strerror(number))):
            os.write(stream.fileno(), b"x")
        show(b"first\n", stream)
        show(b"second\n", stream)
    said = capfd.readouterr().err
    assert ("in the logs only" in said) is (number == errno.ENOSPC), said


def supervised(folder, says):
    return Supervisor(["sh", "-c", says], {}, folder, size=1, grace_s=1).run()


def test_a_job_whose_log_cannot_be_written_goes_on(tmp_path, monkeypatch, capfd):
    folder = RunFolder(tmp_path / "run")
    folder.create({}, {})
    with open("/dev/full", "wb", 0) as full:
        monkeypatch.setattr(folder, "open_launcher_log", lambda: full)
        ending = supervised(folder, "echo one; sleep 0.2; echo two; exit 3")
    assert ending.launcher_code == 3
    said = capfd.readouterr().err
    assert said.count("launcher.log: No space left") == 1
    assert "one\n" in said
    assert "two\n" in said


def test_an_error_before_init_is_in_the_report_and_the_launchers_box_is_not_shown(tmp_path, capfd):
    folder = RunFolder(tmp_path / "run")
    folder.create({}, {})
    trace = '\nTraceback (most recent call last):\n  File "x.py", line 1\nValueError: no\n'
    (folder.path / "rank-1.log").write_text(f"begins{trace}an end\n")
    box = f"{'-' * 70}\nprterun detected\n   Process name: [job@1,1]\n{'-' * 70}"
    says = f"echo '{box}' >&2; exit 1"
    verdict, _ = Supervisor(["sh", "-c", says], {}, folder, size=2, grace_s=1).run_and_record()
    report = 'x rank 1 failed - exit 1\n    File "x.py", line 1\n    ValueError: no\n'
    assert verdict.report == folder.end().report == report
    shown = capfd.readouterr()
    assert "prterun" not in shown.out + shown.err
    assert shown.out.startswith("[1] begins\n[1] Traceback")


@pytest.mark.parametrize(
    ("reported", "end"),
    [
        (set(), "\nx rank 1 raised\n  likewise: rank 0\n  logs: {folder}\n"),
        ({None, 0}, "\nx rank 1 raised\n  likewise: rank 0\n  logs: {folder}\n"),
        ({0, 1}, "ringcomm run: rank 1 failed - exit 3; logs: {folder}\n"),
    ],
)
def test_what_was_reported_of_a_rank_is_not_shown_again(reported, end, tmp_path, capfd):
    verdict = Verdict(3, "rank 1 failed", 1, "x rank 1 raised\n  likewise: rank 0\n")
    command._say_end(verdict, RunFolder(tmp_path), reported)
    assert capfd.readouterr().err == end.format(folder=tmp_path)


def test_a_job_may_have_more_ranks_than_a_process_has_files(tmp_path, capfd):
    folder, size = RunFolder(tmp_path / "run"), 100
    folder.create({}, {})
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    others = [os.open(os.devnull, os.O_RDONLY) for _ in range(size)]  # as another program may have
    few = len(os.listdir("/proc/self/fd")) + size // 2
    says = f"for i in $(seq 0 {size - 1}); do echo $(ulimit -Sn) >{folder.path}/rank-$i.log; done"
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
    try:
        ending = Supervisor(["sh", "-c", says], os.environ, folder, size=size, grace_s=1).run()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (few, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for each in others:
            os.close(each)
    assert ending.launcher_code == 0
    assert sorted(capfd.readouterr().out.split("\n")) == sorted(
        ["", *(f"[{rank}] {few}" for rank in range(size))]
    )


def test_a_job_whose_folder_is_removed_keeps_its_exit_code(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.create({}, {})
    assert supervised(folder, f"rm -r '{folder.path}'; exit 3").launcher_code == 3


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (["no_such.py"], "no_such.py: no such file in FOLDER; nothing was started"),
        (["-m", "no_such.module"], "-m no_such.module: there is no module no_such; nothing was"),
    ],
)
def test_a_missing_script_or_module_is_one_line_and_starts_nothing(
    program, said, tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    assert command.main(["-np", "2", *program]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"ringcomm run: {said.replace('FOLDER', str(tmp_path))}")
    assert list(tmp_path.iterdir()) == []


def test_a_job_whose_end_cannot_be_recorded_keeps_its_exit_code(tmp_path, monkeypatch, capfd):
    def full(self, end):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(RunFolder, "record_end", full)
    monkeypatch.chdir(tmp_path)
    job = ["-np", "1", "--run-folder", "run", "sh", "-c", "exit 3"]
    assert command.main(job) == 3
    assert "end.json cannot be written: No space left" in capfd.readouterr().err


def test_a_job_whose_stdout_is_closed_keeps_its_exit_code(tmp_path):
    job = run_command(["sh", "-c", f"{BIN}/ringcomm run -np 1 sh -c 'echo x' >&-"], cwd=tmp_path)
    assert job.returncode == 0, job
    (log,) = tmp_path.glob("runs/*/rank-0.log")
    assert log.read_text() == "x\n"


def test_a_working_folder_that_has_been_removed_is_named(tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    job = run_command(["sh", "-c", f"rmdir {gone}; {BIN}/ringcomm run -np 1 true"], cwd=gone)
    said = "ringcomm run: the working folder has been removed; go to another\n"
    assert (job.returncode, job.stderr) == (2, said)
