"""`ringcomm dashboard`: serves the page on this host until Ctrl-C."""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ringcomm.launch.dashboard.access import Gate
from ringcomm.launch.dashboard.source import Source
from ringcomm.launch.job.run_folder import RunFolder, is_run_folder
from ringcomm.launch.option_types import port

_END_S: Final = 5  # streams end at once; only a page that reads nothing, or a command, takes longer


def main(argv: Sequence[str]) -> int:
    """Serve until Ctrl-C; return 1 if the libraries or the port are not there."""
    args = _parser().parse_args(argv)
    try:
        import uvicorn

        from ringcomm.launch.dashboard.server import app
    except ModuleNotFoundError as error:
        return _refuse(f"needs {error.name}: pip install 'ringcomm[dashboard]'")
    try:
        listener = socket.create_server(("127.0.0.1", args.port))
    except OSError as error:
        why = os.strerror(error.errno or 0)
        return _refuse(f"port {args.port}: {why}. Choose another by --port")
    gate = Gate(listener.getsockname()[1], secrets.token_urlsafe(32))

    def is_ending() -> bool:
        return server.should_exit

    source = _source(args.what, args.runs)
    if args.what and source.folder is None and not source.state()["ranks"]:
        what = f"{args.what!r} is no folder of a run, and no live job of this user on this host"
        print(f"ringcomm dashboard: {what} yet: it is shown once it is", file=sys.stderr)
    shown = app(gate, source, is_ending)
    server = uvicorn.Server(
        uvicorn.Config(shown, log_level="warning", timeout_graceful_shutdown=_END_S)
    )
    print(f"http://127.0.0.1:{gate.port}/?token={gate.token}", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=[listener])
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ringcomm dashboard",
        description="Show a run, or the live jobs of this user on this host, in a browser: losses, "
        "waiting times, who is slow or dead, logs. Prints the address, which has a secret token. "
        "From another machine, use ssh -L.",
    )
    parser.add_argument(
        "what",
        nargs="?",
        default="",
        metavar="JOB|RUN",
        help="the folder of a run, or the beginning of a live job's name; default: the newest run "
        "in `runs`, or else all live jobs",
    )
    parser.add_argument("--runs", type=Path, default=Path("runs"), metavar="FOLDER")
    parser.add_argument("--port", type=port, default=0, help="default: a free one")
    return parser


def _source(what: str, runs: Path) -> Source:
    if what and is_run_folder(Path(what)):
        return Source(RunFolder(Path(what).resolve()))
    return Source(None, what, None if what else runs)


def _refuse(text: str) -> int:
    print(f"ringcomm dashboard: {text}", file=sys.stderr)
    return 1
