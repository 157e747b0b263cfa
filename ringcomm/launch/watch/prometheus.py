"""Serves what `ringcomm top` shows to Prometheus, in its text format. Jobs take no part in this."""

from __future__ import annotations

import contextlib
import hmac
import os
import re
import socket
import stat
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ringcomm._core import monotonic_ns
from ringcomm.errors import ConfigError
from ringcomm.launch.watch.find_ranks import Ranks
from ringcomm.launch.watch.other_hosts import of_run, run_folder_named
from ringcomm.launch.watch.rank_rows import RankSample, as_json

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

_HOST: Final = re.compile(
    r"(127\.0\.0\.1|localhost|\[::1\])(:\d+)?"
)  # any port: ssh -L has its own
_MOST: Final = 32  # connections at a time
_PATIENCE_S: Final = 5.0  # for each part of a request
_TOKEN: Final = "RINGCOMM_PROMETHEUS_TOKEN_FILE"
_TOKEN_NBYTES: Final = 4096
_LABELS: Final = ("job", "rank", "host")
_Value = Callable[[RankSample], float]
_GAUGES: Final[dict[str, tuple[str, _Value]]] = {
    "up": ("1 while the rank lives", lambda s: float(not s.is_over)),
    "bad": ("1 if the rank has failed, is dead or is stopped", lambda s: as_json(s)["is_bad"]),
    "paused": ("1 during `ringcomm ctl JOB pause`", lambda s: s.page["is_paused"]),
    "in_operation": ("1 while an operation is under way", lambda s: s.is_in_operation),
    "memory_bytes": ("resident memory", lambda s: s.process.nbytes if s.process else 0),
    "gpu_memory_bytes": ("memory on GPUs", lambda s: s.process.gpu_nbytes if s.process else 0),
}
_COUNTERS: Final[dict[str, tuple[str, _Value]]] = {
    "steps": ("training steps", lambda s: as_json(s)["step"]),
    "operations": ("operations that have ended", lambda s: s.page["n_ended_ops"]),
    "operation_bytes": ("payload of these", lambda s: s.page["ended_nbytes"]),
    "operation_seconds": ("time in operations", lambda s: s.busy_ns / 1e9),
    "cpu_seconds": ("CPU time", lambda s: s.process.cpu_s if s.process else 0),
}


class Pages(Collector):
    """The status pages of this host at each scrape: as `ringcomm top JOB|RUN` chooses the jobs."""

    def __init__(self, what: str) -> None:
        self._folder = run_folder_named(what)
        self._job = "" if self._folder else what
        self._ranks = Ranks()

    def collect(self) -> Iterator[Metric]:
        self._ranks.search()
        found = self._ranks.sample(monotonic_ns())
        if self._folder is not None:
            found = of_run(found, self._folder)
        live = {each.job for each in found if not each.is_over and each.job.startswith(self._job)}
        samples = [each for each in found if each.job in live]
        for family, metrics in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for name, (text, value) in metrics.items():
                metric = family(f"ringcomm_{name}", text, labels=_LABELS)
                for each in samples:
                    metric.add_metric(_labels(each), value(each))
                yield metric
        scalars = GaugeMetricFamily(
            "ringcomm_scalar", "latest value of rc.log()", labels=(*_LABELS, "name")
        )
        for each in samples:
            for name, _, number in each.scalars:
                scalars.add_metric([*_labels(each), name], number)
        yield scalars


def serve(port: int, what: str, token_file: str = "") -> None:
    """Serve until Ctrl-C.

    Args:
        port: a port of 127.0.0.1; 0: a free one.
        what: see Pages.
        token_file: file with the token that requests must have; "": they need none.

    Raises:
        OSError: the port is taken.
        ConfigError: the token's file cannot be read, or others can read it.
    """
    server = make_server(port, what, _token_in(token_file) if token_file else "")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    print(f"http://127.0.0.1:{server.server_port}/metrics", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        threading.Event().wait()
    server.shutdown()
    thread.join()


def make_server(port: int, what: str, token: str) -> WSGIServer:
    """Return a server that listens, and answers requests in serve_forever()."""
    registry = CollectorRegistry()
    registry.register(Pages(what))
    server = _Server(("127.0.0.1", port), _Handler)
    server.set_app(_guarded(make_wsgi_app(registry), token))
    return server


def _guarded(app: WSGIApplication, token: str) -> WSGIApplication:
    """Return an application that answers those that may read.

    A page of a browser that gives its own name the address of this host is refused by that name.
    """

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if not _HOST.fullmatch(environ.get("HTTP_HOST", "")):
            return refuse(start_response, "421 Misdirected Request", "of another host", [])
        given = environ.get("HTTP_AUTHORIZATION", "").encode(errors="replace")
        if token and not hmac.compare_digest(given, f"Bearer {token}".encode()):
            ways = [("WWW-Authenticate", "Bearer")]
            return refuse(start_response, "401 Unauthorized", "to be read with a token", ways)
        return app(environ, start_response)

    def refuse(
        start_response: StartResponse, status: str, what: str, headers: list[tuple[str, str]]
    ) -> Iterable[bytes]:
        start_response(status, [("Content-Type", "text/plain"), *headers])
        return [f"these numbers are {what}\n".encode()]

    return answer


class _Server(ThreadingMixIn, WSGIServer):
    """Answers each connection in a thread. If there are too many, the oldest one ends."""

    daemon_threads = True
    request_queue_size = _MOST  # with the usual 5, some of many wait for a second or more

    def __init__(self, *arguments: Any) -> None:
        self._open: dict[socket.socket, None] = {}
        self._lock = threading.Lock()
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if len(self._open) >= _MOST:
                oldest = next(iter(self._open))
                del self._open[oldest]
                with contextlib.suppress(OSError):  # it has ended
                    oldest.shutdown(socket.SHUT_RDWR)
            self._open[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a connection that has ended or is late: others could fill the terminal."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(WSGIRequestHandler):
    timeout = _PATIENCE_S

    def log_message(self, format: str, *args: Any) -> None:
        pass


def _token_in(path: str) -> str:
    try:
        with Path(path).open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(_TOKEN_NBYTES).decode("ascii", "replace").strip()
    except OSError as error:
        raise ConfigError(f"{_TOKEN}={path}: {error.strerror}") from error
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        raise ConfigError(
            f"{_TOKEN}={path}: every user can read or write it (mode {stat.S_IMODE(mode):04o}), so "
            "it keeps nobody out. Take that right away (chmod o-rwx)"
        )
    if not re.fullmatch("[!-~]{16,}", text):
        raise ConfigError(
            f"{_TOKEN}={path}: it must have a token of 16 or more characters without a space, such "
            "as of `openssl rand -hex 32`"
        )
    return text


def _labels(sample: RankSample) -> list[str]:
    return [sample.job, str(sample.rank), str(sample.page["host"])]
