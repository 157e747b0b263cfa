"""A spare takes the place of a server that died; servers are added and removed while all go on."""

import threading
import time
from collections import Counter
from functools import partial

import numpy as np
import pytest
from harness import DEADLINE_S, at_length
from ps_ranks_as_threads import ended, kill_server, run_all
from ps_training_of_two_tables import KEYS, N, require_exact, train

import ringcomm as rc
from ringcomm import ps
from ringcomm.config import Settings
from ringcomm.ps.placement.partitions import Move
from ringcomm.ps.placement.places import Places
from ringcomm.ps.placement.rebalance import move_all
from ringcomm.ps.roles import Layout
from ringcomm.ps.server.homes.local_homes import Homes
from ringcomm.ps.session import session

ELASTIC = Settings(timeout_s=DEADLINE_S, elastic=1)
MODES = ["sync", "async", ps.SSP(1), ps.FirstOf(2)]


def run(body, n_servers, n_dead, spares=1, n_workers=2, **options):
    """Return what the workers that live return."""
    results = run_all(n_workers, body, n_servers, settings=ELASTIC, spares=spares, **options)
    return [each for each in ended(results, n_dead) if not isinstance(each, str)]


def tables(mode="async"):
    add = ps.optim.Add()
    table = ps.table("w", N, "float64", updater=add, mode=mode, block_nbytes=400)
    return table, ps.hashtable("emb", 2, updater=add, mode=mode, dtype="float64")


def blocks():
    """Return how many blocks of the dense table each server has, by number."""
    return {each["server"]: len(each["tables"].get("w", ())) for each in ps.stats()}


def wait_until(is_so):
    until = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < until, (blocks(), ps.stats())


# --- without copies -----------------------------------------------------------------------------
def recover_from(victims, mode, path, n_servers, spares):
    def body(rank):
        opened = tables(mode)
        train(*opened, range(5))
        numbers = [each.number for each in opened]
        rc.barrier()
        if rank == 0:
            ps.save(path, background=False)
        rc.barrier()
        for victim in victims:
            rc.barrier()
            if rank == 0:
                kill_server(victim)
            with pytest.raises(rc.ServerLostError):
                train(*opened, range(5, 10_000))
            ps.recover(path)
            assert min(each.number for each in opened) > max(numbers)  # none is used again
            numbers = [each.number for each in opened]
        found = blocks()
        train(*opened, range(5, 12))
        require_exact(*opened, 12, mode)
        return found

    return run(body, n_servers, len(victims), spares)


@pytest.mark.parametrize("mode", at_length(MODES, ["sync", MODES[3]]), ids=str)  # 1 s each
def test_a_spare_takes_the_place_of_a_server_without_copies(mode, tmp_path):
    for found in recover_from([1], mode, tmp_path, 2, 1):
        assert found.keys() == {0, 2}
        assert min(found.values()) == 6  # of 12: an equal share


def test_spares_take_the_places_of_all_servers_and_of_spares(tmp_path):
    """Spare 1 knows no table when it leads; then spare 2 takes its place."""
    for found in recover_from([0, 1], "async", tmp_path, 1, 2):
        assert found == {2: 12}


def test_with_no_spare_left_there_is_a_server_less(tmp_path):
    for found in recover_from([0, 2], "sync", tmp_path, 2, 1):
        assert found == {1: 12}


def test_nothing_fails_when_a_spare_dies_that_has_no_place(tmp_path):
    def body(rank):
        opened = tables("sync")
        if rank == 0:
            kill_server(2)
        while 2 not in session().layout.lost:
            opened[0].pull().wait()
        train(*opened, range(9))
        require_exact(*opened, 9, "sync")
        rc.barrier()
        return blocks()

    for found in run(body, 2, 1):
        assert found == {0: 6, 1: 6}


def test_a_worker_that_rested_or_left_is_gone_for_a_spare_too(tmp_path):
    """Else the spare would wait for it, in a round or at the end."""
    has_rested = threading.Event()

    def body(rank):
        table, _ = tables(ps.FirstOf(1))
        rc.barrier()
        if rank == 0:
            ps.save(tmp_path, background=False)
        rc.barrier()
        if rank == 1:
            return "left"
        if rank == 2:
            session().rest()
            has_rested.set()
        if rank == 0:
            assert has_rested.wait(DEADLINE_S)
            kill_server(0)
        with pytest.raises(rc.ServerLostError):
            wait_until(lambda: table.pull().wait() is None)
        ps.recover(tmp_path)
        if rank == 0:
            assert table.push(np.ones(N)).wait().applied
        return "ended"

    results = run_all(3, body, 1, settings=ELASTIC, spares=1)
    assert ended(results, 1)[:3] == ["ended", "left", "ended"]


