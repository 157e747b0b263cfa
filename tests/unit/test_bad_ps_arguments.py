"""Whatever is passed to the parameter server: a clear error or a result, and its tables go on."""

import inspect
import itertools

import numpy as np
import pytest
from bad_values import VALUES, cases_of, come_to, parameters_of, public
from harness import at_length
from ps_ranks_as_threads import run_workers

from ringcomm import ps
from ringcomm.errors import ConfigError
from ringcomm.ps import initializers, optim

N_WORKERS, N_SERVERS = 2, 2
pytestmark = pytest.mark.usefixtures("own_folder")  # for checkpoints
SHAPE = (2, 3)
KEYS = np.arange(6)
DEADLINE_S = 60.0  # of a wait; only a hang reaches it
BROKE = {"10**400", "1j", "-1", "endless"}


def gradient():
    return {"x": np.ones(SHAPE, np.float32)}


def rows():
    return {"keys": KEYS, "rows": np.ones((6, 3), np.float32)}


class Ahead:
    """What has prefetch()."""

    def prefetch(self, inputs):
        """Begin to fetch nothing."""


# What each function is called with where it is called as it should be.
JOB = {
    "add_servers": dict,
    "complete_step": dict,
    "export_safetensors": lambda: {"path": "saved", "file": "saved.safetensors"},
    "hashtable": lambda: {"dim": 3},
    "load": lambda: {"path": "saved"},
    "load_state_dict": lambda: {"path": "saved"},
    "prefetching": lambda: {"loader": [], "collection": Ahead(), "ids": len},
    "pull_many": lambda: {"pulls": []},
    "rebalance": dict,
    "remove_server": lambda: {"number": 1},
    "report": lambda: {"step": 1, "metrics": {}},
    "reports": dict,
    "restore": lambda: {"path": "saved"},
    "save": lambda: {"path": "saved"},
    "table": lambda: {"shape": SHAPE},
}
APART = {
    "init", "stop", "should_stop", "workers", "rank", "size", "is_chief", "stats", "snapshot",
    "evaluator", "function", "recover",  # begin or end something, or have no such arguments
    "live_workers",
    "step_number",
    "Future", "HashTable", "Metadata", "Pushed", "Rebalanced", "Recovered", "Report",
    "Table",  # nobody makes one
}  # fmt: skip
TABLE = {"bounds_of": lambda: {"part": 0}, "pull": dict, "push": gradient, "push_pull": gradient}
ROWS = {
    "erase": lambda: {"keys": KEYS},
    "metadata": lambda: {"keys": KEYS},
    "pull": lambda: {"keys": KEYS},
    "push": rows,
    "push_pull": rows,
}
OPTIONS = {
    "updater": [kind for kind in optim._ALL.values() if parameters_of(kind)],
    "init": [
        each
        for name, each in inspect.getmembers(initializers, inspect.isfunction)
        if each.__annotations__.get("return") == "Initializer" and name != "from_json"
    ],
    "admit": [ps.Admit],
    "evict": [ps.Evict],
    "mode": [ps.SSP, ps.FirstOf],
}
SOUND = {"Evict": {"max_rows": 5}, "SSP": {"staleness": 1}, "FirstOf": {"k": 1}}


def attempt(function, options):
    """Call a function, wait for its future; return its error, or None."""

    def call(**options):
        result = function(**options)
        return result.wait() if isinstance(result, ps.Future) else result

    try:
        return come_to(call, options)
    except LookupError as error:
        return error


def require_tables(label, *tables):
    """Fail unless this worker can still push and pull."""
    for table in tables:
        options = rows() if isinstance(table, ps.HashTable) else gradient()
        try:
            table.push_pull(**options).wait()
        except Exception as error:
            raise AssertionError(f"{label}: {table}: {error!r}") from error


def test_no_function_is_forgotten():
    options = {each.__name__ for kind in ("admit", "evict", "mode") for each in OPTIONS[kind]}
    assert public(ps) == JOB.keys() | APART | options


@pytest.mark.parametrize("mode", at_length(["async", "sync"], ["sync"]))
def test_a_table_refuses_a_bad_argument_and_goes_on(mode):
    def body(rank):
        dense = ps.table("dense", SHAPE, mode=mode, segments=(0, 3), block_nbytes=12)
        hashed = ps.hashtable("hashed", 3, mode=mode)
        for table, calls, fit in ((dense, TABLE, gradient), (hashed, ROWS, rows)):
            for name, good in calls.items():
                function = getattr(table, name)
                for parameter, value in cases_of(function, BROKE):
                    if mode == "sync" and parameter == "hold":
                        continue  # another call, which release() ends
                    error = attempt(function, good() | {parameter: VALUES[value]()})
                    require_tables(f"{name}({parameter}={value}): {error!r}", table)
            for _, value in cases_of(table.release, BROKE) if mode == "sync" else ():
                future = table.push(**fit(), hold=True)
                if attempt(table.release, {"factor": VALUES[value]()}) is not None:
                    table.release(None).wait()
                attempt(future.wait, {})
                require_tables(f"release({value})", table)

    run_workers(N_WORKERS, body, N_SERVERS, deadline_s=DEADLINE_S)


@pytest.mark.long
def test_a_function_of_the_job_refuses_a_bad_argument_and_all_tables_go_on():
    numbers = [itertools.count() for _ in range(N_WORKERS)]

    def body(rank):
        tables = ps.table("dense", SHAPE), ps.hashtable("hashed", 3)
        if rank == 0:
            ps.save("saved").wait()
        for name, good in JOB.items():
            for parameter, value in cases_of(getattr(ps, name), BROKE):
                own = {"name": f"{name}{next(numbers[rank])}"} if "table" in name else {}
                options = good() | own | {parameter: VALUES[value]()}
                error = attempt(getattr(ps, name), options)
                require_tables(f"{name}({parameter}={value}): {error!r}", *tables)

    run_workers(N_WORKERS, body, N_SERVERS, deadline_s=DEADLINE_S)


@pytest.mark.parametrize("kind", sorted(OPTIONS))
def test_an_option_of_a_table_is_refused_or_works(kind):
    numbers = [itertools.count() for _ in range(N_WORKERS)]

    def body(rank):
        known = ps.table("dense", SHAPE)

        def opened(make, **options):
            option, name = {kind: make(**options)}, f"{kind}{next(numbers[rank])}"
            tables = [ps.hashtable(f"{name} hashed", 3, **option)]
            if kind in ("updater", "mode"):
                tables.append(ps.table(name, SHAPE, **option))
            require_tables(f"{make.__name__}({options})", *tables)

        for make in OPTIONS[kind]:
            for parameter, value in cases_of(make):
                options = SOUND.get(make.__name__, {}) | {parameter: VALUES[value]()}
                attempt(opened, {"make": make, **options})
                require_tables(f"{make.__name__}({parameter}={value})", known)

    run_workers(N_WORKERS, body, N_SERVERS, deadline_s=DEADLINE_S)


@pytest.mark.parametrize("deadline_s", ["1j", "nan", "-1", "text", "None"])
def test_a_wait_is_a_number_of_seconds(deadline_s):
    def body(rank):
        table = ps.table("w", SHAPE)
        for bad in {deadline_s} - {"None"}:
            with pytest.raises(ValueError, match=r"pull\[w\]: timeout_s is .*; it must be"):
                table.pull().wait(VALUES[bad]())
        require_tables(deadline_s, table)

    run_workers(1, body)
    for bad in {deadline_s} - {"None"}:
        with pytest.raises(ConfigError, match=r"deadline_s is .*; it must be more than 0"):
            ps.init(deadline_s=VALUES[bad]())
