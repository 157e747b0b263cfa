"""Pushes and pulls of N - 1 workers, each with one request outstanding, to a server, the last rank.

By the clock, and in CPU time. All values are checked; the exit code is 1 if any was wrong.
"""

import argparse
import contextlib
import json
import math
import os
from dataclasses import asdict, dataclass, field, replace

import numpy as np
from bench.figure_and_goal import Figure, verdict
from bench.option_types import above_zero, names_of
from bench.ps_workload import CASES, OPS, PULL, PUSH, Work, cpu_s_of
from bench.start_and_stop_ps_peers import PEERS, Peer

import ringcomm as rc
from ringcomm import ps
from ringcomm.errors import ConfigError
from ringcomm.launch.bench import quiet
from ringcomm.launch.option_types import new_file

# CPU time of client and server, us per call, of one worker on a quiet machine: (push, pull).
CPU_US = {"1K": (30, 31), "64K": (40, 42), "4M": (763, 554), "sparse": (1000, 900)}
IN_PLACE = "in place"  # ringcomm with rows in memory that the server reads and writes
CPU_OF_PEER = {"1K": 0.1, "64K": 0.1, "4M": 0.5}
TIMES_FASTER = {"1K": 5, "64K": 5}
OF_MEMCPY = 1.5
WITH_MEMCPY = "4M"
TURN_S = 0.02  # at least, so that the CPUs' clocks can judge it
FEWEST_CALLS, MOST_CALLS, PILOT_CALLS = 5, 500, 3


# --- who is measured ------------------------------------------------------------------------------
class Tables:
    """Tables of ringcomm.ps; see Work."""

    def bind(self, case, x, keys):
        name, updater = f"bench {case.name}", ps.optim.Add()
        if case.is_sparse:
            rows = ps.hashtable(name, case.shape[1], updater=updater)
            return (
                lambda number: rows.push(keys[number], x).wait(),
                lambda number: rows.pull(keys[number]).wait(),
            )
        table, out = ps.table(name, case.shape, updater=updater), np.zeros_like(x)
        return lambda _: table.push(x).wait(), lambda _: table.pull(out=out).wait()


class InPlace(Tables):
    """Hash tables of ringcomm.ps with rows in memory that the server reads and writes."""

    def bind(self, case, x, keys):
        rows = ps.hashtable(f"bench {case.name} {IN_PLACE}", case.shape[1], updater=ps.optim.Add())
        mine, out = rows.rows(len(x)), rows.rows(len(x))
        mine[:] = x
        return (
            lambda number: rows.push(keys[number], mine, copy=False).wait(),
            lambda number: rows.pull(keys[number], out=out).wait(),
        )


class Copies:
    """The yardstick: every worker copies as many bytes, in memory of its own."""

    def bind(self, case, x, keys):
        out = np.zeros_like(x)
        return (lambda _: np.copyto(out, x),) * 2


class Here:
    """A client in this process; Peer is one in another."""

    def __init__(self, name, store, server_pid=None):
        self.name, self.store, self.server_pid = name, store, server_pid
        self.awake = contextlib.nullcontext

    def prepare(self, case):
        self.work = Work(self.store, case)
        self.run, self.count_wrong = self.work.run, self.work.count_wrong

    @property
    def n_pushes(self):
        return self.work.n_pushes

    def server_cpu_s(self):
        return cpu_s_of(self.server_pid) if self.server_pid else 0.0

    def close(self):
        pass


# --- the measurement ------------------------------------------------------------------------------
@dataclass
class Lane:
    """A client's pushes, or its pulls."""

    who: object
    op: str
    calls: int = PILOT_CALLS
    times_s: list = field(default_factory=list)  # by turn
    cpu_s: list = field(default_factory=list)
    server_s: list = field(default_factory=list)

    def take_turn(self):
        """Make one call that is not recorded, meet, and then calls back to back."""
        with awake(self.who):
            self.who.run(self.op, 1)
            before = self.server_s_now()
            times_s, cpu_s = self.who.run(self.op, self.calls)
            self.server_s.append(self.server_s_now() - before)
        self.times_s.append(times_s)
        self.cpu_s.append(cpu_s)

    def server_s_now(self):
        rc.barrier()
        found = self.who.server_cpu_s() if ps.is_chief() else 0.0
        rc.barrier()
        return found


@contextlib.contextmanager
def awake(who):
    """Wake a client and its server until all workers are done with them."""
    with who.awake():
        rc.barrier()  # the server is the chief's
        yield
        rc.barrier()


def measure(case, clients, rounds):
    """Return the rows of one case, the same on every worker. Collective over the workers."""
    for who in clients:
        with awake(who):
            who.prepare(case)
            who.run(PUSH, case.n_sets)  # makes the rows
            who.run(PULL, case.n_sets)
    wrong = {who.name: count_wrong(who) for who in clients}
    lanes = [Lane(who, op) for op in OPS for who in clients]
    if case.name == WITH_MEMCPY:
        memcpy = Here("memcpy", Copies())
        memcpy.prepare(case)
        lanes.append(Lane(memcpy, PULL))
        wrong["memcpy"] = 0
    with quiet():
        for lane in lanes:
            lane.take_turn()
            lane.take_turn()
            call_s = max(rc.allgather_object(np.mean(lane.times_s[-1])))
            lane.calls = min(max(math.ceil(TURN_S / call_s), FEWEST_CALLS), MOST_CALLS)
            lane.times_s, lane.cpu_s, lane.server_s = [], [], []
        for number in range(rounds):
            # Back and forth: else one would always follow the same other one.
            for lane in lanes if number % 2 == 0 else reversed(lanes):
                lane.take_turn()
    for who in clients:
        wrong[who.name] += count_wrong(who)
    return [row(case, lane, wrong[lane.who.name]) for lane in lanes]


