"""Ranks as threads, and jobs under mpirun: what every test tier stands on."""

import contextlib
import faulthandler
import hashlib
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from faulty_transport import FaultyTransport
from loopback import LoopbackHub

from ringcomm.config import Settings
from ringcomm.engine.api.init_rank_size import engine
from ringcomm.engine.core.current_engine import serve_thread
from ringcomm.engine.core.engine import Engine
from ringcomm.engine.core.meet_and_leave import stop
from ringcomm.errors import PeerFailedError

PROMPTLY_S = 120.0  # a job that no deadline of 600 s has ended, on a busy machine, too
HANG_S = 240.0  # a machine that is busy takes a minute to import torch
DEADLINE_S = 180.0  # of ranks as threads: only a hang reaches it
wire = "messages"  # or "node": ranks as threads share memory, too; see the fixture `wire`


def outcomes(size, body, *, hub=None, settings=None, faults=None):
    """Run body(rank) on `size` ranks as threads; return each rank's result, or its exception.

    A rank that raises is dead to the others, as a process would be. faults: {rank: Faults}.
    An assertion that fails in body() is raised, and is no outcome.
    """
    hub = hub or LoopbackHub(size, (0,) * size if wire == "node" else None)
    hub.is_native = hub.is_native and not faults  # a fault is met in Python
    results = [None] * size

    def main(rank):
        transport = hub.transport(rank)
        if faults is not None and rank in faults:
            transport = FaultyTransport(transport, faults[rank])
        engine = Engine(transport, settings or Settings(timeout_s=DEADLINE_S))
        try:
            with serve_thread(engine):
                results[rank] = body(rank)
            if faults is not None and rank in faults:
                transport.flush()
        except BaseException as error:
            results[rank] = error
            blames = error.rank if isinstance(error, PeerFailedError) else None
            hub.kill(rank, f"raised {type(error).__name__}: {error}", blames=blames)
        finally:
            stop(engine)

    threads = [threading.Thread(target=main, args=(r,), daemon=True) for r in range(size)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + HANG_S
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0))
    if any(thread.is_alive() for thread in threads):
        faulthandler.dump_traceback(all_threads=True)
        raise AssertionError(f"ranks hang: {[t.is_alive() for t in threads]}")
    for each in results:
        if isinstance(each, AssertionError | pytest.fail.Exception):
            raise each
    return results


def run_ranks(size, body, **kwargs):
    """Run body(rank) on `size` ranks as threads; return the results, raise the first failure."""
    results = outcomes(size, body, **kwargs)
    failures = [r for r in results if isinstance(r, BaseException)]
    followers = (PeerFailedError,)
    for failure in sorted(failures, key=lambda error: isinstance(error, followers)):
        raise failure
    return results


def errors_of_ranks(size, body, **kwargs):
    """Return the exception that body(rank) raises on each rank; None where it raises none.

    Nobody is dead for it: a rank that still compares calls would hear of the death instead.
    """

    def main(rank):
        try:
            body(rank)
        except Exception as error:
            return error

    return outcomes(size, main, **kwargs)


def wait_until(is_so, what, timeout_s=DEADLINE_S):
    """Return once is_so(); fail with `what` after timeout_s.

    For news of other processes, in files and in /proc: nothing can be waited for there, so they are
    looked at again and again; a fifth of the time at most, for the job needs the cores, too.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        began_at = time.monotonic()
        if is_so():
            return
        assert time.monotonic() < deadline, what() if callable(what) else what
        # Nobody tells of a file or of another process.
        time.sleep(min(max(0.01, 4 * (time.monotonic() - began_at)), 0.2))


def is_running(pid):
    """Return False once a process has ended, whether or not its parent knows."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:  # ProcessLookupError too: it may end between opening the file and reading it
        return False


# --- jobs ---------------------------------------------------------------------------------------
BIN = Path(sys.executable).parent
LATE_IMPORTS = Path(__file__).parent / "late_imports"  # which saves seconds in each rank


def run_command(command, timeout=HANG_S, **options):
    """Run a command; return what subprocess.run() does, with all that it wrote as text."""
    options |= {"capture_output": True, "text": True}
    return subprocess.run(command, check=False, timeout=timeout, **options)


MPIRUN = run_command([BIN / "mpirun", "--version"]).stdout.lower()
IS_MPICH = "mpich" in MPIRUN or "hydra" in MPIRUN

above_mpi = pytest.mark.skipif(
    IS_MPICH, reason="above MPI all is the same, and shown with Open MPI"
)


def is_at_length():
    """Return True under ci/all_cases, which runs what the gate has no time for."""
    return os.environ.get("AT_LENGTH") == "1"


def is_fast():
    """Return True under ./ci/test --fast."""
    return os.environ.get("FAST") == "1"


def at_length(every, gate):
    """Return all the cases of a test under ci/all_cases, else those for which the gate has time."""
    return every if is_at_length() else gate


def load_little_of_torch():
    """Let torch load what is used of it, as in the ranks of jobs: the rest takes 5 s of a core."""
    if not is_at_length() and "torch" not in sys.modules:
        sys.path.append(str(LATE_IMPORTS))
        importlib.import_module("sitecustomize")


def torch_or_skip():
    """Return torch, little of which has loaded; skip the test where there is none."""
    load_little_of_torch()
    return pytest.importorskip("torch", reason="the core is tested without torch, too")


