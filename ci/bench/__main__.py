"""Measure ringcomm beside others: mpirun -np 2 python ci/bench WHAT ...; docs/benchmarks.md."""

import importlib
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # not this folder: its modules are bench's
WHAT = {
    "calls": "every call in every way: named, grouped, hvd, dist, mpi4py, gloo",
    "calls_table": "jobs of that with each MPI, on one host and two, as a table; without mpirun",
    "step": "a step of training, beside DDP over gloo",
    "halo": "a step of the heat equation on a grid of ranks, beside mpi4py",
    "gpu_call_overhead": "processor time of an allreduce on simulated GPUs; without mpirun",
    "cost_per_rank_of_large_jobs": "one rank of a job of thousands, simulated; without mpirun",
    "ps": "pushes and pulls of the parameter server, beside torch.distributed.rpc",
    "pull_many": "rows of many hash tables: one pull after the other, and ps.pull_many()",
}


def main(argv):
    if not argv or argv[0] not in WHAT:
        rows = [f"  {name:<20} {text}" for name, text in WHAT.items()]
        print("usage: mpirun -np N python ci/bench WHAT [--help] ...", *rows, sep="\n")
        return 0 if argv[:1] == ["--help"] else 2
    from ringcomm.errors import ConfigError

    try:
        return importlib.import_module(f"bench.{argv[0]}").main(argv[1:])
    except (ConfigError, ModuleNotFoundError) as error:
        print(f"ci/bench {argv[0]}: {error}", file=sys.stderr, flush=True)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
