"""What the jobs of ci/ps_storms.py share: arguments, tables, moves, and who is killed when.

With mode "sync" or "first_of" a worker pushes SHARE, and the mean over n divides that by n: 840 has
all divisors up to 8. In other modes it pushes 1.
"""

import argparse
import itertools
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np

import ringcomm as rc
from ringcomm import ps
from ringcomm.ps.client.json_requests import ignore
from ringcomm.ps.client.request import Request
from ringcomm.ps.protocol.frames import FilesOption, FrameKind
from ringcomm.ps.server.replies import as_body
from ringcomm.ps.server.server import Server
from ringcomm.ps.session import session

SHARE, BLOCKS, K, BOUND = 840, 6, 2, 2
MODES = {"sync": "sync", "async": "async", "ssp": ps.SSP(BOUND), "first_of": ps.FirstOf(K)}
OF_REQUESTS = {
    "push": (FrameKind.PUSH,),
    "moving": (FrameKind.NEWS, FrameKind.ASK, FrameKind.ORDER),
    "snapshot": (FrameKind.ASK, FrameKind.ORDER),
    "saving": ((FrameKind.FILES, FilesOption.SAVE),),
    "recovering": (FrameKind.ASK, (FrameKind.FILES, FilesOption.RESTORE), FrameKind.ORDER),
    "opening": (FrameKind.ASK, FrameKind.ORDER),
}
OF_COMMANDS = {
    "moving": (
        b'"move"', b'"places"', b'"freeze"', b'"drain"', b'"give"', b'"take"', b'"commit"',
        b'"thaw"',
    ),
    "snapshot": (b'"snapshot"', b'"end"', b'"stop rounds"', b'"hold"', b'"let go"'),
    "recovering": (b'"recover"', b'"recovered"', b'"make all"'),
    "opening": (b'"open"', b'"make"'),
}  # fmt: skip


def parser(servers, steps):
    """Return a parser of the arguments that all jobs have, with these defaults."""
    made = argparse.ArgumentParser()
    made.add_argument("--out", type=Path, required=True)
    made.add_argument("--mode", choices=MODES, required=True)
    made.add_argument("--servers", type=int, default=servers)
    made.add_argument("--steps", type=int, default=steps)
    return made


def open_tables(n, mode, of_rows=None):
    """Return a table with n elements in each block, one of rows, and one of who is done.

    Args:
        n: elements.
        mode: of the first, and of the second unless of_rows is another.
        of_rows: see mode.
    """
    add = ps.optim.Add()
    table = ps.table("w", (BLOCKS, n), "float64", updater=add, mode=MODES[mode], block_nbytes=8 * n)
    rows = ps.hashtable("rows", 2, updater=add, mode=MODES[of_rows or mode], dtype="float64")
    return table, rows, ps.table("done", n, updater=add)


def ask_for_move(table, step):
    """Ask for a move of a block, and wait for nothing."""
    client = session().client
    servers = client.servers
    move = (table.number, step % BLOCKS, 0, servers[step // 5 % len(servers)])
    body = as_body({"command": "move", "moves": [move]})
    request = Request(FrameKind.ASK, server=client.leader, body=body)
    client.call_one("move", request, ignore)


def read_kill(text):
    """Return who, at and when of a kill, WHO@AT:WHEN."""
    who, at, when = text.replace("@", ":").split(":")
    return int(who), int(at), when


class Death:
    """When this rank is to be killed: at which step, and when in it.

    Args:
        kills: RANK@STEP:WHEN, of all ranks.
        mark: what the file is called, without its rank, that says who was killed.
    """

    def __init__(self, kills, mark):
        self.plans = {who: (at, when) for who, at, when in map(read_kill, kills)}
        self.mark, self.me, self.at, self.when = mark, None, -1, ""

    def plan(self, rank):
        """Learn which rank this is."""
        self.me = rank
        self.at, self.when = self.plans.get(rank, (-1, ""))

    def now(self):
        self.mark.with_suffix(f".{self.me}").touch()
        os.kill(os.getpid(), signal.SIGKILL)

    def if_due(self, step, when):
        if step == self.at and when == self.when:
            self.now()

    def soon(self, step):
        """Come within the next step, wherever this rank is then."""
        if step == self.at and self.when == "soon":
            threading.Timer(np.random.default_rng().uniform(0, 0.01), self.now).start()


def plan_deaths_of_servers(args):
    """Let servers die: before or after so many requests of a kind, or a moment after one."""
    plans = {}
    for kill in (*args.kill, *args.kill_later):
        who, at, when = read_kill(kill)
        plans[who] = at, when.partition("-")
    later = {int(kill.partition("@")[0]) for kill in args.kill_later}
    on_request, counts, of_copies = Server.on_request, itertools.count(1), itertools.count(1)
    dying = threading.Lock()  # is not released: a second timer would empty the file

    def die(server):
        dying.acquire()
        (args.out / f"kill.{session().engine.job_rank}").write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)

    def may_die(number):
        """Return True once the death of this server loses nothing."""
        layout = session().layout
        if number in later and layout.dead & {*layout.servers}:  # it has heard of the first death
            homes = session().dispatcher.server._homes.values()
            if all(home.server.n_copies == 2 for home in homes if home.is_primary):
                later.remove(number)
        return number not in later

    def on_request_or_die(server, request):
        if not rc.is_initialized():  # all have left
            on_request(server, request)
            return
        current = session()
        number = current.layout.number_of(current.engine.job_rank)
        at, (kinds, _, moment) = plans.get(number, (0, ("push", "", "")))
        kind = request.header.kind
        is_of_kind = {kind, (kind, request.header.option)} & {*OF_REQUESTS[kinds]}
        is_counted = is_of_kind and may_die(number)
        if is_counted and kind in (FrameKind.ASK, FrameKind.ORDER):
            text = request.meta + request.body.tobytes()
            is_counted = any(each in text for each in OF_COMMANDS[kinds])
        if server.index == number:
            is_due = is_counted and next(counts) == at
        else:  # another server's, of which this process has a copy
            is_due = is_counted and next(of_copies) == at
        if is_due and moment == "before":
            die(server)
        on_request(server, request)
        if is_due and moment == "soon":
            threading.Timer(np.random.default_rng().uniform(0, 0.02), die, [server]).start()
        elif is_due:
            die(server)

    Server.on_request = on_request_or_die
