"""prterun, and prted on the other hosts of a job, let in nobody of their host but their user."""

import os
import shlex
import shutil
import subprocess
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from harness import BIN, HANG_S, job_environment, wait_until
from other_users import AS_ANOTHER

import ringcomm
from ringcomm.launched.launcher_door import with_door

TRAIN = """
import os
import numpy as np
import ringcomm as rc
rc.init()
open(f"{rc.rank()}.here", "w").write(os.environ.get("LD_PRELOAD", ""))
while not rc.broadcast_object(os.path.exists("enough")):
    pass
assert rc.allreduce(np.ones(1))[0] == 2
"""
# Says of each port how many connections are closed, of one that has sent a byte and 200 idle ones.
HOLD = """
import socket, sys
held = []
for place in sys.argv[1:]:
    address, port = place.split()
    closed = 0
    try:
        at_this = [socket.create_connection((address, int(port)), timeout=10) for _ in range(201)]
        held += at_this
        for each in at_this:
            try:
                if each is at_this[0]:
                    each.sendall(b"x")
                closed += each.recv(1) == b""
            except (ConnectionResetError, BrokenPipeError):
                closed += 1
    except TimeoutError:
        pass  # it is neither accepted nor closed
    print(place, closed, flush=True)
sys.stdin.read()
"""
PYTHON = "/usr/bin/python3"  # another user may not reach the folder of this one
needs_python = pytest.mark.skipif(not Path(PYTHON).exists(), reason="no other user can be tried")


@contextmanager
def running_job(cluster, folder):
    """Yield a job with a rank on h0 and one on h1, which ends when the file `enough` is there."""
    (folder / "train.py").write_text(TRAIN)
    reach = cluster.launch_options(is_mpich=False)
    reach = [str(each) for each in reach[reach.index("--prtemca") :]]  # not the host file
    job = [BIN / "ringcomm", "run", "--run-folder", "run", "-H", "h0:1,h1:1"]
    job += ["--launcher-options", shlex.join(reach), "train.py"]
    with (
        (folder / "job.txt").open("w") as said,
        subprocess.Popen(
            [*cluster.entering("h0", folder), *job],
            env=job_environment({"TMPDIR": str(folder)}),
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
        ) as process,
    ):
        try:
            here = [folder / f"{rank}.here" for rank in range(2)]
            wait_until(
                lambda: all(each.exists() for each in here) or process.poll() is not None,
                (folder / "job.txt").read_text,
            )
            assert process.poll() is None, (folder / "job.txt").read_text()
            yield process
        finally:
            process.kill()


def places_of(daemon, cluster, host):
    """Return "address port" of each socket on which this program listens on a host."""
    of_host = [Path(f"/proc/{pid}") for pid in cluster.pids(host)]
    daemons = [each for each in of_host if (each / "comm").read_text() == f"{daemon}\n"]
    links = {os.readlink(file) for each in daemons for file in (each / "fd").iterdir()}
    found = []
    for table in ("tcp", "tcp6"):
        for line in (daemons[0] / "net" / table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in links:
                address, port = fields[1].split(":")
                is_local = address == "0100007F"
                where = "127.0.0.1" if is_local else cluster.address(host)
                found.append(f"{where} {int(port, 16)}")
    return found


@needs_python
@pytest.mark.parametrize(("host", "daemon"), [("h0", "prterun"), ("h1", "prted")])
def test_another_user_of_a_host_does_not_hold_up_the_job(host, daemon, cluster, tmp_path):
    with ExitStack() as ends:
        job = ends.enter_context(running_job(cluster, tmp_path))
        places = places_of(daemon, cluster, host)
        assert len(places) > 1, "it listens for daemons and for ranks"
        (session,) = tmp_path.glob("ringcomm-prted-*/prted.*")
        assert session.parent.stat().st_mode & 0o777 == 0o700
        attacker = ends.enter_context(
            subprocess.Popen(
                [*cluster.entering(host, "/"), *AS_ANOTHER, PYTHON, "-I", "-c", HOLD, *places],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        ends.callback(attacker.kill)
        assert [attacker.stdout.readline() for _ in places] == [f"{each} 201\n" for each in places]
        (tmp_path / "enough").touch()
        assert job.wait(HANG_S) == 0, (tmp_path / "job.txt").read_text()
        assert attacker.poll() is None, "it has not held on to the end"
    for rank in range(2):
        assert (tmp_path / f"{rank}.here").read_text() == "", "a rank has the library"
    assert not session.parent.exists()


def test_a_host_without_the_library_is_named_and_the_job_goes_on(cluster, tmp_path):
    package, copy = Path(ringcomm.__file__).parent, tmp_path / "copy"
    library = Path(with_door(""))
    shutil.copytree(package, copy)
    (copy / library.relative_to(package)).unlink()
    subprocess.run([*cluster.entering("h1"), "mount", "--bind", copy, package], check=True)
    try:
        with running_job(cluster, tmp_path) as job:
            (tmp_path / "enough").touch()
            assert job.wait(HANG_S) == 0, (tmp_path / "job.txt").read_text()
    finally:
        subprocess.run([*cluster.entering("h1"), "umount", "--lazy", package], check=True)
    said = (tmp_path / "job.txt").read_text()
    assert said.count(f"host h1 has no {library}") == 1, said
    assert "ld.so" not in said
