"""rc.run(): a function on ranks of its own, from a process that is none."""

import atexit
import math
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from harness import HANG_S, IS_MPICH, above_mpi, at_length, is_running, job_environment, wait_until

import ringcomm as rc


@pytest.fixture(autouse=True)
def surroundings(monkeypatch, tmp_path):
    """Let mpirun find what jobs of the tests find, and keep its files out of /tmp."""
    for name in os.environ.keys() - job_environment().keys():
        monkeypatch.delenv(name)
    for name, value in job_environment({"TMPDIR": str(tmp_path)}).items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module that plain pickle can refer to."""
    (tmp_path / "functions.py").write_text(
        "import ringcomm as rc\n"
        "def add(x):\n    rc.init()\n    return rc.rank(), float(rc.allreduce(x)[0])\n"
        "def make(n):\n    return (i for i in range(n))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield __import__("functions")
    del sys.modules["functions"]


def without_cloudpickle(monkeypatch):
    monkeypatch.setitem(sys.modules, "cloudpickle", None)


@pytest.mark.parametrize("np", at_length([1, 2, 3], [2 if IS_MPICH else 3]))
def test_results_come_back_in_rank_order(np):
    offset = 10

    def work(factor, *, power):
        rc.init()
        return rc.rank(), rc.size(), (factor * rc.rank() + offset) ** power

    results = rc.run(work, (2,), {"power": 2}, np)
    assert results == [(rank, np, (2 * rank + 10) ** 2) for rank in range(np)]
    assert not rc.is_initialized()


@above_mpi
def test_a_function_of_a_module_works_also_without_cloudpickle(module, monkeypatch):
    import numpy

    without_cloudpickle(monkeypatch)
    assert rc.run(module.add, [numpy.full(1, 2.0)], np=2) == [(0, 4.0), (1, 4.0)]


@above_mpi
@pytest.mark.parametrize("quiet", [False, True])
def test_ranks_that_never_call_init_print_unless_quiet_and_have_the_variables(
    quiet, monkeypatch, capfd
):
    monkeypatch.setenv("OURS", "kept")

    def look():
        print("hello from a rank", flush=True)
        return os.getpid(), os.environ["OURS"], os.environ["THEIRS"]

    np = 1 if quiet else 2
    pids, ours, theirs = zip(
        *rc.run(look, np=np, env={"THEIRS": "added"}, quiet=quiet), strict=True
    )
    assert (set(ours), set(theirs)) == ({"kept"}, {"added"})
    assert len({*pids, os.getpid()}) == np + 1
    assert capfd.readouterr().out.count("hello from a rank") == (0 if quiet else 2)


@above_mpi
def test_a_large_result_is_read_once_however_long_the_others_work():
    nbytes = 50_000_000

    def work():
        if int(os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK"))) == 1:
            time.sleep(4)  # it works on while the result of the other one lies there
            return b""
        return bytes(nbytes)

    def n_read():
        return int(re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())[1])

    before = n_read()
    assert [len(each) for each in rc.run(work, np=2)] == [nbytes, 0]
    assert nbytes <= n_read() - before < 2 * nbytes


# --- what goes wrong ----------------------------------------------------------------------------
@above_mpi
def test_what_a_rank_raises_comes_back_with_its_traceback():

    def work():
        rc.init()
        if rc.rank() == 1:
            raise_it()
        rc.barrier()

    def raise_it():
        raise KeyError("boom")

    with pytest.raises(rc.PeerFailedError) as caught:
        rc.run(work, np=2, quiet=True)
    error = caught.value
    assert (error.rank, error.reason) == (1, "raised KeyError: 'boom'")
    assert isinstance(error.__cause__, KeyError)
    assert "run: rank 1 raised KeyError: 'boom'" in str(error)
    assert "in raise_it" in str(error)


def test_who_raises_before_init_is_not_waited_for_there():
    # MPICH's other rank burns a core until this one ends: see below.
    patience_s = 0.3 if IS_MPICH else 2

    def work():
        launcher, deadline = f"/proc/{os.getppid()}/task", time.monotonic() + patience_s

        def other_has_memory_of_mpi():
            ranks = {pid for t in Path(launcher).iterdir() for pid in read(t / "children").split()}
            others = ranks - {str(os.getpid())}
            return any("/dev/shm/" in read(Path(f"/proc/{pid}/maps")) for pid in others)

        def read(path):
            try:
                return path.read_text()
            except OSError:
                return ""  # it has just ended

        if int(os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK"))) == 1:
            # That memory is not to be left. MPICH may make it only when all ranks have come.
            while not other_has_memory_of_mpi() and time.monotonic() < deadline:
                time.sleep(0.02)  # nobody tells
            raise KeyError("boom")
        rc.init()

    with pytest.raises(rc.PeerFailedError) as caught:
        rc.run(work, np=2, quiet=True, timeout_s=HANG_S)
    assert caught.value.rank == 1
    assert isinstance(caught.value.__cause__, KeyError)


@above_mpi
def test_an_exception_that_cannot_be_sent_is_told_in_words():

    class OddError(Exception):
        def __init__(self, a, b):
            super().__init__(f"{a} and {b}")

    def work():
        raise OddError(1, threading.Lock())

    with pytest.raises(rc.PeerFailedError, match="OddError: 1 and ") as caught:
        rc.run(work, quiet=True)
    assert caught.value.__cause__ is None


@above_mpi
@pytest.mark.parametrize("code", at_length([0, 3], [0]))  # 3 fails the job, as below
def test_a_rank_that_exits_has_returned_nothing(code):

    def work():
        rc.init()
        if rc.rank() == 0:
            sys.exit(code)
        return 5

    with pytest.raises(rc.RingcommError) as caught:
        rc.run(work, np=2, quiet=True)
    assert "rank 0" in str(caught.value)


def test_a_rank_that_is_killed_is_named():

    def work():
        rc.init()
        if rc.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        rc.barrier()

    with pytest.raises(rc.PeerFailedError) as caught:
        rc.run(work, np=2, quiet=True)
    assert caught.value.rank == 1
    # "was killed by SIGKILL", or, where mpirun ended the job before the guardian had said so,
    # "died without a word (SIGKILL, out of memory, ...)"
    assert "SIGKILL" in caught.value.reason


@above_mpi
def test_a_job_that_fails_at_its_very_end_has_not_succeeded():

    def work():
        atexit.register(os._exit, 3)
        return 1

    with pytest.raises(rc.RingcommError, match="failed after the function had returned, exit 3"):
        rc.run(work, quiet=True)


@above_mpi
def test_a_job_that_takes_too_long_is_ended(tmp_path):

    def work():
        rc.init()
        if rc.rank() == 1:
            Path(tmp_path, "pid").write_text(str(os.getpid()))
            signal.pause()
        return 1

    with pytest.raises(rc.CommTimeoutError, match="timeout_s=6; ranks that had not") as caught:
        rc.run(work, np=2, timeout_s=6, quiet=True)
    assert caught.value.missing == (1,)
    wait_until(lambda: not is_running((tmp_path / "pid").read_text()), "rank 1 is left")


@above_mpi
def test_who_kills_what_supervises_the_job_is_told_and_ended(tmp_path):

    def work():
        Path(tmp_path, "pid").write_text(str(os.getpid()))
        launcher = Path(f"/proc/{os.getppid()}/stat").read_text()
        os.kill(int(launcher.rpartition(")")[2].split()[1]), signal.SIGKILL)
        signal.pause()

    with pytest.raises(rc.RingcommError, match=r"left no record of its end \(signal 9\)"):
        rc.run(work, quiet=True, timeout_s=HANG_S)
    wait_until(lambda: not is_running((tmp_path / "pid").read_text()), "the rank is left")


@above_mpi
def test_a_result_that_cannot_be_sent_is_told(module):
    with pytest.raises(TypeError, match="rank 0: returned a generator, which cannot be sent"):
        rc.run(module.make, (3,), quiet=True)


@above_mpi
def test_a_function_that_ranks_cannot_make_is_told(module, monkeypatch):
    add = module.add
    monkeypatch.setattr(
        sys, "path", [p for p in sys.path if p != str(Path(module.__file__).parent)]
    )
    with pytest.raises(TypeError, match=r"cannot be made here, ModuleNotFoundError.*functions"):
        rc.run(add, (1,), quiet=True)


def test_without_cloudpickle_a_lambda_is_refused_before_anything_starts(monkeypatch):
    without_cloudpickle(monkeypatch)
    with pytest.raises(TypeError, match="pip install cloudpickle, or define it in a module"):
        rc.run(lambda: 1)


def test_without_cloudpickle_a_function_of_main_is_refused(monkeypatch, module):
    without_cloudpickle(monkeypatch)
    monkeypatch.setattr(module.add, "__module__", "__main__")
    with pytest.raises(TypeError, match=r"^run: add is defined in __main__, where ranks cannot"):
        rc.run(module.add, (1,))


def test_an_argument_that_cannot_be_sent_is_refused():
    with pytest.raises(TypeError, match="cannot be sent to other processes: cannot pickle"):
        rc.run(print, (threading.Lock(),))


def test_without_mpirun_the_error_says_how_to_get_one(monkeypatch):
    from ringcomm.launch.check_install import gather_facts

    monkeypatch.setattr(gather_facts, "_launcher", lambda _: None)
    with pytest.raises(
        rc.ConfigError, match=r"run: neither beside Python nor on PATH -> pip install"
    ):
        rc.run(print)


@above_mpi
def test_a_job_that_does_not_start_shows_what_mpirun_says():
    with pytest.raises(
        rc.RingcommError, match=r"failed before any rank had returned, exit \d+"
    ) as caught:
        rc.run(print, mpirun_options=["--no-such-option"], quiet=True)
    assert "no-such-option" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"np": 0}, "np is at least 1, not 0"),
        ({"timeout_s": 0}, "more than 0, or None, not 0"),
        ({"timeout_s": math.nan}, "more than 0, or None, not nan"),
    ],
)
def test_arguments_that_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        rc.run(print, **options)


@pytest.mark.parametrize(
    ("environ", "rank"),
    [
        ({"OMPI_COMM_WORLD_RANK": "3", "PMIX_RANK": "3"}, 3),
        ({"PMI_RANK": "2"}, 2),
        ({"SLURM_PROCID": "1"}, 1),
        ({}, 0),
    ],
)
def test_a_rank_is_known_before_init(environ, rank):
    from ringcomm.launched.launcher import launched_rank

    assert launched_rank(environ) == rank
