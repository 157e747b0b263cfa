"""ci/gpu_suite.sh without a GPU: its stages, their limits, and the table."""

import os
import re
import subprocess
import sys
import tarfile
import time
from importlib.util import find_spec
from pathlib import Path

import gpu_suite.__main__ as suite
import pytest
from gpu_suite import stage_runner
from gpu_suite.stage_runner import Row, Stage, run_stage
from harness import at_length, is_running, run_job, wait_until

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


@pytest.mark.parametrize("call", at_length([1, 4], [4]))
def test_a_dry_run_skips_every_stage_with_the_reason(call, tmp_path):
    # RINGCOMM_WHEELS is the script's own; the package would refuse it.
    options = ("--dry-run", "--installed", "--call", str(call))
    done = run_script(tmp_path, *options, "out", RINGCOMM_WHEELS="/nowhere")
    assert (done.returncode, done.stderr) == (0, "")
    name = f"call-{call}"
    table = (tmp_path / "out" / f"{name}.txt").read_text()
    assert table in done.stdout
    rows, why, *_ = table.split("\n\n")
    stages = [re.split(r"  +", line)[:2] for line in rows.splitlines()]
    expected = [stage.name for wave in suite.plan(call) for stage in wave]
    assert stages == [
        *([each, "ok" if each == "facts" else "skip"] for each in expected),
        [suite.ONE_MACHINE, "not shown"],
    ]
    assert why.strip() == "skip: a dry run"
    found = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert found == [f"{name}-logs.tar.gz", f"{name}.txt"]


def test_the_calls_have_all_stages_once():
    assert [wave for n in (1, 2, 3, 4) for wave in suite.plan(n)] == suite.plan()
    assert len(NAMES) == len(set(NAMES))


def test_each_call_can_end_in_9_minutes():
    for number, waves in suite.calls().items():
        limits = [max(stage.limit_s for stage in wave) for wave in waves]
        assert sum(limits) <= suite.LIMIT_S < 540, limits
        if number == 1:  # it builds, beside the stages that do not need that
            after = [max(s.limit_s for s in w) for w in waves if all(s.needs_build for s in w)]
            assert sum(after) <= suite.LIMIT_S - 300  # of which a busy machine has built in 265


def test_a_build_is_cut_by_the_end_of_its_call_alone(monkeypatch):
    folders = [f"--{name}={name}" for name in ("out", "work", "wheels")]
    monkeypatch.setattr(sys, "argv", ["gpu_suite.sh", *folders])
    assert suite.set_up(suite.arguments()).limit_s == suite.LIMIT_S


def test_a_run_of_nothing_is_no_success(tmp_path):
    if isinstance(suite.missing_gpu(), int):
        pytest.skip("there is a GPU")
    assert run_script(tmp_path, "--installed", "--only", "kernels").returncode == 1


@pytest.mark.parametrize("names", ["nosuch", "facts,nosuch", ","])
def test_a_stage_that_is_not_known_is_refused_with_those_that_are(names, tmp_path):
    done = run_script(tmp_path, "--dry-run", "--installed", "--only", names)
    what = "no names" if names == "," else "no stage is called 'nosuch'"
    known = f"The stages are {', '.join(NAMES)}; a beginning will do"
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"gpu_suite: --only: {what}. {known}\n"
    assert list(tmp_path.iterdir()) == []


def test_stages_are_chosen_by_how_their_names_begin(tmp_path):
    done = run_script(tmp_path, "--dry-run", "--installed", "--only", "kern,pack,")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "gpu_suite: 1 not shown, 2 skip"


def test_an_option_that_lacks_its_names_is_refused(tmp_path):
    done = run_script(tmp_path, "--only")
    said = "gpu_suite: --only needs names, as in --only facts,ipc\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)


def test_a_call_that_is_not_known_is_refused(tmp_path):
    done = run_script(tmp_path, "--call", "5")
    assert (done.returncode, done.stderr) == (2, "gpu_suite: --call needs 1, 2, 3 or 4\n")


