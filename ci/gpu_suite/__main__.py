"""Runs the stages of ci/gpu_suite.sh in their order, and prints a table of the results."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from gpu_suite.stage_runner import Row, Stage, run_stage

ROOT = Path(__file__).resolve().parents[2]
SET_UP = "set-up"
LIMIT_S = 525  # of a call, which may take 9 minutes
TAIL = 25  # lines of the log of a stage that failed
# A new process uses the GPU, which after some failures none can; prints the number of GPUs.
PROBE = """
from gpu_suite.cuda_driver_by_ctypes import Driver
gpu = Driver()
at = gpu.allocate(4)
gpu.call("cuMemsetD32_v2", at, 7, 1)
assert gpu.read(at) == 7
print(gpu.n_gpus)
"""
ONE_MACHINE = "several hosts"
Plan = list[list["Stage"]]


def python(*arguments: str) -> list[str]:
    """Return a command of the environment that the set-up makes, if any."""
    return ["python3", "-P", *arguments]


def ranks(size: int, *arguments: str) -> list[str]:
    """Return the command of a job, whose ranks may outnumber the cores and use several each."""
    options = ("--oversubscribe", "--bind-to", "none", "-np", str(size))
    return ["mpirun", *options, *python(*arguments)]


def probe(name: str, what: str, limit_s: float = 25) -> Stage:
    command = [sys.executable, "-P", "-m", "gpu_suite.driver_probes", what]
    return Stage(f"probe {name}", command, limit_s, needs_build=False)


def collectives(transport: str, size: int, limit_s: float = 75, **environment: str) -> Stage:
    command = ranks(size, "-m", "gpu_suite.collectives", transport)
    forced = {"RINGCOMM_GPU_TRANSPORT": transport, "RINGCOMM_TIMEOUT_S": "40", **environment}
    return Stage(f"{transport} N={size}", command, limit_s, forced)


def small(transport: str, size: int) -> Stage:
    whole = collectives(transport, size, 40)
    return replace(whole, name=f"small {whole.name}", command=[*whole.command, "small"])


def on_two_gpus(stage: Stage) -> Stage:
    """Return a stage whose ranks have a GPU each."""
    return replace(stage, name=f"{stage.name}, a GPU each", n_gpus=2)


def speed(size: int, limit_s: float) -> Stage:
    environment = {"RINGCOMM_GPU_TRANSPORT": "ipc", "GLOO_SOCKET_IFNAME": "lo", **SHARED_NCCL}
    begin_by_s = limit_s - 25  # a measurement that begins by then ends in time
    command = ranks(size, "-m", "gpu_suite.allreduce_speed", str(begin_by_s))
    return Stage(f"speed N={size}", command, limit_s, environment)


def under_mps(stage: Stage) -> Stage:
    """Return a stage whose ranks use the GPU at the same time, instead of in time slices."""
    command = [sys.executable, "-P", "-m", "gpu_suite.under_mps", *stage.command]
    return replace(stage, name=f"{stage.name}, MPS", command=command)


def elastic(mode: str) -> Stage:
    options = ("--with-ft", "ulfm", "--runtime-options", "error-nonzero-status=0")
    launcher, *rest = ranks(4, "-m", "gpu_suite.elastic", mode)
    environment = {"RINGCOMM_ELASTIC": "1", "RINGCOMM_TIMEOUT_S": "40"}
    return Stage(f"elastic {mode} N=4", [launcher, *options, *rest], 60, environment)


# With these, NCCL 2.30 or newer lets several ranks share a GPU.
SHARED_NCCL = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0"}
KERNELS = (
    *("-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT), "--noconftest"),
    *("-p", "no:cacheprovider", "-p", "gpu_suite.kernels_on_gpu_plugin"),
    *("-o", "filterwarnings=default"),
    *("-q", "-r", "fE", "-k", "not planted", str(ROOT / "tests" / "gpu" / "test_kernels.py")),
)


def calls() -> dict[int, Plan]:
    """Return the stages of each call, as lists of stages that run at the same time.

    The first call must be worth it alone. Stages that measure times run alone.
    """
    look = [sys.executable, "-P", "-m", "gpu_suite.facts"]
    facts = Stage("facts", look, 40, needs_gpu=False, needs_build=False)
    probes = [
        probe("memory operations", "memory"),
        probe("release of a stream", "release"),
        probe("blocked calls", "blocked", 40),
        *(probe(f"ipc N={n}", f"ipc,{n}") for n in (2, 4, 8)),
        *(probe(f"ipc N={n}, MPS", f"ipc,{n},mps") for n in (2, 4, 8)),
    ]
    return {
        1: [
            [facts],
            *([each] for each in probes),
            [Stage("kernels", python("-m", "pytest", *KERNELS), 100)],
            [small("ipc", 2), small("staged", 2), small("nccl", 1)],
            [Stage("reduce kernel", python("-m", "gpu_suite.reduce_speed"), 40)],
        ],
        2: [
            [collectives("ipc", 2), collectives("ipc", 3), collectives("staged", 2)],
            [
                collectives("ipc", 4),
                collectives("staged", 4),
                collectives("nccl", 1),
                Stage("streams N=2", ranks(2, "-m", "gpu_suite.order_on_streams"), 60),
            ],
            [collectives("ipc", 8, 90)],
            [
                collectives("nccl", 2, 40, **SHARED_NCCL),
                collectives("nccl", 4, 40, **SHARED_NCCL),
            ],
            [on_two_gpus(collectives("nccl", 2))],
            [on_two_gpus(collectives("ipc", 2))],
        ],
        3: [
            [Stage("faults N=4", python("-m", "gpu_suite.faults"), 75)],
            [
                Stage("training N=4", ranks(4, "-m", "gpu_suite.training"), 75),
                Stage("example N=2", ranks(2, str(ROOT / "examples" / "gpu_train.py")), 60),
                Stage("c10d N=2", ranks(2, "-m", "gpu_suite.process_group"), 60),
                Stage("servers N=3", ranks(3, "-m", "gpu_suite.parameter_server"), 60),
            ],
            [elastic("run"), elastic("continue")],
        ],
        4: [
            [speed(2, 60)],
            [speed(8, 90)],
            [under_mps(speed(2, 60))],
            [under_mps(speed(8, 90))],
            [speed(4, 70)],
            [under_mps(speed(4, 70))],
            [Stage("pack", python("-m", "gpu_suite.pack_speed"), 40)],
        ],
    }


def plan(call: int | None = None) -> Plan:
    """Return the stages of a call; None: of all calls."""
    return [wave for number, waves in calls().items() if call in (None, number) for wave in waves]


def main() -> int:
    args = arguments()
    begin = time.monotonic()
    suite = Suite(args.out, args.call, environment_of(args.work), begin + args.limit)
    suite.look_for_gpu(is_dry=args.dry_run)
    waves = [[s for s in w if s.name.startswith(args.only)] for w in plan(args.call)]
    build = None if args.installed else set_up(args)
    suite.run([wave for wave in waves if wave], build)
    return suite.end(is_dry=args.dry_run)


def set_up(args: argparse.Namespace) -> Stage:
    """Return the stage that makes the environment of all stages but the first ones.

    It may take all the time of the call: the stages behind it need it, and a later call needs no
    build of its own if there is a wheel.
    """
    options = ["--dry-run"] if args.dry_run else []
    script = str(Path(__file__).with_name("build_without_network.py"))
    command = [sys.executable, script, str(ROOT), str(args.wheels), str(args.work), *options]
    return Stage(SET_UP, command, args.limit, needs_gpu=False, needs_build=False)


class Suite:
    """The stages that have run, and their results in OUT_DIR.

    Args:
        out: folder of the results: call-N.txt, call-N-logs.tar.gz, and the wheel that was built.
        call: the number of the call; None: all calls in one.
        environment: of all stages.
        deadline: of everything, by time.monotonic().

    Attributes:
        rows: the outcomes so far.
    """

    def __init__(
        self, out: Path, call: int | None, environment: Mapping[str, str], deadline: float
    ) -> None:
        self._name = "all-calls" if call is None else f"call-{call}"
        self._out, self._environment, self._deadline = out, environment, deadline
        self._logs = Path(environment["TMPDIR"]) / "logs"
        self._logs.mkdir()
        self.rows: list[Row] = []
        self._gap = ""
        self._is_dry = False
        self._n_gpus = 1

    def look_for_gpu(self, *, is_dry: bool = False) -> None:
        """Find out why no GPU can be used, if so."""
        self._is_dry = is_dry
        found = "a dry run" if is_dry else missing_gpu()
        self._n_gpus, self._gap = (0, found) if isinstance(found, str) else (found, "")

    def run(self, waves: Plan, build: Stage | None) -> None:
        """Run lists of stages; the build, if any, beside those that do not need it."""
        with ThreadPoolExecutor(1) as pool:
            building = pool.submit(self._run, build) if build is not None else None
            for wave in waves:
                if building is not None and any(stage.needs_build for stage in wave):
                    self._note(building.result())
                    building = None
                rows = self._run_wave(wave)
                for row in rows:
                    self._note(row)
                if any(row.verdict in ("FAIL", "cut") for row in rows) and not self._gap:
                    self.look_for_gpu()
            if building is not None:
                self._note(building.result())

    def _run_wave(self, wave: Sequence[Stage]) -> list[Row]:
        with ThreadPoolExecutor(len(wave)) as pool:
            return list(pool.map(self._run, wave))

    def _run(self, stage: Stage) -> Row:
        built = {row.name: row.verdict for row in self.rows}.get(SET_UP, "ok")
        if self._gap and stage.needs_gpu:
            return Row(stage.name, "skip", 0.0, "")  # the table says why below its rows
        if built != "ok" and stage.needs_build:
            return Row(stage.name, "skip", 0.0, f"the {SET_UP} failed")
        if stage.needs_gpu and stage.n_gpus > self._n_gpus:
            found = f"this machine has {self._n_gpus}"
            return Row(stage.name, "not shown", 0.0, f"needs {stage.n_gpus} GPUs, {found}")
        return run_stage(stage, self._log_of(stage.name), self._environment, self._deadline)

    def _note(self, row: Row) -> None:
        """Print a row and write all results anew, so that they are there if this is the last."""
        self.rows.append(row)
        print(row, flush=True)
        self._print_tail(row)
        (self._out / f"{self._name}.txt").write_text(table(self.rows, self._gap))
        with tarfile.open(self._out / f"{self._name}-logs.tar.gz", "w:gz") as bundle:
            bundle.add(self._logs, "logs")
        for wheel in (self._logs.parent / "wheel").glob("*.whl"):  # for wheels/ of later calls
            shutil.copy(wheel, self._out)

    def _log_of(self, name: str) -> Path:
        return self._logs / f"{re.sub('[^A-Za-z0-9]+', '-', name.replace('=', ''))}.log"

    def _print_tail(self, row: Row) -> None:
        """Print the end of the output of a stage that failed."""
        log = self._log_of(row.name)
        if row.verdict in ("ok", "skip", "not shown") or not log.exists():
            return
        for line in log.read_text(errors="replace").splitlines()[-TAIL:]:
            print(f"    {line}", flush=True)

    def end(self, *, is_dry: bool) -> int:
        """Print the table; return 0 if stages ran, and all that ran are good."""
        self._note(Row(ONE_MACHINE, "not shown", 0.0, "this is one machine"))
        print(f"\n{table(self.rows, self._gap)}\n{summary(self.rows)}", flush=True)
        ran = [row for row in self.rows if row.verdict not in ("skip", "not shown")]
        tested = [row for row in ran if row.name not in (SET_UP, "facts")]
        return 0 if all(row.verdict == "ok" for row in ran) and (tested or is_dry) else 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu_suite.sh")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--work", type=Path, required=True, help="folder that is removed later")
    parser.add_argument("--wheels", type=Path, required=True, help="folder of packages")
    parser.add_argument("--limit", type=int, default=LIMIT_S, help="seconds of everything")
    parser.add_argument("--call", type=int)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--installed", action="store_true")
    parser.add_argument("--only", type=names_of, default=("",))
    return parser.parse_args()


def names_of(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.split(",") if name)


def missing_gpu() -> str | int:
    """Return the number of GPUs, or why none can be used; a child looks, as CUDA stays loaded."""
    command = [sys.executable, "-P", "-c", PROBE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except subprocess.TimeoutExpired:
        return "no GPU: no answer in 60 s to the question for one"
    if done.returncode == 0:
        return int(done.stdout)
    last = (done.stderr.strip().splitlines() or ["no answer"])[-1]
    return f"no GPU: {last}"


def environment_of(work: Path) -> dict[str, str]:
    """Return the environment of all stages, which keeps temporary files in `work`."""
    foreign = ("RINGCOMM_", "OMPI_", "PMIX_", "PRTE_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    own = {
        "PATH": f"{work / 'venv' / 'bin'}:{Path(sys.executable).parent}:{kept.get('PATH', '')}",
        "TMPDIR": str(work),
        "CUPY_CACHE_DIR": str(work / "cupy"),
        "XDG_CACHE_HOME": str(work / "cache"),
        "OMP_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
        "NCCL_DEBUG": os.environ.get("NCCL_DEBUG", "WARN"),
    }
    return kept | own | one_nccl(kept)


def one_nccl(environment: Mapping[str, str]) -> dict[str, str]:
    """Let cupy load the NCCL that torch loads, the one beside it, before one of the system.

    The environment of the stages hides from cupy what is installed beside torch.
    """
    beside = "nvidia/nccl/lib"
    folders = [Path(path, beside) for path in sys.path if Path(path, beside).is_dir()]
    searched = [*map(str, folders), environment.get("LD_LIBRARY_PATH", "")]
    return {"LD_LIBRARY_PATH": ":".join(filter(None, searched))} if folders else {}


def table(rows: Sequence[Row], gap: str = "") -> str:
    """Return the rows, then why stages were skipped, then the details of the rows."""
    parts = ["\n".join(map(str, rows))]
    parts += [f"skip: {gap}"] if gap else []
    parts += [f"{row.name}\n" + "\n".join(row.details) for row in rows if row.details]
    return "\n\n".join(parts) + "\n"


def summary(rows: Sequence[Row]) -> str:
    count = Counter(row.verdict for row in rows if row.name != SET_UP)
    return "gpu_suite: " + ", ".join(f"{n} {verdict}" for verdict, n in sorted(count.items()))


if __name__ == "__main__":
    sys.exit(main())
