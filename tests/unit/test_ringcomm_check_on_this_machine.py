"""`ringcomm check` asks this very machine, in children that may fail."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from harness import at_length, run_command

from ringcomm.launch.check_install import gather_facts
from ringcomm.launch.child import run_child
from ringcomm.transport.node.private_memory import ptrace_scope


def ringcomm(*arguments, **variables):
    return subprocess.run(
        [sys.executable, "-P", "-m", "ringcomm", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
        env={**os.environ, **variables},
        check=False,
    )


def test_check_starts_no_mpi_and_imports_neither_torch_nor_what_finds_like_words():
    script = (
        "import sys; from ringcomm.launch.cli import main; code = main(['check']); "
        "unused = {'mpi4py', 'torch', 'cupy', 'difflib'}; "
        "sys.exit(code or bool(unused & set(sys.modules)))"
    )
    outcome = run_child([sys.executable, "-P", "-c", script], os.environ, deadline_s=120)
    assert outcome.code == 0, outcome.output


FAKES = {
    "dies": ("import os; os.kill(os.getpid(), 11)", "signal 11: no output"),
    "talks": ("print('hello'); print('world')", "exit 1: "),
    "asks": (
        "import mpi4py\nclass MPI: Get_library_version = lambda: f'{mpi4py.rc.initialize} start'",
        "False start",
    ),
}


@pytest.mark.parametrize(("source", "found"), FAKES.values(), ids=FAKES)
def test_the_library_is_asked_in_a_child_and_not_started(source, found, tmp_path, monkeypatch):
    (tmp_path / "mpi4py.py").write_text(f"class rc: initialize = True\n{source}\n")
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    library = gather_facts._library(os.environ)
    assert (library.error or str(library.kind)).startswith(found)


GPU_FAKES = {
    "dies": ("import os; os.kill(os.getpid(), 11)", 60, "signal 11: no output"),
    "ends the program": ("import os; os.write(1, b'sorry'); os._exit(5)", 60, "exit 5: sorry"),
    "hangs": ("import time; time.sleep(60)", 1, "no answer in 1 s"),
}


@pytest.mark.parametrize(("source", "limit_s", "error"), GPU_FAKES.values(), ids=GPU_FAKES)
def test_the_gpu_is_looked_for_in_a_child_that_may_fail(
    source, limit_s, error, tmp_path, monkeypatch
):
    monkeypatch.setattr(gather_facts, "_ANSWER_S", limit_s)
    (tmp_path / "cupy.py").write_text(source)
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    assert gather_facts._gpu(os.environ) == (None, error)


def long_messages(prelude, **variables):
    """Return what check says of long messages, in a process that has run the prelude."""
    script = "\n".join(
        [
            "import os, sys",
            f"sys.path.insert(0, {str(TESTS)!r})",
            prelude,
            "os.execv(sys.executable, [sys.executable, '-P', '-m', 'ringcomm', 'check', '--json'])",
        ]
    )
    command = [sys.executable, "-P", "-c", script]
    ended = run_command(command, env={**os.environ, **variables})
    assert ended.returncode == 0, ended.stderr
    found = {each["subject"]: each for each in json.loads(ended.stdout)["checks"]}
    return found["long messages"]


TESTS = Path(__file__).parents[1]
REFUSE = "from refused_system_calls import PROCESS_VM_READV, refuse; refuse(PROCESS_VM_READV, {})"


@pytest.mark.parametrize("error", at_length([errno.EPERM, errno.ENOSYS], [errno.EPERM]))
def test_check_says_what_refuses_that_long_messages_are_read(error):
    told = long_messages(REFUSE.format(error))
    assert told["status"] == "note"
    name = errno.errorcode[error]
    assert (
        f"copied twice, through shared memory: process_vm_readv is refused ({name}"
        in (told["found"])
    )
    assert told["fix"]


def test_check_tries_no_read_that_the_user_forbids():
    told = long_messages(REFUSE.format(errno.EPERM), RINGCOMM_READ_MEMORY="0")
    assert (told["status"], told["fix"]) == ("ok", None)
    assert told["found"].endswith("as RINGCOMM_READ_MEMORY=0 says")


ROOT_FOLDER = Path(__file__).parents[2]


def in_folder(folder, *arguments):
    # -S keeps out what is really installed, which may be imported from here, too.
    return run_command([sys.executable, "-S", *arguments], cwd=folder)


@pytest.mark.parametrize(
    "statement", ["from ringcomm import _core", "from ringcomm._core import x"]
)
def test_in_the_source_folder_the_import_says_to_leave_it(statement):
    last = in_folder(ROOT_FOLDER, "-c", statement).stderr.splitlines()[-1]
    assert last == (
        f"ImportError: {ROOT_FOLDER} is ringcomm's source folder, which has no compiled part: "
        "take it out of PYTHONPATH, and start python elsewhere or with -P; or type: "
        f"pip install -e {ROOT_FOLDER}"
    )


def test_elsewhere_the_import_says_to_install_anew(tmp_path):
    (tmp_path / "ringcomm").mkdir()
    for name in ("__init__.py", "_version.py", "_core.py"):
        shutil.copy(ROOT_FOLDER / "ringcomm" / name, tmp_path / "ringcomm")
    last = in_folder(tmp_path, "-c", "import ringcomm._core").stderr.splitlines()[-1]
    assert last.startswith(f"ImportError: the ringcomm in {tmp_path} has no compiled part for")


def test_check_in_the_source_folder_says_to_leave_it():
    ended = in_folder(ROOT_FOLDER, "-m", "ringcomm", "check")
    assert ended.returncode == 1, ended.stderr
    (line,) = (line for line in ended.stdout.splitlines() if "compiled part" in line)
    assert line.endswith(f"change to another folder, or python -P, or pip install -e {ROOT_FOLDER}")


# What an enclosing job left in the environment; believed, it would make every rank a job of one.
STALE = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "PMIX_RANK": "3",
    "PMIX_NAMESPACE": "gone@1",
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
    "PMI_FD": "77",
    "SLURM_STEP_NUM_TASKS": "4",
    "PBS_NODEFILE": "/nowhere",
}


@pytest.mark.long
def test_two_ranks_do_a_real_allreduce_also_inside_a_job():
    ended = ringcomm("check", "--run", "--json", **STALE)
    report = json.loads(ended.stdout)
    run = report["checks"][-1]
    assert ended.returncode == 0, report
    assert run["subject"] == "run"
    assert run["found"].startswith("2 ranks, allreduce correct")
    told = next(each for each in report["checks"] if each["subject"] == "long messages")
    way = "copied twice" if (ptrace_scope() or 0) > 1 else "copied once"  # if Yama forbids it
    assert told["found"].startswith(way)
    assert f"; a long message was {way}" in run["found"]
    assert run["found"].endswith("; the ranks of one host listen on no port")