def few_of(cases):
    """Return some of a test's cases, in which each value of a parameter is met."""
    # By hash, so that they have nothing else in common, and are the same in the next run.
    mixed = sorted(cases, key=lambda item: hashlib.sha256(item.nodeid.encode()).digest())
    if len(cases) == 1 or is_fast():
        return mixed[:1]
    chosen, others, seen = [], [(item, _values_of(item)) for item in mixed], set()
    for n_new in range(max(len(values) for _, values in others), 0, -1):
        left = []  # those that add much come first: so few cases have all
        for item, values in others:
            if len(values - seen) >= n_new:
                chosen.append(item)
                seen |= values
            else:
                left.append((item, values))
        others = left
    return chosen or mixed[:1]


def _values_of(item):
    mark = item.get_closest_marker("one_wire")
    left = () if mark is None or mark.args == (False,) else ("wire",)
    return {(name, id(value)) for name, value in item.callspec.params.items() if name not in left}


def listen(is_enough):
    """Let this rank take note of what the others tell it until is_enough()."""
    engine().progress.run_until(is_enough)


@dataclass
class Job:
    code: int
    output: str
    seconds: float


def job_environment(extra=None):
    # Without buffers print() writes a line in pieces, which mpirun mixes with another rank's.
    foreign = ("RINGCOMM_", "OMPI_", "PMI", "PYTEST", "PYTHONUNBUFFERED")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    threads = {"OMP_NUM_THREADS": "1"}
    untuned = {"XDG_CACHE_HOME": "/nonexistent"}  # what was measured here must not matter
    fast = {} if is_at_length() else {"PYTHONPATH": str(LATE_IMPORTS)}
    return fast | inherited | root | threads | untuned | (extra or {})


def mpirun_command(n, *arguments, options=()):
    oversubscribe = () if IS_MPICH else ("--oversubscribe",)
    return [str(a) for a in (BIN / "mpirun", *oversubscribe, *options, "-np", n, *arguments)]


def start_job(n, *arguments, cwd, env=None, options=(), cluster=None):
    """Start `mpirun -np n python arguments...` in a session of its own; output is one pipe.

    On this machine, or on the hosts of a cluster of ci/fakecluster.py, from its h0.
    """
    inside = []
    if cluster is not None:
        inside = cluster.entering("h0", cwd)
        options = (*cluster.launch_options(is_mpich=IS_MPICH), *options)
    return subprocess.Popen(
        [*inside, *mpirun_command(n, BIN / "python", *arguments, options=options)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
        cwd=cwd,
        env=job_environment({"TMPDIR": _session_folder(cwd)} | (env or {})),
        start_new_session=True,
    )


def _session_folder(cwd):
    """Return a new folder for mpirun's files.

    In /tmp prterun 5 names them after its pid and leaves them when it is killed; the next one of
    that pid then ends with 213, "The PMIx server's listener thread failed to start".
    """
    return tempfile.mkdtemp(prefix="mpi", dir=cwd)


def start_run(n, script, *, cwd, options=(), env=None, output=subprocess.PIPE):
    """Start `ringcomm run` of a script, given as text; its folder is `run`.

    output: subprocess.DEVNULL for a test that does not read what is printed.
    """
    (Path(cwd) / "train.py").write_text(script)
    return subprocess.Popen(
        [BIN / "ringcomm", "run", "--run-folder", "run", "-np", str(n), *options, "train.py"],
        cwd=cwd,
        env=job_environment({"TMPDIR": str(cwd)} | (env or {})),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish_job(process, timeout_s=HANG_S, *, launcher_may_hang=False):
    """Wait for a job; one that hangs is killed, and the test fails with its output.

    launcher_may_hang: prterun 5 may not end after ranks were killed that had been stopped. Where
    all else has ended, and nobody asks for the exit code, it is killed after some seconds.
    """
    start = time.monotonic()
    try:
        if launcher_may_hang:
            threading.Thread(target=_end_lonely_launcher, args=(process,), daemon=True).start()
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        alive = _session_of(process.pid)
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"the job hangs in {alive}; it printed:\n{output}") from None
    return Job(process.returncode, output, time.monotonic() - start)


def _end_lonely_launcher(process, limit_s=20):
    """Kill a launcher if nothing else of its job has been there for so long."""
    alone_since = None
    while process.poll() is None:
        others = [each for each in _session_of(process.pid) if "prterun" not in each]
        if others or alone_since is None:
            alone_since = None if others else time.monotonic()
        elif time.monotonic() > alone_since + limit_s:
            os.kill(process.pid, signal.SIGKILL)
            return
        time.sleep(1)  # who ends is no child of this process


def _session_of(leader):
    """Return pid, name and state of the processes that the job still consists of."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            name, _, rest = path.read_text().rpartition(")")
            state, _, _, session, *_ = rest.split()
            if session == str(leader):
                found.append(f"{name}) {state}")
    return found


def run_job(n, *arguments, timeout_s=HANG_S, launcher_may_hang=False, **kwargs):
    """Run `mpirun -np n python arguments...` to its end."""
    job = start_job(n, *arguments, **kwargs)
    return finish_job(job, timeout_s, launcher_may_hang=launcher_may_hang)


def suite_command(*arguments):
    """Return the arguments of python by which each rank of a job runs these test files.

    Without the plugins of other packages: each rank would take 0.3 s of a core to load them.
    """
    root = Path(__file__).parents[1]
    foreign = ("-p", "no:cacheprovider", "-p", "no:anyio", "-p", "no:hypothesispytest")
    of_project = ("-c", root / "pyproject.toml", "--rootdir", root)
    return ["-P", "-m", "pytest", *of_project, *foreign, "-xq", *arguments]


def run_script(n, text, *arguments, cwd, **kwargs):
    """Run a script, given as text, on n ranks."""
    path = Path(cwd) / "script.py"
    path.write_text(text)
    return run_job(n, path, *arguments, cwd=cwd, **kwargs)