def test_results_replace_those_of_an_earlier_run_and_files_of_others_stay(tmp_path):
    (tmp_path / "out").mkdir()
    for name in ("all-calls.txt", "of-another.txt"):
        (tmp_path / "out" / name).write_text("old")
    run_script(tmp_path, "--dry-run", "--installed", "--only", "kernels", "out")
    assert (tmp_path / "out" / "of-another.txt").read_text() == "old"
    assert "kernels" in (tmp_path / "out" / "all-calls.txt").read_text()


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


def test_a_set_up_that_lacks_modules_says_which_and_stops_no_probe(tmp_path):
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", bare], check=True)
    usual = os.defpath  # of no mpirun, cmake or ninja of this environment
    done = run_script(tmp_path, "--dry-run", path=f"{bare / 'bin'}:{usual}", RINGCOMM_WHEELS="/no")
    assert (done.returncode, done.stderr) == (1, "")
    rows = (tmp_path / "gpu-suite" / "all-calls.txt").read_text().splitlines()
    assert rows[0].startswith("facts                      ok ")
    (row,) = (row for row in rows if row.startswith("set-up"))
    assert row.split()[1] == "FAIL"
    (last,) = (x.strip() for x in done.stdout.splitlines() if x.startswith("    gpu_suite: "))
    assert last.startswith(f"gpu_suite: {bare / 'bin' / 'python3'} has no numpy, mpi4py, pytest, ")
    assert "nanobind, scikit_build_core" in last
    assert "torch" not in last.partition(". In ")[0], "a dry run needs none"
    assert last.endswith(
        f"In {ROOT}, type: pip install '.[torch,cuda13,openmpi,test,build]', or cuda12 instead of "
        "cuda13"
    )
    assert "Traceback" not in done.stdout


@pytest.mark.parametrize("each", [s for wave in suite.plan() for s in wave], ids=lambda s: s.name)
def test_what_a_stage_runs_is_there(each):
    command = list(each.command)
    if "-m" in command:
        assert find_spec(command[command.index("-m") + 1])
    assert all(Path(word).exists() for word in command if word.endswith(".py"))


