"""A Slurm of one node on this machine, from the distribution's packages, for tests.

apt install slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge. `srun --mpi=pmix` needs
libpmix-dev, too, which has the name of the library that Slurm loads.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "salloc", "srun", "sinfo")
CPUS = 4  # of the node, whatever the machine has
_START_S = 30.0
_CONFIGURATION = """
ClusterName=one
SlurmctldHost={host}
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
SlurmUser=root
SlurmdUser=root
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmdSpoolDir={folder}/spool
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
KillWait=5
SlurmdParameters=config_overrides
NodeName={host} CPUs={cpus} Boards=1 SocketsPerBoard=1 CoresPerSocket={cpus} ThreadsPerCore=1
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def obstacle():
    """Return why this machine cannot run a Slurm, or None if it can."""
    if os.geteuid() != 0:
        return "a Slurm of its own needs root"
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"no {', '.join(missing)} here: apt install slurmctld slurmd slurm-client munge"
    return None


@contextlib.contextmanager
def running(folder):
    """Yield the environment in which Slurm's commands find a Slurm of one node."""
    folder = Path(folder)
    host = socket.gethostname()
    for name in ("spool", "state"):
        (folder / name).mkdir(parents=True)
    (folder / "slurm.conf").write_text(
        _CONFIGURATION.format(folder=folder, host=host, ports=_free_ports(2), cpus=CPUS)
    )
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o400)
    environ = dict(os.environ) | {"SLURM_CONF": str(folder / "slurm.conf")}
    munge = [f"--{name}={folder}/munge.{name}" for name in ("socket", "pid-file", "log-file")]
    munge += [f"--key-file={folder}/munge.key", f"--seed-file={folder}/munge.seed"]
    daemons = [
        ["munged", "--foreground", "--force", *munge],
        ["slurmctld", "-D"],
        ["slurmd", "-D"],
    ]
    processes = []
    try:
        for daemon in daemons:
            with open(folder / f"{daemon[0]}.out", "w") as output:
                processes.append(
                    subprocess.Popen(daemon, env=environ, stdout=output, stderr=output)
                )
            if daemon[0] == "munged":
                _await((folder / "munge.socket").exists, "munged does not start", folder)
        _await(lambda: "idle" in _state(environ), "no node is idle", folder)
        yield environ
    finally:
        for process in reversed(processes):
            process.send_signal(signal.SIGTERM)
        for process in reversed(processes):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()


def _state(environ):
    return subprocess.run(
        ["sinfo", "-h", "-o", "%T"], env=environ, capture_output=True, text=True, check=False
    ).stdout


def _await(is_so, what, folder):
    deadline = time.monotonic() + _START_S
    while not is_so():
        if time.monotonic() > deadline:
            logs = "".join(path.read_text() for path in sorted(folder.glob("*.out")))
            raise TimeoutError(f"{what}:\n{logs}")
        time.sleep(0.05)  # Slurm tells nobody


def _free_ports(n):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(n)]
        for each in sockets:
            each.bind(("", 0))
        return [each.getsockname()[1] for each in sockets]
