"""The table of routes: each is taken when it says so, and it lists all of them."""

import ast
import importlib
import re
import threading
from pathlib import Path

import numpy as np
import pytest
from faulty_transport import Faults
from harness import run_ranks

import ringcomm as rc
from ringcomm.config import GPU_TRANSPORTS
from ringcomm.engine.core.current_engine import engine
from ringcomm.engine.executors import routes

ROUTES = dict(re.findall(r"^    (\S+(?: \S+)*)  .*\n +(\S+::\S+)$", routes.__doc__, re.MULTILINE))
ENGINE = Path(routes.__file__).parent.parent
TESTS = Path(__file__).parent.parent
X = np.arange(5000.0)
LONG = np.arange(50_000.0)
CASES = {
    "short call": ("node, messages", lambda _: rc.allreduce_(LONG.copy()), set()),
    "short call by name": ("node, messages", lambda _: rc.broadcast_(X.copy(), name="n"), set()),
    "one step": ("node, messages", lambda _: rc.allreduce_(X.copy(), deterministic=True), set()),
    "met and run": ("node", lambda _: rc.grouped_allreduce([X, X]), set()),
    "met by messages": ("messages", lambda _: rc.grouped_allreduce([LONG]), {"recorded schedule"}),
    "agreed and run": (
        "messages",
        lambda _: rc.allreduce_(X.copy(), name=f"{engine().groups.default.ledger.tally.n_entered}"),
        {"recorded schedule"},
    ),
    "cached and run beside": (
        "messages",
        lambda _: rc.allreduce(LONG, name="known", deterministic=True),
        {"recorded schedule"},
    ),
    "recorded schedule": ("messages", lambda _: rc.grouped_allreduce([X]), {"met by messages"}),
    "Python coroutine": ("faulty", lambda _: rc.allreduce(X), {"agreed and run"}),
    "conversation": (
        "messages",
        lambda r: [h.wait() for h in (rc.isend(LONG, 1 - r), rc.irecv(LONG.copy(), 1 - r))],
        set(),
    ),
    "stand-in": (
        "messages",
        lambda r: rc.join() if r else (rc.allreduce(X), rc.join()),
        {"conversation"},
    ),
}


def found(by):
    """Return the owner of a function that the table names, and the function's name."""
    module, _, path = by.partition("::")
    *owners, name = path.split(".")
    owner = importlib.import_module(f"ringcomm.{module}")
    for each in owners:
        owner = getattr(owner, each)
    return owner, name


@pytest.fixture
def taken(monkeypatch):
    """Return the set of the routes that are taken from now on."""
    noted = set()

    def noting(route, function):
        def call(*args, **kwargs):
            result = function(*args, **kwargs)
            if result is not None or "short call" not in route:  # that is not open
                noted.add(route)
            return result

        return call

    for route, by in ROUTES.items():
        owner, name = found(by)
        monkeypatch.setattr(owner, name, noting(route, getattr(owner, name)))
    stand_in = importlib.import_module("ringcomm.engine.executors.joined_rank").plan_stand_in
    monkeypatch.setattr(f"{rc.join.__module__}.plan_stand_in", stand_in)
    return noted


@pytest.mark.parametrize(
    ("route", "where"), [(route, where) for route in CASES for where in CASES[route][0].split(", ")]
)
def test_each_route_is_taken_when_the_table_says_so(route, where, taken, monkeypatch):
    _, operation, others = CASES[route]
    monkeypatch.setattr("harness.wire", "node" if where == "node" else "messages")
    begun = threading.Barrier(2)

    def body(rank):
        for _ in range(1 if route == "stand-in" else 3):
            operation(rank)  # what is known, or agreed on, it is from the fourth time on
        begun.wait(60)
        taken.clear()
        begun.wait(60)
        operation(rank)

    run_ranks(2, body, faults={r: Faults() for r in range(2)} if where == "faulty" else None)
    late = {"met and run" if where == "node" else "met by messages"}
    late |= {"one step"} if route == "stand-in" else set()  # before it hears of the joined rank
    assert {route} | others <= taken <= {route} | others | late


def test_the_table_lists_all_routes():
    assert ROUTES.keys() == CASES.keys() | set(GPU_TRANSPORTS)
    for path, name in re.findall(r"(\w+/test_\w+\.py)::(\w+)", routes.__doc__):
        assert f"def {name}(" in (TESTS / path).read_text()
    (choice,) = [
        node
        for node in ast.walk(ast.parse(Path(routes.__file__).read_text()))
        if isinstance(node, ast.FunctionDef) and node.name == "coroutines"
    ]
    ways = set(re.findall(r"self\.(_\w+)\(", ast.unparse(choice))) - {"_channel", "_agree_beside"}
    assert {f"engine.executors.routes::Routes.{way}" for way in ways} <= set(ROUTES.values())
    makers = {
        path.stem
        for path in ENGINE.rglob("*.py")
        if re.search(r"(?<!class )\b(Completed)?Task\(", path.read_text())
    }
    # layer_hooks.py watches over what the launch of a GPU has left on its stream. The last two end
    # messages of shared memory without a task, and posted_messages.py those that cannot get one.
    others = {"tasks_outside_collectives", "layer_hooks", "point_to_point", "posted_messages"}
    assert makers == {"engine"} | others
