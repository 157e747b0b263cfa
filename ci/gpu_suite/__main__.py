"""Runs the stages of ci/gpu_suite.sh in their order, and prints a table of the results."""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gpu_suite.stage_runner import Row, Stage, run_stage

ROOT = Path(__file__).resolve().parents[2]
SET_UP = "set-up"
TAIL = 25  # lines of the log of a stage that failed
PROBE = """
from ringcomm.nvidia.judge_software import require
from ringcomm.nvidia.find_software import probe
require(probe())
"""


def python(*arguments: str) -> list[str]:
    return [sys.executable, "-P", *arguments]


def ranks(size: int, *arguments: str) -> list[str]:
    """Return the command of a job, whose ranks may outnumber the cores and use several each."""
    mpirun = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    options = ("--oversubscribe", "--bind-to", "none", "-np", str(size))
    return [mpirun or "mpirun", *options, *python(*arguments)]


def collectives(transport: str, size: int, limit_s: float = 75, **environment: str) -> Stage:
    command = ranks(size, "-m", "gpu_suite.collectives", transport)
    forced = {"RINGCOMM_GPU_TRANSPORT": transport, "RINGCOMM_TIMEOUT_S": "40", **environment}
    return Stage(f"{transport} N={size}", command, limit_s, forced)


def speed(size: int, limit_s: float) -> Stage:
    environment = {"RINGCOMM_GPU_TRANSPORT": "ipc", "GLOO_SOCKET_IFNAME": "lo", **SHARED_NCCL}
    begin_by_s = limit_s - 25  # a measurement that begins by then ends in time
    command = ranks(size, "-m", "gpu_suite.allreduce_speed", str(begin_by_s))
    return Stage(f"speed N={size}", command, limit_s, environment)


# With these, NCCL 2.30 or newer lets several ranks share a GPU.
SHARED_NCCL = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0"}
KERNELS = (
    *("-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT), "--noconftest"),
    *("-p", "no:cacheprovider", "-p", "gpu_suite.pytest_on_gpu", "-o", "filterwarnings=default"),
    *("-q", "-r", "fE", "-k", "not planted", str(ROOT / "tests" / "gpu" / "test_kernels.py")),
)


def plan() -> list[list[Stage]]:
    """Return lists of stages. The stages of a list run at the same time: they measure no times."""
    return [
        [Stage("hardware", python("-m", "gpu_suite.hardware"), 60)],
        [
            Stage("kernels", python("-m", "pytest", *KERNELS), 100),
            collectives("ipc", 2),
            collectives("ipc", 3),
            collectives("staged", 2),
        ],
        [
            collectives("ipc", 4),
            collectives("staged", 4),
            collectives("nccl", 1),
            Stage("streams N=2", ranks(2, "-m", "gpu_suite.streams"), 60),
        ],
        [speed(2, 60)],
        [speed(8, 90)],
        [speed(4, 70)],
        [Stage("faults N=4", python("-m", "gpu_suite.faults"), 75)],
        [
            collectives("ipc", 8, 90),
            Stage("training N=4", ranks(4, "-m", "gpu_suite.training"), 75),
            Stage("example N=2", ranks(2, str(ROOT / "examples" / "gpu_train.py")), 60),
        ],
        [Stage("pack", python("-m", "gpu_suite.pack_speed"), 40)],
        [
            collectives("nccl", 2, 40, **SHARED_NCCL),
            collectives("nccl", 4, 40, **SHARED_NCCL),
        ],
    ]


def main() -> int:
    args = arguments()
    deadline = time.monotonic() + args.limit - args.spent
    gap = "a dry run" if args.dry_run else missing_gpu()
    environment = environment_of(args.work)
    rows = [Row(SET_UP, "ok", args.spent, "")] if args.spent else []
    waves = plan()
    for stage in itertools.chain(*waves):
        log_of(stage.name, args.out).unlink(missing_ok=True)
    for wave in waves:
        chosen = [stage for stage in wave if stage.name.startswith(args.only)]
        for row in run_wave(chosen, args.out, environment, deadline, gap):
            rows.append(row)
            print(row, flush=True)
            print_tail(row, args.out)
            (args.out / "table.txt").write_text(table(rows, gap))
    print(f"\n{table(rows, gap)}\n{summary(rows)}", flush=True)
    ran = [row for row in rows if row.verdict != "skip" and row.name != SET_UP]
    is_good = all(row.verdict == "ok" for row in ran) and (ran or args.dry_run)
    return 0 if is_good else 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu_suite.sh")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--work", type=Path, required=True, help="folder that is removed later")
    parser.add_argument("--spent", type=int, default=0, help="seconds of the set-up")
    parser.add_argument("--limit", type=int, default=525, help="seconds of everything")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--only", type=names_of, default=("",))
    return parser.parse_args()


def names_of(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.split(",") if name)


def missing_gpu() -> str:
    """Return why no GPU can be used, "" if one can; a child looks, because CUDA stays loaded."""
    command = python("-c", PROBE)
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except subprocess.TimeoutExpired:
        return "no GPU: no answer in 60 s to the question for one"
    if done.returncode == 0:
        return ""
    last = (done.stderr.strip().splitlines() or ["no answer"])[-1]
    return f"no GPU: {last.removeprefix('ringcomm.errors.ConfigError: ')}"


def environment_of(work: Path) -> dict[str, str]:
    """Return the environment of all stages, which keeps temporary files in `work`."""
    foreign = ("RINGCOMM_", "OMPI_", "PMIX_", "PRTE_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    own = {
        "PATH": f"{Path(sys.executable).parent}:{kept.get('PATH', '')}",
        "TMPDIR": str(work),
        "CUPY_CACHE_DIR": str(work / "cupy"),
        "XDG_CACHE_HOME": str(work / "cache"),
        "OMP_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    return kept | own


def run_wave(
    stages: Sequence[Stage], out: Path, environment: Mapping[str, str], deadline: float, gap: str
) -> list[Row]:
    """Run stages at the same time; return their rows in order."""

    def run(stage: Stage) -> Row:
        if gap and stage.needs_gpu:
            return Row(stage.name, "skip", 0.0, "")  # the table says why below its rows
        return run_stage(stage, log_of(stage.name, out), environment, deadline)

    with ThreadPoolExecutor(max(1, len(stages))) as pool:
        return list(pool.map(run, stages))


def log_of(name: str, out: Path) -> Path:
    return out / "logs" / f"{name.replace(' ', '-').replace('=', '')}.log"


def print_tail(row: Row, out: Path) -> None:
    """Print the end of the output of a stage that failed."""
    log = log_of(row.name, out)
    if row.verdict in ("ok", "skip") or not log.exists():
        return
    for line in log.read_text(errors="replace").splitlines()[-TAIL:]:
        print(f"    {line}", flush=True)


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