# --- with copies --------------------------------------------------------------------------------
@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("mode", at_length(MODES, ["sync", MODES[2]]), ids=str)  # 3 s each
def test_a_spare_takes_the_place_of_a_server_with_copies_while_all_go_on(mode, victim):
    def body(rank):
        opened = tables(mode)
        train(*opened, range(5))
        rc.barrier()
        if rank == 0:
            kill_server(victim)
        train(*opened, range(5, 40))
        layout = session().layout

        def has_place():
            found, ranks = blocks(), {}
            for server, n in found.items():
                ranks[layout.rank_of(server)] = ranks.get(layout.rank_of(server), 0) + n
            return sorted(ranks.values()) == [6, 6]

        if rank == 0:
            wait_until(has_place)
            wait_until(lambda: all(each["copies"] == 2 for each in ps.stats()))
        rc.barrier()
        train(*opened, range(40, 44))
        require_exact(*opened, 44, mode)
        return rank

    assert run(body, 2, 1, replication=2) == [0, 1]


@pytest.mark.long
@pytest.mark.parametrize("mode", at_length(MODES, MODES[3:]), ids=str)  # 3 s each
def test_servers_are_removed_and_added_while_workers_push(mode):
    def body(rank):
        opened = tables(mode)
        assert blocks() == {0: 6, 1: 6, 2: 0}
        changes = {
            5: lambda: ps.remove_server(0), 20: lambda: ps.add_servers(2), 35: ps.rebalance,
            50: lambda: ps.remove_server(1),
        }  # fmt: skip
        rc.barrier()
        asked = []
        for step in range(60):
            train(*opened, [step])
            if rank == 0 and step in changes:
                for each in asked[-1:]:
                    each.wait()
                asked.append(changes[step]())
        for each in asked:
            each.wait()
        require_exact(*opened, 60, mode)
        found = blocks()
        rc.barrier()
        return found, [each.result() for each in asked]

    (found, results), _ = run(body, 2, 0, replication=2)
    assert found[1] == 0
    assert results[0] > 6  # blocks, and rows
    assert results[1] == (0, 2)
    assert sum(found.values()) == 12


def test_a_spare_has_a_share_of_the_load_once_it_is_added_and_not_before():
    def body(rank):
        table, _ = tables()
        for _ in range(20):
            table.push(np.ones(N)).wait()
        rc.barrier()
        if rank == 0:
            ps.rebalance().wait()
            assert blocks()[2] == 0
            assert ps.add_servers().wait() == (2,)
            assert blocks()[2] == 0
            for _ in range(20):
                table.push(np.ones(N)).wait()
            load = ps.rebalance().wait()
            assert len(load.load) == 3
            assert blocks()[2] == 4
        rc.barrier()
        return rank

    assert run(body, 2, 0, replication=2) == [0, 1]


def test_what_cannot_be_added_or_removed_is_refused_and_changes_nothing():
    def body(rank):
        table, _ = tables()
        small = ps.hashtable("small", 2, updater=ps.optim.Add(), evict=ps.Evict(max_rows=9))
        small.push(KEYS[:9], np.ones((9, 2), np.float32)).wait()
        (home,) = (each["server"] for each in ps.stats() if each["hashtables"]["small"]["rows"])
        with pytest.raises(rc.RingcommError, match="2 asked for, and 1 stand by"):
            ps.add_servers(2)
        with pytest.raises(ValueError, match="1 or more"):
            ps.add_servers(0)
        with pytest.raises(
            ValueError, match="server 2 has no partitions; those that have are 0, 1"
        ):
            ps.remove_server(2).wait()
        with pytest.raises(ValueError, match=r"stay where they are.*: small"):
            ps.remove_server(home).wait()
        with ps.snapshot(), pytest.raises(rc.RingcommError, match=r"within ps\.snapshot"):
            ps.remove_server(0)
        assert blocks() == {0: 6, 1: 6, 2: 0}
        small.close()
        ps.remove_server(0).wait()
        with pytest.raises(ValueError, match="server 1 is the only one with partitions"):
            ps.remove_server(1).wait()
        assert blocks() == {0: 0, 1: 12, 2: 0}
        table.push(np.ones(N)).wait()
        assert (table.pull().wait() == 1).all()
        return rank

    assert run(body, 2, 0, n_workers=1, replication=2) == [0]


