"""`ringcomm dashboard`: serves the page on this host until Ctrl-C."""

from __future__ import annotations

import argparse
import contextlib
import errno
import itertools
import os
import secrets
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ringcomm.launch.command_line import RUN_HELP, CommandParser, add_runs, refuse, say
from ringcomm.launch.dashboard.access import Gate
from ringcomm.launch.dashboard.all_runs import AllRuns
from ringcomm.launch.dashboard.source import LiveRanks, Source
from ringcomm.launch.job.run_folder import RunFolder
from ringcomm.launch.option_types import port
from ringcomm.launch.watch.find_runs import facts_of, find
from ringcomm.launch.watch.run_rows import what_became_of
from ringcomm.launch.watch.which_run import LATEST, NoSuchRunError

_ATTEMPTS: Final = 100  # for a port
_TURNS: Final = 4  # of asyncio until a new connection is read; in each, `backlog` more may come
_END_S: Final = 5  # streams end at once; only a page that reads nothing, or a command, takes longer


def main(argv: Sequence[str]) -> int:
    """Serve until Ctrl-C; return 1 if the libraries or the port are not there."""
    args = _parser().parse_args(argv)
    try:
        import uvicorn

        from ringcomm.launch.dashboard.connections import Door, most_connections, of_door
        from ringcomm.launch.dashboard.server import app
    except ModuleNotFoundError as error:
        return _refuse(f"needs {error.name}: pip install 'ringcomm[dashboard]'")
    try:
        listeners = listen(args.port)
    except OSError as error:
        why = os.strerror(error.errno or 0)
        return _refuse(f"port {args.port}: {why}. Choose another by --port")
    number = listeners[0].getsockname()[1]
    gate = Gate(f"ringcomm-{secrets.token_hex(8)}", number, secrets.token_urlsafe(32))

    def is_ending() -> bool:
        return server.should_exit

    live = LiveRanks()
    try:
        source, what = source_of(args.what, args.runs, live)
    except LookupError as error:
        for each in listeners:
            each.close()
        return _refuse(str(error))
    say("dashboard", what)
    most = most_connections()
    door = Door(most)
    config = uvicorn.Config(
        app(gate, AllRuns(args.runs, source, live), door, is_ending),
        http=of_door(door),
        ws="none",
        loop="asyncio",
        lifespan="off",
        proxy_headers=False,  # what a client says of its address is not believed
        backlog=max(1, most // _TURNS),
        log_level="error",  # a warning is a line for each request that others make wrong
        timeout_graceful_shutdown=_END_S,
    )
    server = uvicorn.Server(config)
    with contextlib.suppress(KeyboardInterrupt):
        print(gate.address, flush=True)
        server.run(sockets=listeners)
    return 0


def listen(port: int) -> list[socket.socket]:
    """Listen on both addresses of this host to which browsers may take the name "localhost".

    On one of them alone, another user could listen on the other, and be asked first. Raises OSError
    if the port is taken on one of them; if `port` is 0, another one is tried.
    """
    for attempt in itertools.count(1):
        first = socket.create_server(("127.0.0.1", port))
        try:
            number = first.getsockname()[1]
            return [first, socket.create_server(("::1", number), family=socket.AF_INET6)]
        except OSError as error:
            if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):  # there is no IPv6
                return [first]
            first.close()
            if port or attempt == _ATTEMPTS:
                raise
    raise AssertionError


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="ringcomm dashboard",
        description="Show a run, or all runs and the live jobs of this user on this host, in a "
        "browser: losses, waiting times, who is slow or dead, events, logs. Prints the address, "
        "which has a secret token. From another machine, use ssh -L.",
    )
    parser.add_argument(
        "what",
        nargs="?",
        default="",
        metavar="RUN",
        help=f"{RUN_HELP}; default: a list of all",
    )
    add_runs(parser)
    parser.add_argument("--port", type=port, default=0, help="default: a free one")
    return parser


def source_of(word: str, runs: Path, live: LiveRanks) -> tuple[Source | None, str]:
    """Return what a word means, and in words what is shown; None for no word: all runs.

    Raises LookupError if it means several.
    """
    if not word:
        return None, f"shows the runs in {runs} and all live jobs of this user on this host"
    try:
        run = find(word, runs, live.sample())
    except NoSuchRunError:
        run = None
    if run is None and word != LATEST:
        return Source(None, word, None, live), (
            f"{word!r} is no folder of a run, and no live job of this user on this host yet: it is "
            "shown once it is"
        )
    if run is None:
        return Source(None, "", runs, live), (
            f"there is no run in {runs}: shows all live jobs of this user on this host, until "
            "there is one"
        )
    if not run.folder:
        return Source(None, run.jobs[0], None, live), f"shows {run.title}"
    facts = facts_of(run)
    is_over = facts.end is not None or facts.is_live is False
    shown = f"the run {facts.place}, which {what_became_of(facts)}" if is_over else run.title
    return Source(RunFolder(Path(run.folder)), live=live), f"shows {shown}"


def _refuse(text: str) -> int:
    return refuse("dashboard", text)
