"""The fake hosts themselves: what they share, what befalls one, and that nothing is left."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fakecluster import COMMAND, Cluster, ClusterError, bytes_per_second, running, state_of
from harness import BIN, job_environment, wait_until
from measure_link_rate import measure

KNOCK = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], 9), timeout=1)  # nobody listens there
except ConnectionRefusedError:
    sys.exit(0)
except OSError:
    sys.exit(1)
"""
N_CORES = "import os; print(len(os.sched_getaffinity(0)))"
LIVE_UNTIL_KILLED = """
import sys, time
sys.path.insert(0, sys.argv[1])
from fakecluster import running
with running(sys.argv[2], 1, "1gbit"):
    print("up", flush=True)
    time.sleep(60)  # until the test kills it
"""


@pytest.fixture
def doomed():
    """Two hosts that a test may break."""
    with running(f"doomed-{os.getpid()}", 2, "200mbit") as cluster:
        yield cluster


def reaches(cluster, source, dest):
    command = [*cluster.entering(source), sys.executable, "-c", KNOCK, cluster.address(dest)]
    return subprocess.run(command, check=False).returncode == 0


def output_of(cluster, host, *command):
    return subprocess.check_output([*cluster.entering(host), *command], text=True)


def start_sleeper(cluster, host):
    sleeper = subprocess.Popen([*cluster.entering(host), "sleep", "60"])
    wait_until(lambda: sleeper.pid in cluster.pids(host), "the sleeper does not start")
    return sleeper


def test_a_host_has_a_name_and_an_address_of_its_own(cluster):
    assert output_of(cluster, "h1", "hostname") == "h1\n"
    assert "10.77.0.11" in output_of(cluster, "h1", "ip", "-brief", "address")
    assert reaches(cluster, "h0", "h1")


def test_shared_memory_of_a_host_is_its_own(cluster):
    output_of(cluster, "h0", "touch", "/dev/shm/mine")
    assert output_of(cluster, "h1", "ls", "/dev/shm") == ""
    assert not Path("/dev/shm/mine").exists()
    output_of(cluster, "h0", "rm", "/dev/shm/mine")


def test_commands_run_in_the_folder_of_the_caller(cluster, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert output_of(cluster, "h2", "pwd") == f"{tmp_path}\n"


def test_the_stand_in_for_ssh_takes_its_options_and_lets_the_shell_parse(cluster):
    agent = cluster.launch_options(is_mpich=False)[4]
    words = ["-x", "-o", "BatchMode=yes", "h1", "hostname;", "echo", "'a  b'"]
    said = subprocess.check_output([*cluster.entering("h0"), agent, *words], text=True)
    assert said == "h1\na  b\n"


@pytest.mark.parametrize(
    ("options", "n_cores"), [((), len(os.sched_getaffinity(0))), (("--bind-to", "core"), 1)]
)
def test_mpirun_binds_ranks_only_if_it_is_told_to(options, n_cores, cluster):
    job = [*options, "--oversubscribe", "-np", "2", sys.executable, "-c", N_CORES]
    said = subprocess.check_output(
        [sys.executable, COMMAND, "--name", cluster.name, "mpirun", *job],
        text=True,
        env=job_environment({"PATH": f"{BIN}:{os.environ['PATH']}"}),
        timeout=120,
    )
    assert said.split() == 2 * [str(n_cores)]


def test_a_link_has_its_rate(cluster):
    nominal = bytes_per_second(cluster.rate)
    assert 0.5 * nominal < measure(cluster, "h0", "h1") < 1.05 * nominal


def test_a_pulled_cable_parts_a_host_from_all(cluster):
    cluster.link("h1", "down")
    assert not reaches(cluster, "h0", "h1")
    assert reaches(cluster, "h0", "h2")
    cluster.link("h1", "up")
    assert reaches(cluster, "h0", "h1")


def test_a_cut_parts_two_hosts_alone(cluster):
    cluster.cut("h0", "h1")
    assert not reaches(cluster, "h0", "h1")
    assert reaches(cluster, "h2", "h1")
    cluster.heal("h0", "h1")
    assert reaches(cluster, "h0", "h1")


def test_frozen_processes_run_on_when_thawed(cluster):
    sleeper = start_sleeper(cluster, "h1")
    cluster.freeze("h1")
    assert state_of(sleeper.pid) == "T"
    cluster.thaw("h1")
    wait_until(lambda: state_of(sleeper.pid) == "S", "it does not run on")
    sleeper.kill()
    sleeper.wait()


@pytest.mark.parametrize("deed", ["crash", "kill"])
def test_a_dead_host_takes_its_own_processes_with_it_and_boots_afresh(deed, doomed):
    here, there = start_sleeper(doomed, "h0"), start_sleeper(doomed, "h1")
    output_of(doomed, "h1", "touch", "/dev/shm/old")
    getattr(doomed, deed)("h1")
    assert there.wait(60) == -signal.SIGKILL
    assert here.poll() is None
    with pytest.raises(ClusterError, match="h1: no route to host"):
        doomed.entering("h1")
    doomed.boot("h1")
    assert output_of(doomed, "h1", "ls", "/dev/shm") == ""
    assert reaches(doomed, "h0", "h1")
    here.kill()
    here.wait()


def test_a_second_cluster_of_one_name_is_refused_and_the_first_stays(cluster):
    with pytest.raises(ClusterError, match=f"{cluster.name} is up already"):
        Cluster(cluster.name).up(1, "1gbit")
    assert [cluster.is_up(host) for host in cluster.hosts] == [True] * 3


def test_what_fails_half_way_is_removed(monkeypatch):
    half = Cluster(f"half-{os.getpid()}")
    boot = half.boot
    monkeypatch.setattr(half, "boot", lambda host: boot(host) if host == "h0" else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        half.up(2, "1gbit")
    assert not half.folder.exists()
    assert half.name not in subprocess.check_output(["ip", "netns", "list"], text=True)


def test_down_needs_no_files(doomed):
    sleeper = start_sleeper(doomed, "h0")
    (doomed.folder / "h0.pid").unlink()
    (doomed.folder / "hostfile").unlink()
    doomed.down()
    assert sleeper.wait(60) == -signal.SIGKILL
    assert doomed.name not in subprocess.check_output(["ip", "netns", "list"], text=True)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_cluster_ends_with_whoever_runs_it(how):
    name = f"orphan-{os.getpid()}"
    command = [sys.executable, "-c", LIVE_UNTIL_KILLED, COMMAND.parent, name]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=quiet, text=True) as owner:
        assert owner.stdout.readline() == "up\n"
        owner.send_signal(how)
    wait_until(lambda: not Cluster(name).folder.exists(), "the cluster outlives its owner")
    assert name not in subprocess.check_output(["ip", "netns", "list"], text=True)