@pytest.mark.long
@pytest.mark.parametrize("victim", [2, 0])
def test_nothing_stays_in_the_process_of_a_server_that_is_removed(victim):
    """The home of a server that died may run there, too, and goes on elsewhere."""
    host = (victim + 1) % 3

    def body(rank):
        opened = tables()
        train(*opened, range(5))
        rc.barrier()
        if rank == 0:
            kill_server(victim)
        train(*opened, range(5, 20))
        if rank == 0:
            ps.remove_server(host).wait()
            rank_of = session().layout.rank_of
            assert rank_of(victim) == rank_of(host)
            assert blocks() == {host: 0, victim: 0, 3 - host - victim: 12}
        rc.barrier()
        train(*opened, range(20, 30))
        require_exact(*opened, 30, "async")
        if rank == 0:
            with pytest.raises(ValueError, match=f"server {3 - host - victim} is the only one"):
                ps.remove_server(3 - host - victim).wait()
            assert ps.add_servers().wait() == (min(host, victim),)  # they are one process
            with pytest.raises(rc.RingcommError, match="1 asked for, and 0 stand by"):
                ps.add_servers()
        return blocks()

    for found in run(body, 3, 1, spares=0, replication=2):
        assert found == {host: 0, victim: 0, 3 - host - victim: 12}


def test_a_server_that_died_is_removed_without_the_one_that_runs_it():
    def body(rank):
        opened = tables()
        if rank == 0:
            kill_server(2)
        train(*opened, range(5))
        if rank == 0:
            ps.remove_server(2).wait()
        require_exact(*opened, 5, "async")
        return blocks()

    for found in run(body, 3, 1, spares=0, replication=2):
        assert found == {0: 6, 1: 6, 2: 0}


def test_what_a_server_had_is_spread_over_processes():
    """Two servers in one process get together as much as one that has a process of its own."""
    places = Places(Layout((0,), (1, 2, 3, 4), (), replication=2))
    places.remove(0)
    moves = places.moves(1, [0] * 8, {0: 1, 1: 2, 2: 2, 3: 4})
    assert Counter(move.dest for move in moves) == {1: 2, 2: 2, 3: 4}


def test_a_process_that_has_just_died_stands_by_no_more(monkeypatch):
    """Nobody has said yet where its home goes on."""
    may_say, kept = threading.Event(), []

    def say(homes, dead, say_homes=Homes._say_homes):
        kept.append((homes, partial(say_homes, homes, dead)))

    def look(homes, look_on=Homes.look):
        mine = [each for each in kept if each[0] is homes]
        if mine and not may_say.is_set():
            return  # nor is a copy made, which comes after the news of where a home is
        for each in mine:
            kept.remove(each)
            each[1]()
        look_on(homes)

    monkeypatch.setattr(Homes, "_say_homes", say)
    monkeypatch.setattr(Homes, "look", look)

    def body(rank):
        table, _ = tables()
        layout = session().layout
        kill_server(3)
        session().client.drive_until(lambda: layout.servers[3] in layout.dead, "a test", None)
        threading.Timer(0.5, may_say.set).start()
        with pytest.raises(rc.RingcommError, match="2 asked for, and 1 stand by"):
            ps.add_servers(2)
        assert ps.add_servers().wait() == (2,)
        table.push(np.ones(N)).wait()
        assert (table.pull().wait() == 1).all()
        return rank

    assert run(body, 2, 1, spares=2, n_workers=1, replication=2) == [0]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"settings": Settings()}, "spares=1: without RINGCOMM_ELASTIC=1 any death ends the job"),
        ({"colocated": True}, "spares=1: it does not go with colocated=True"),
    ],
)
def test_spares_that_could_take_no_place_are_refused(options, why):
    options = {"settings": ELASTIC, **options}
    results = run_all(4, lambda rank: None, 1, spares=1, **options)
    assert all(why in str(each) for each in results), results


def test_without_copies_servers_are_neither_added_nor_removed():
    def body(rank):
        for change in (ps.add_servers, lambda: ps.remove_server(0)):
            with pytest.raises(rc.RingcommError, match=r"it needs ps\.init\(replication=2\)"):
                change()
        return rank

    assert run(body, 1, 0, n_workers=1) == [0]


def test_what_is_on_a_spare_goes_on_to_a_server_by_itself():
    """It may have come there by a move that was asked for before, or could not move at once."""

    def body(rank):
        table, _ = tables()
        source = next(server for server, n in blocks().items() if n)
        move_all(session(), [Move((table.number, 0), source, 2)]).wait()
        wait_until(lambda: blocks()[2] == 0)
        table.push(np.ones(N)).wait()
        assert (table.pull().wait() == 1).all()
        return rank

    assert run(body, 2, 0, n_workers=1, replication=2) == [0]
