"""MPI that a program starts late or ends early: it works, or is refused before MPI aborts."""

import pytest
from harness import IS_MPICH, at_length, run_script

BEGIN = """
import atexit
import mpi4py
import numpy as np
import ringcomm as rc

def end():
    from mpi4py import MPI
    MPI.Finalize()

def end_in_c():
    import ctypes
    from mpi4py import MPI
    assert ctypes.CDLL(MPI.__file__).MPI_Finalize() == 0

def meet_and_end():
    from mpi4py import MPI
    assert MPI.COMM_SELF.allreduce(1) == 1
    MPI.Finalize()

def use():
    rc.init()
    assert rc.allreduce(np.ones(2)).sum() == 4

"""
CASES = {
    "ends MPI without shutdown(), and goes on": """
use()
end()
assert not rc.is_initialized()
for call in (lambda: rc.allreduce(np.ones(2)), rc.init):
    try:
        call()
        raise AssertionError("it was not refused")
    except (rc.NotInitializedError, rc.ConfigError) as error:
        print(type(error).__name__, error)
""",
    "ends MPI after shutdown()": "use(); rc.shutdown(); end()",
    "ends MPI at exit, before ringcomm does": "use(); atexit.register(end)",
    "ends MPI at exit, after ringcomm's handler": "atexit.register(end); use()",
    "ends MPI in C at exit, after ringcomm's handler": "atexit.register(end_in_c); use()",
    "ends MPI in C at exit, before ringcomm does": "use(); atexit.register(end_in_c)",
    "ends MPI in C": "use(); end_in_c(); assert not rc.is_initialized()",
    "uses MPI at exit, before it ends it there": "atexit.register(meet_and_end); use()",
    "ends MPI at exit, and had imported it before": (
        "from mpi4py import MPI; atexit.register(MPI.Finalize); use()"
    ),
    "ends MPI at exit by itself alone": (
        "mpi4py.rc.finalize = False; from mpi4py import MPI; atexit.register(MPI.Finalize); use()"
    ),
    "imports MPI before, and ends it": "from mpi4py import MPI; use(); end()",
    "leaves a late start to ringcomm": (
        "mpi4py.rc.initialize = False; from mpi4py import MPI; use()"
    ),
    "starts MPI late, and ends it": (
        "mpi4py.rc.initialize = False; from mpi4py import MPI; MPI.Init(); use(); end()"
    ),
    "starts after the end": """
from mpi4py import MPI
end()
try:
    rc.init()
    raise AssertionError("it was not refused")
except rc.ConfigError as error:
    assert str(error).startswith("ringcomm.init: MPI_Finalize was called"), error
""",
}


BESIDE = """
import os
first = "0" in (os.environ.get("OMPI_COMM_WORLD_RANK"), os.environ.get("PMI_RANK"))
exec({case!r} if first else {other!r})
"""
ALONE = "starts after the end"  # all ranks, for no other one comes through init()
PAIRED = [name for name in CASES if name != ALONE]
# Each way beside the next one: what one rank does on its way out must not hinder another one's.
PAIRS = [*zip(PAIRED, PAIRED[1:] + PAIRED[:1], strict=True)]
# What a library lets a program do after, before and at its end is shown with each.
OF_EACH_MPI = [("ends MPI in C", "ends MPI at exit, after ringcomm's handler")]


@pytest.mark.parametrize(
    ("case", "other"),
    at_length([*zip(CASES, CASES, strict=True), *PAIRS], OF_EACH_MPI if IS_MPICH else PAIRS[::2]),
)
def test_a_program_that(case, other, tmp_path):
    job = run_script(2, BEGIN + BESIDE.format(case=CASES[case], other=CASES[other]), cwd=tmp_path)
    assert job.code == 0, job.output
    if "leaves a late start to ringcomm" in (case, other):
        assert "too late" not in job.output


def test_a_process_that_starts_after_the_end_is_refused(tmp_path):
    job = run_script(1, BEGIN + CASES[ALONE], cwd=tmp_path)
    assert job.code == 0, job.output


def test_a_hook_that_ends_mpi_hides_no_failure(tmp_path):
    """The others hear what the rank raised, and not that it left in order."""
    text = """
import sys
def hook(*error):
    end()
    sys.__excepthook__(*error)
use()
sys.excepthook = hook
if rc.rank() == 1:
    raise ValueError("boom")
rc.allreduce(np.ones(2))
"""
    job = run_script(2, BEGIN + text, cwd=tmp_path)
    assert job.code == 1, job.output
    assert "raised ValueError" in job.output
    assert "called shutdown()" not in job.output
