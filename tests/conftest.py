"""Nothing that a test starts may outlive it; fixtures, and which cases the gate runs."""

import gc
import itertools
import random
import signal
import time
from collections import defaultdict
from functools import partial

import cost_plugin
import harness
import leftovers_plugin
import numpy as np
import pytest
import show_failures_plugin
from guarded_ranks import Rank
from shm_leftovers import names, pids, read

from ringcomm.engine.progress import loop
from ringcomm.status import guardian

GUARDIAN = str(guardian._PROGRAM)
# Ranks that are threads share the lock of Python: polls of one that waits keep others from working.
SPINS_OF_THREADS = 2
# All news of a rank that is a thread rings: looks between two rings find nothing.
NAPS_OF_THREADS = {"_NAP_S": 5e-3, "_LONG_NAP_S": 5e-3, "_LONGEST_NAP_S": 20e-3}
# To open, move or save a hash table takes Python a while per partition. In jobs it has all 1,024.
PARTITIONS_OF_THREADS = 64
# With Python's 700, tests spend a tenth of their time in collections, which find nothing.
OBJECTS_BETWEEN_COLLECTIONS = 50_000
# A shell has what it starts behind `&` ignore Ctrl-C, which some tests send themselves.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
THERE = pytest.StashKey()  # after the last test: its path, the files in /dev/shm and all processes


@pytest.fixture(params=["messages", "node"])
def wire(request, monkeypatch):
    """Run a test with ranks on nodes of their own, and again with all on one node."""
    monkeypatch.setattr(harness, "wire", request.param)
    return request.param


