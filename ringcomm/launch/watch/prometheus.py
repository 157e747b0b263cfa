"""Serves what `ringcomm top` shows to Prometheus, in its text format. Jobs take no part in this."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ringcomm._core import monotonic_ns
from ringcomm.launch.watch.find_ranks import Ranks
from ringcomm.launch.watch.other_hosts import of_run, run_folder_named
from ringcomm.launch.watch.rank_rows import RankSample, as_json

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


def serve(port: int, what: str) -> None:
    """Serve until Ctrl-C. Raises OSError if the port is taken."""
    registry = CollectorRegistry()
    registry.register(Pages(what))
    server, thread = start_http_server(port, "127.0.0.1", registry)
    print(f"http://127.0.0.1:{server.server_port}/metrics", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        threading.Event().wait()
    server.shutdown()
    thread.join()


def _labels(sample: RankSample) -> list[str]:
    return [sample.job, str(sample.rank), str(sample.page["host"])]