# A cupy and a driver whose GPU is tests/gpu_emulation.py. Machine code is the compiler's options.
CUPY = {
    "__init__.py": "from cupy import cuda",
    "cuda/__init__.py": """
import ctypes
from types import SimpleNamespace
import gpu_emulation
from cupy.cuda import nvrtc
from ringcomm.gpu.device import driver
from ringcomm.gpu.kernels.base import source

class Driver:
    def load_function(self, code, name):
        defines = [each for each in code.decode().split() if each.startswith("-DRC_")]
        return gpu_emulation.build(tuple(defines), source())

    def launch(self, function, grid, block, extra, stream):
        _, parameters, _, size, _ = (ctypes.c_size_t * 5).from_address(extra)
        nbytes = ctypes.c_size_t.from_address(size)
        function.launch(grid, block, ctypes.c_void_p(parameters), nbytes)

driver.CudaDriver = Driver
alloc_pinned_memory = bytearray
runtime = SimpleNamespace(deviceGetAttribute=lambda *_: 9, deviceSynchronize=lambda: None)
""",
    "cuda/nvrtc.py": """
getSupportedArchs, NVRTCError, destroyProgram = lambda: [99], RuntimeError, lambda _: None
getVersion = lambda: (13, 0)
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
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "XDG_CACHE_HOME": str(tmp_path),
            "AT_LENGTH": "0",  # the number of cases is known
        },
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
    wait_until(lambda: not is_running(pid), f"process {pid} lives")


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


@pytest.fixture
def run_all(tmp_path):
    """Return a function that runs waves, and returns their rows."""

    def run_all(*waves, build=None):
        (tmp_path / "work").mkdir()
        environment = suite.environment_of(tmp_path / "work")
        made = suite.Suite(tmp_path, 1, environment, time.monotonic() + 60)
        made.run(list(waves), build)
        return made.rows

    return run_all


def python(name, script, **options):
    return Stage(name, [sys.executable, "-c", script], 20, **options)


def test_stages_of_one_wave_run_side_by_side_and_a_failure_stops_none(
    tmp_path, run_all, monkeypatch
):
    monkeypatch.setattr(suite, "missing_gpu", lambda: 1)  # it still works
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    command = [sys.executable, "-c", MEETING]
    wave = [
        Stage("one", [*command, a, b], 20),
        python("bad", "exit(5)"),
        Stage("two", [*command, b, a], 20),
    ]
    rows = run_all(wave, [python("later", "print('3 passed')")])
    assert [(row.name, row.verdict) for row in rows] == [
        ("one", "ok"),
        ("bad", "FAIL"),
        ("two", "ok"),
        ("later", "ok"),
    ]
    assert [line.split()[:2] for line in (tmp_path / "call-1.txt").read_text().splitlines()] == [
        [row.name, row.verdict] for row in rows
    ]
    with tarfile.open(tmp_path / "call-1-logs.tar.gz") as logs:
        assert sorted(logs.getnames())[1:] == [
            f"logs/{n}.log" for n in ("bad", "later", "one", "two")
        ]


def test_a_gpu_that_does_not_work_any_more_ends_what_needs_it(run_all, monkeypatch, tmp_path):
    monkeypatch.setattr(suite, "missing_gpu", lambda: "no GPU: cuInit failed")
    rows = run_all(
        [python("bad", "exit(5)")],
        [python("more", "print(1)")],
        [python("host", "print(2)", needs_gpu=False)],
    )
    assert [row.verdict for row in rows] == ["FAIL", "skip", "ok"]
    assert "skip: no GPU: cuInit failed" in (tmp_path / "call-1.txt").read_text()


def test_the_build_is_beside_what_needs_none_and_its_failure_skips_the_rest(run_all, tmp_path):
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    first = Stage("probe", [sys.executable, "-c", MEETING, a, b], 20, needs_build=False)
    build = Stage(
        suite.SET_UP, [sys.executable, "-c", MEETING + "exit(3)", b, a], 20, needs_gpu=False,
        needs_build=False,
    )  # fmt: skip
    rows = run_all([first], [python("tests", "print(1)")], build=build)
    assert [(row.name, row.verdict, row.text) for row in rows[::2]] == [
        ("probe", "ok", "no output"),
        ("tests", "skip", "the set-up failed"),
    ]
    assert rows[1].verdict == "FAIL"


def test_what_needs_two_gpus_is_not_shown_on_one(run_all):
    (row,) = run_all([python("pairs", "print(1)", n_gpus=2)])
    assert (row.verdict, row.text) == ("not shown", "needs 2 GPUs, this machine has 1")


def test_a_stage_that_is_cut_says_where_its_threads_were(tmp_path, monkeypatch):
    monkeypatch.setattr(stage_runner, "SHORTEST_S", 0)
    script = "import time\ndef stuck():\n    time.sleep(60)\nstuck()"
    made = Stage("a stage", [sys.executable, "-c", script], 1.0)
    environment = suite.environment_of(tmp_path)
    row = run_stage(made, tmp_path / "log", environment, time.monotonic() + 60)
    assert row.verdict == "cut"
    assert "in stuck" in (tmp_path / "log").read_text()


def test_details_stand_below_the_rows():
    rows = [Row("a", "ok", 1.5, "1 GB/s", ("x 1", "y 2")), Row("b", "skip", 0.0, "no GPU")]
    assert suite.table(rows) == (
        f"{'a':<26} ok           1.5 s  1 GB/s\n"
        f"{'b':<26} skip         0.0 s  no GPU\n\na\nx 1\ny 2\n"
    )