@pytest.fixture
def own_folder(tmp_path, monkeypatch):
    """Run a test in an empty folder of its own, and return that."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def surroundings_of_jobs(monkeypatch):
    """Let jobs that a test starts in another way than by harness.py have the path of its jobs."""
    path = harness.job_environment().get("PYTHONPATH")
    if path is not None:
        monkeypatch.setenv("PYTHONPATH", path)


@pytest.fixture
def clock(monkeypatch):
    """Let rows age as a test says, and none be evicted that it has not asked for."""
    times = itertools.count(1)
    state = {"now": 0.0}
    state["tick"] = lambda: state.update(now=float(next(times)))
    from ringcomm.ps.server.clock import OwnClock
    from ringcomm.ps.server.rows import hash_shard as hashed

    monkeypatch.setattr(OwnClock, "time", lambda _: state["now"])
    monkeypatch.setattr(hashed, "work_after_push", lambda _: 0)
    return state


@pytest.fixture
def model_time(monkeypatch):
    """Let time pass in homes of servers by how often they look at it."""
    from ps_simulation_with_copies import ModelTime

    from ringcomm.ps.server import clock, display
    from ringcomm.ps.server.homes import local_homes

    for module in (clock, display, local_homes):
        monkeypatch.setattr(module, "time", ModelTime())


@pytest.fixture
def start_rank():
    """Start ranks as real processes, without MPI, and end them."""
    started = []

    def start(rank, body, **options):
        started.append(Rank(rank, body, **options))
        return started[-1]

    yield start
    for rank in started:
        rank.process.kill()
        rank.process.communicate()


@pytest.fixture
def watch(pytestconfig):
    """Return what knows the files in /dev/shm of this run; None in a job of test_spmd_suite.py."""
    return watch_of(pytestconfig)


def watch_of(config):
    plugin = config.pluginmanager.get_plugin(leftovers_plugin.NAME)
    return plugin and plugin.watch


@pytest.fixture(autouse=True)
def nothing_is_left(request):
    """Fail the test that leaves a file in /dev/shm or a guardian behind."""
    watch = watch_of(request.config)
    if watch is None:
        yield
        return
    # To list all processes takes longer than many a test: what one leaves is what the next one
    # finds, but in another file, which may have fixtures of its own.
    path, before, others = request.session.stash.get(THERE, (None, None, None))
    if path != request.path:
        set_aside_what_lives()
        before, others = set(names()), set(pids())
    failed = request.session.testsfailed
    yield
    if request.session.testsfailed > failed:
        leftovers_plugin.end_what_runs(others)
    deadline = time.monotonic() + 60
    while True:
        files, processes = set(names()), set(pids())
        request.session.stash[THERE] = request.path, files, processes
        left = orphans(watch, files - before) | orphaned_guardians(processes - others)
        if not left:
            break
        assert time.monotonic() < deadline, left
        time.sleep(0.02)  # nobody tells of the end of another process


def orphans(watch, new):
    return new and new & watch.orphans()  # which costs more than most tests


def orphaned_guardians(new):
    """Return those of new processes that are guardians of this environment whose ranks are gone."""
    found = set()
    for pid in new:
        program, *arguments = read(pid, "cmdline").split("\0")
        wards = [a.split(":")[0] for a in arguments if a.count(":") in (2, 4)]
        if program == GUARDIAN and not any(map(is_alive, wards)):
            found.add(f"guardian {pid}")
    return found


def is_alive(pid):
    return read(pid, "stat").rpartition(")")[2].split()[:1] not in ([], ["Z"])


def pytest_configure(config):
    for plugin in (cost_plugin, show_failures_plugin, leftovers_plugin):
        config.pluginmanager.register(plugin, plugin.__name__)
    if not leftovers_plugin.is_in_a_job() and not harness.is_at_length():
        # Not in the ranks of jobs: it takes 0.1 s.
        from ringcomm.ps.placement import partitions

        loop._SPINS = SPINS_OF_THREADS
        vars(loop).update(NAPS_OF_THREADS)
        np.testing.assert_array_equal = partial(equal_or, np.testing.assert_array_equal)
        partitions.HASH_PARTITIONS = PARTITIONS_OF_THREADS
        gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS, 20)


def equal_or(compare, found, wanted, *arguments, **options):
    """Compare only what differs, or has NaN: to compare takes 10 times as long as this look."""
    __tracebackhide__ = True
    if options.get("strict") or not np.array_equal(found, wanted):
        compare(found, wanted, *arguments, **options)


def pytest_addoption(parser):
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run in the order of this seed")


def pytest_collection_modifyitems(config, items):
    choose_cases(items)
    seed = config.getoption("shuffle", default=None)
    if seed is not None:
        shuffle(items, random.Random(seed))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish():
    set_aside_what_lives()


def set_aside_what_lives():
    """Let no later gc.collect() go through what is there now, which takes 0.1 s of a core.

    Groups and optimizers of the library ask for one again and again. And what is garbage ends now:
    engines of other files have threads, files and memory.
    """
    gc.collect()
    gc.freeze()


def shuffle(items, order):
    """Shuffle the files, and the tests in each."""
    of_file = defaultdict(list)
    for item in items:
        of_file[item.path].append(item)
    files = list(of_file.values())
    order.shuffle(files)
    for tests in files:
        order.shuffle(tests)
    items[:] = itertools.chain.from_iterable(files)


def choose_cases(items):
    """Leave some cases of a test that has many, and skip what takes long; ci/all_cases runs all."""
    if harness.is_at_length():
        return
    of_one_test = defaultdict(list)
    for item in items:
        of_one_test[item.nodeid.partition("[")[0]].append(item)
    kept = set()
    for cases in of_one_test.values():
        kept.update(map(id, harness.few_of(cases)))
    items[:] = [item for item in items if id(item) in kept]
    skipped = pytest.mark.skip(reason="the gate has no time for it; ci/all_cases runs it")
    for item in items:
        if item.get_closest_marker("at_length"):
            item.add_marker(skipped)
        elif harness.is_fast() and item.get_closest_marker("long"):
            item.add_marker(pytest.mark.skip(reason="./ci/test --fast has no time for it"))