def count_wrong(who):
    """Return the wrong elements that all workers see, the same number on each of them."""
    with awake(who):
        of_all = rc.allgather_object(who.n_pushes)  # all are in the table by now
        mine = who.count_wrong([sum(each) for each in zip(*of_all, strict=True)])
        return sum(rc.allgather_object(mine))  # nobody pushes before all have looked


def row(case, lane, wrong):
    """Return the row of a lane: calls of all workers; CPU time by call, medians over rounds."""
    everyone = rc.allgather_object((lane.times_s, lane.cpu_s, lane.server_s))
    times_s, clients_s, server_s = (np.array(each) for each in zip(*everyone, strict=True))
    per_call = 1e6 / (times_s.shape[0] * times_s.shape[2])
    found = {
        "op": lane.op,
        "case": case.name,
        "engine": lane.who.name,
        "wrong": wrong,
        "p50_us": float(np.median(times_s)) * 1e6,
        "p95_us": float(np.percentile(times_s, 95)) * 1e6,
        "clients_us": float(np.median(clients_s.sum(axis=0))) * per_call,
        "server_us": float(np.median(server_s[0])) * per_call,
        "calls": times_s.size,
    }
    return found | {"sum_us": found["clients_us"] + found["server_us"]}


# --- goals ----------------------------------------------------------------------------------------
def figures(rows, workers):
    """Return the rows beside their goals; those for CPU time and memcpy are for one worker."""
    of, found = {(row["op"], row["case"], row["engine"]): row for row in rows}, []
    for case, op in [(case, op) for case in CASES for op in OPS]:
        engine = IN_PLACE if CASES[case].is_sparse else "ringcomm"
        ours, name = of.get((op, case, engine)), f"{op} {CASES[case].title}"
        if ours is None:
            continue
        if workers == 1:
            goal = CPU_US[case][OPS.index(op)]
            found.append(Figure(f"{name}: CPU, us", ours["sum_us"], at_most=goal))
        if workers == 1 and (memcpy := of.get((op, case, "memcpy"))):
            ratio = ours["p50_us"] / memcpy["p50_us"]
            found.append(Figure(f"{name}: time / memcpy", ratio, at_most=OF_MEMCPY))
        if peer := of.get((op, case, "torch-rpc")):
            ratio, faster = ours["sum_us"] / peer["sum_us"], peer["p50_us"] / ours["p50_us"]
            cpu, times = CPU_OF_PEER.get(case), TIMES_FASTER.get(case)
            found.append(Figure(f"{name}: CPU / torch-rpc", ratio, at_most=cpu))
            found.append(Figure(f"{name}: times faster", faster, at_least=times))
    return found


# --- the command ----------------------------------------------------------------------------------
def main(argv):
    args = parsed(argv)
    load = os.getloadavg()[0]
    rc.init()
    if rc.size() < 2 or rc.local_size() < rc.size():
        raise ConfigError(
            f"{rc.size()} ranks, {rc.local_size()} of them on this host: a worker and a server are "
            "needed, all on one host, for the server's CPU clock is read: mpirun -np 2 ..."
        )
    pids = rc.allgather_object(os.getpid())
    ps.init(1)  # the last rank ends here, when the others do
    workers = rc.size()
    say(
        f"# ci/bench ps {rc.__version__}: {workers} worker(s) and a server, load average {load:.1f}"
    )
    say(f"#{'':30} {'by the clock (us)':^19} {'CPU time per call (us)':^29}")
    say("#op    what       engine              p50       p95   clients    server       sum #wrong")
    clients, rows = [Here("ringcomm", Tables(), pids[-1]), *map(Peer, args.against)], []
    for name in args.cases:
        case = CASES[name]
        case = replace(case, n_sets=args.sets) if case.is_sparse else case
        others = [Here(IN_PLACE, InPlace(), pids[-1])] if case.is_sparse else []
        rows += (found := measure(case, clients + others, args.rounds))
        say(*map(line, found))
    for each in clients:
        each.close()
    judged = figures(rows, workers)
    say("#", *map(str, judged), verdict(judged))
    if ps.is_chief() and args.json is not None:
        found = {"version": rc.__version__, "workers": workers, "load": load, "rows": rows}
        found["figures"] = [asdict(each) | {"is_met": each.is_met} for each in judged]
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if any(row["wrong"] for row in rows) else 0


def parsed(argv):
    parser = argparse.ArgumentParser(prog="ci/bench ps", description=__doc__)
    add = parser.add_argument
    add("--cases", type=names_of(tuple(CASES)), default=tuple(CASES), metavar="NAME,...",
        help=f"{', '.join(CASES)}, or all (default)")  # fmt: skip
    add("--against", type=names_of(tuple(PEERS)), default=(), metavar="NAME,...",
        help="torch-rpc: torch.distributed.rpc as it is; torch-rpc-uv: without its shared memory, "
        "which it polls; none by default")  # fmt: skip
    add("--sets", type=above_zero(int), default=CASES["sparse"].n_sets,
        help="of 10,000 keys each, which calls use in turn; default 10")  # fmt: skip
    add("--rounds", type=above_zero(int), default=15, help="default 15")
    add("--json", type=new_file, metavar="FILE", help="write what was found, too")
    return parser.parse_args(argv)


def line(row):
    numbers = (row[name] for name in ("p50_us", "p95_us", "clients_us", "server_us", "sum_us"))
    text = " ".join(f"{x:>9.1f}" for x in numbers)
    title = CASES[row["case"]].title
    return f" {row['op']:<5} {title:<10} {row['engine']:<13} {text} {row['wrong']:>6}"


def say(*text):
    if ps.is_chief():
        print(*text, sep="\n", flush=True)
