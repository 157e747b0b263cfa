"""Ranks in sandboxes that refuse what the watch on a node is made of: real jobs, real refusals."""

import subprocess

import pytest
from harness import IS_MPICH, above_mpi, run_job, run_script

SCRIPT = """
import os, signal, sys
import numpy as np
{prelude}
import ringcomm as rc
from ringcomm.engine.api import world

rc.init()
transport = world.current().transport
assert (rc.local_rank(), rc.local_size(), rc.cross_size()) == (rc.rank(), rc.size(), 1)
assert transport.node is not None, "no shared memory"
assert len(transport.presence._neighbours.watched) == rc.size() - 1
assert rc.allreduce(np.ones(1000))[-1] == rc.size()
if rc.rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    rc.barrier()
except rc.PeerFailedError as error:
    open("heard", "w").write(str(error))
    raise
"""
# pidfd_open and pidfd_send_signal answer ENOSYS from now on, as on Linux 4.18; in the guardian too.
NO_PIDFDS = """
import ctypes, struct
libc = ctypes.CDLL(None, use_errno=True)
LOAD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
program = b"".join(struct.pack("HBBI", *each) for each in [
    (LOAD, 0, 0, 0),                    # the number of the call
    (JUMP_IF_EQUAL, 1, 0, 434),
    (JUMP_IF_EQUAL, 0, 1, 424),
    (RETURN, 0, 0, 0x00050000 | 38),
    (RETURN, 0, 0, 0x7FFF0000),
])
code = ctypes.create_string_buffer(program)
filters = ctypes.create_string_buffer(struct.pack("HxxxxxxP", 5, ctypes.addressof(code)))
assert libc.prctl(38, 1, 0, 0, 0) == 0  # no new privileges
if libc.prctl(22, 2, filters, 0, 0) != 0:
    sys.exit("no seccomp here: " + os.strerror(ctypes.get_errno()))
assert libc.syscall(434, os.getpid(), 0) == -1
assert ctypes.get_errno() == 38
"""


LOST = """
import numpy as np
import ringcomm as rc
from ringcomm.engine.api import world
from ringcomm.transport.node import node_discovery
def refuse(*_):
    raise PermissionError(13, "Permission denied")
node_discovery.Neighbour.reached = refuse
node_discovery.give = refuse
rc.init()
assert (rc.local_rank(), rc.local_size()) == (rc.rank(), 2), (rc.local_rank(), rc.local_size())
assert (rc.cross_rank(), rc.cross_size()) == (0, 1)
assert world.current().transport.nodes == (0, 1)
assert world.current().guardian is not None
assert rc.allreduce(np.ones(1000))[-1] == 2
rc.shutdown()
"""


def test_ranks_that_share_nothing_have_the_launcher_s_local_ranks_and_a_warning(tmp_path):
    job = run_script(2, LOST, cwd=tmp_path)
    assert job.code == 0, job.output
    assert job.output.count("rank 0 cannot share memory with rank 1 ([Errno 13]") == 1, job.output
    assert "could not be handed over" in job.output


def assert_death_is_told(script, folder):
    # Only under ULFM does a launcher leave the other the time to say what it heard.
    options = () if IS_MPICH else ("--with-ft", "ulfm")
    job = run_job(2, script, cwd=folder, options=options, env={"RINGCOMM_TIMEOUT_S": "100"})
    if "no seccomp here" in job.output:
        pytest.skip(job.output.partition("no seccomp")[2].splitlines()[0])
    assert job.code != 0, job.output
    assert "x rank 1 " in job.output, job.output
    assert "SIGKILL" in job.output, job.output
    assert "no guardian" not in job.output
    assert "cannot share memory" not in job.output
    if not IS_MPICH:
        heard = (folder / "heard").read_text()
        assert "rank 1" in heard
        assert "so says MPI" not in heard


@above_mpi
def test_without_pidfds_a_death_is_told_all_the_same(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT.format(prelude=NO_PIDFDS))
    assert_death_is_told("script.py", tmp_path)


@above_mpi
def test_ranks_with_user_namespaces_of_their_own_share_memory(tmp_path):
    if subprocess.run(["unshare", "-Ur", "true"], check=False).returncode != 0:
        pytest.skip("unshare -Ur is not permitted here")
    (tmp_path / "script.py").write_text(SCRIPT.format(prelude=""))
    enter = "import os, sys; os.execvp('unshare', ['unshare', '-Ur', sys.executable, 'script.py'])"
    (tmp_path / "enter.py").write_text(enter)
    assert_death_is_told("enter.py", tmp_path)


OWN_SHM = """
import numpy as np
import ringcomm as rc
rc.init()
assert rc.allreduce(np.ones(1000))[-1] == 2
rc.shutdown()
"""


@pytest.mark.skipif(IS_MPICH, reason="only what Open MPI is told depends on /dev/shm")
def test_ranks_with_a_shm_of_their_own_each_reach_each_other(tmp_path):
    enter = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs none /dev/shm && exec "$@"', "sh"]
    if subprocess.run([*enter, "true"], check=False).returncode != 0:
        pytest.skip("unshare -m is not permitted here")
    (tmp_path / "script.py").write_text(OWN_SHM)
    program = f"import os, sys; os.execvp('unshare', [*{enter}, sys.executable, 'script.py'])"
    (tmp_path / "enter.py").write_text(program)
    job = run_job(2, "enter.py", cwd=tmp_path)
    assert job.code == 0, job.output
