"""Jobs of workers and servers as threads."""

import contextlib
import gc
import itertools
import os
import random
import sys
import threading
import time
from collections import defaultdict

from harness import DEADLINE_S, outcomes

import ringcomm as rc
from ringcomm import ps
from ringcomm.engine.api.init_rank_size import engine
from ringcomm.engine.core.meet_and_leave import leave
from ringcomm.errors import RingcommError
from ringcomm.ps import end_of_job
from ringcomm.ps.client import pauses
from ringcomm.ps.client.json_requests import ask_leader
from ringcomm.ps.job import session
from ringcomm.ps.protocol.frame_meta import RELEASE, PushMeta
from ringcomm.ps.protocol.frames import EntryOption, FrameKind
from ringcomm.ps.server.server import Server


class Boom(Exception):
    """Ends a rank as a kill would, with ranks as threads."""


def ended(results, n_dead):
    """Return what the others returned."""
    dead = [each for each in results if isinstance(each, Boom)]
    assert len(dead) == n_dead
    for each in results:
        if isinstance(each, BaseException) and not isinstance(each, Boom):
            raise each
    return [each for each in results if not isinstance(each, Boom)]


class Killed(Boom, RingcommError):
    """Ends a server, from another rank."""


_killed = set()  # ranks of the job that is under way


def kill_server(number):
    """Let a server of this job die, as a kill would end it, between two requests."""
    _killed.add(session().layout.servers[number])


def _refuse(wait, watch, *, refuse=end_of_job.refuse_hopeless):
    if watch.transport.rank in _killed and wait.label == "ps.serve":
        raise Killed
    refuse(wait, watch)


end_of_job.refuse_hopeless = _refuse


def run_workers(n_workers, body, n_servers=1, **options):
    """Run body(rank) on the workers of a job with servers; return what they return."""
    results = run_all(n_workers, body, n_servers, **options)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    n_evaluators = len(results) - n_workers - n_servers
    ended = ["ended with 0"] * (n_evaluators + n_servers)
    if not options.get("colocated"):
        assert results[n_workers:] == ended
    return results[:n_workers]


def run_all(
    n_workers, body, n_servers=1, *, deadline_s=DEADLINE_S, faults=None, settings=None, hub=None,
    **options,
):  # fmt: skip
    """Return what each rank returned or raised."""

    def main(rank):
        try:
            ps.init(n_servers, deadline_s=deadline_s, **options)
            return body(rank)
        except SystemExit as ended:
            return f"ended with {ended.code}"
        finally:
            if sys.exception() is None or isinstance(sys.exception(), SystemExit):
                leave(engine(), "done")

    size = n_workers + options.get("evaluators", 0) + options.get("worker_spares", 0)
    if not options.get("colocated"):
        size += n_servers + options.get("spares", 0)
    try:
        return outcomes(size, main, hub=hub, faults=faults, settings=settings)
    finally:
        _killed.clear()
        release_memory()


def release_memory():
    """Let go of what ended ranks shared, before descriptors run out: select() knows 1,024."""
    if len(os.listdir("/proc/self/fd")) > 400:
        gc.collect()


@contextlib.contextmanager
def deadline(seconds):
    """Let this worker's waits in the block end after `seconds`, and no others."""
    client = session().client
    before, client.deadline_s = client.deadline_s, seconds
    try:
        yield
    finally:
        client.deadline_s = before


def require_names(*names):
    """Require on all workers that each server has these tables; the leader drops one first."""
    until = time.monotonic() + 20
    while True:
        found = [{*each["tables"], *each["hashtables"]} for each in ps.stats()]
        if all(each == {*names} for each in found):
            break
        assert time.monotonic() < until, found
        time.sleep(0.01)  # nobody tells what other servers hold
    rc.barrier()


def moving_beside(next_move):
    """Ask for one move after the other without waiting; return what ends that, and counts them.

    next_move(rng) returns the future of what move_all() told.
    """
    rng, is_over, n_moved = random.Random(1), threading.Event(), itertools.count()

    def again(future):
        if future.result().moved:
            next(n_moved)
        if not is_over.is_set():
            last[0] = next_move(rng).then(again)

    last = [next_move(rng)]
    last[0].then(again)

    def end():
        is_over.set()
        last[0].wait()
        return next(n_moved)

    return end


def cross_gradients(monkeypatch):
    """Let server s hear the gradients of worker s first, of two workers, once the result is set.

    So each worker is late at another server. What a worker has sent behind its gradient stays
    behind it, as on the wire.
    """
    is_on, hear, kept = threading.Event(), Server.on_request, defaultdict(list)

    def hear_crossed(server, delivery):
        header = delivery.header
        place = server.index, header.table, header.partition, header.clock
        is_gradient = (
            header.kind == FrameKind.PUSH and not PushMeta.of(delivery.meta).flags & RELEASE
        )
        is_decision = header.kind == FrameKind.ENTER and header.option in (
            EntryOption.IN,
            EntryOption.OUT,
        )
        is_behind = any(each.header.origin == header.origin for each in kept.get(place, ()))
        if not (is_on.is_set() and (is_gradient or (is_decision and is_behind))):
            hear(server, delivery)
            return
        kept[place].append(delivery)
        if len({each.header.origin for each in kept[place]}) == 2:
            for each in sorted(kept.pop(place), key=lambda d: d.header.origin != server.index):
                hear(server, each)

    monkeypatch.setattr(Server, "on_request", hear_crossed)
    return is_on


def stop_rounds():
    """Let no round end on any server; return what lets them end again.

    A snapshot stops them, and servers do not hear of what follows.
    """
    client, on_request = session().client, Server.on_request
    number, stopped = pauses.new_id(client), []

    def stop_there(server, request):
        if request.header.kind == FrameKind.ORDER and b'"hold"' in request.meta:
            stopped.append(server)
        else:
            on_request(server, request)

    Server.on_request = stop_there
    try:
        ask_leader(client, "test", "snapshot", number=number, patience_s=0, save_to=None)
        assert client.drive_until(lambda: len(stopped) == len(client.servers), "test", DEADLINE_S)
    finally:
        Server.on_request = on_request
    return lambda: pauses.release(client, number)
