"""Lets the watchers of one host see the ranks of all hosts, through the folder of the run.

`ringcomm run` starts a small process per host if there are several. It looks at the ranks of its
host as `ringcomm top` does, and writes what it sees to the folder, so the job takes no part in it.

    python -m ringcomm.launch.watch.other_hosts FOLDER
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import struct
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from ringcomm._core import monotonic_ns
from ringcomm.foreign_text import is_int64, is_number, parsed_json
from ringcomm.launch.job.processes.local_ranks import ranks_here
from ringcomm.launch.job.run_folder import RunFolder, is_run_folder
from ringcomm.launch.job.use_history import UseHistory
from ringcomm.launch.watch.find_ranks import Ranks
from ringcomm.launch.watch.rank_rows import Process, RankSample
from ringcomm.launch.watch.slow_link import Traffic
from ringcomm.launched.child_marks import RUN_FOLDER
from ringcomm.launched.rank_process import RankProcess
from ringcomm.status.page_enums import Ending, OpState, PageState
from ringcomm.system_text import host_name

# --- what TCP has sent to each host ---------------------------------------------------------------
# Any process of the host may ask; the job takes no part in it.
_NETLINK_SOCK_DIAG: Final = 4
_SOCK_DIAG_BY_FAMILY, _NLMSG_ERROR, _NLMSG_DONE = 20, 2, 3
_REQUEST_AND_DUMP: Final = 0x301
_ESTABLISHED: Final = 1 << 1  # of the states of TCP
_INFO: Final = 2  # the attribute with struct tcp_info
_HEADER: Final = struct.Struct("=IHHII")
_QUESTION: Final = struct.Struct("=BBBxI48x")  # struct inet_diag_req_v2
_ANSWER_SIZE: Final = 72  # struct inet_diag_msg
_SIZES: Final = {socket.AF_INET: 4, socket.AF_INET6: 16}
# Where struct tcp_info has them; old kernels have a shorter one.
_RTT_US, _BYTES_ACKED, _BUSY_US, _RWND_LIMITED_US, _INFO_SIZE = 68, 120, 168, 176, 184


def traffic_of(pids: Collection[int]) -> dict[tuple[str, str], Traffic]:
    """Return (own address, other address) -> the sum of these processes' connections.

    Returns {} if the kernel does not answer, as in some containers.
    """
    inodes = {inode for pid in pids for inode in _sockets_of(pid)}
    found: defaultdict[tuple[str, str], list[Traffic]] = defaultdict(list)
    with contextlib.suppress(OSError):
        for family in _SIZES:
            for inode, ends, traffic in _connections(family):
                if inode in inodes and not ends[1].startswith(("127.", "::1")):
                    found[ends].append(traffic)
    return {ends: sum(each[1:], each[0]) for ends, each in found.items()}


def _sockets_of(pid: int) -> Iterator[int]:
    folder = f"/proc/{pid}/fd"
    with contextlib.suppress(OSError):  # it has ended
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):
                target = os.readlink(f"{folder}/{name}")
                if target.startswith("socket:["):
                    yield int(target[8:-1])


def _connections(family: socket.AddressFamily) -> Iterator[tuple[int, tuple[str, str], Traffic]]:
    """Yield inode, (own address, other address) and counters of each connection of this host."""
    question = _QUESTION.pack(family, socket.IPPROTO_TCP, 1 << (_INFO - 1), _ESTABLISHED)
    head = _HEADER.pack(_HEADER.size + len(question), _SOCK_DIAG_BY_FAMILY, _REQUEST_AND_DUMP, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _NETLINK_SOCK_DIAG) as link:
        link.settimeout(1.0)
        link.send(head + question)
        while True:
            data = link.recv(1 << 16)
            while data:
                size, kind, *_ = _HEADER.unpack_from(data)
                if kind in (_NLMSG_DONE, _NLMSG_ERROR):
                    return
                body, data = data[_HEADER.size : size], data[(size + 3) & ~3 :]
                if (traffic := _counters(body[_ANSWER_SIZE:])) is not None:
                    (inode,) = struct.unpack_from("=I", body, _ANSWER_SIZE - 4)
                    yield inode, _ends(family, body), traffic


def _ends(family: socket.AddressFamily, body: bytes) -> tuple[str, str]:
    size = _SIZES[family]
    own, other = body[8 : 8 + size], body[24 : 24 + size]
    return tuple(  # type: ignore[return-value]  # two
        socket.inet_ntop(family, each).removeprefix("::ffff:") for each in (own, other)
    )


def _counters(attributes: bytes) -> Traffic | None:
    while len(attributes) >= 4:
        size, kind = struct.unpack_from("=HH", attributes)
        if size < 4:
            return None
        info, attributes = attributes[4:size], attributes[(size + 3) & ~3 :]
        if kind == _INFO and len(info) >= _INFO_SIZE:
            (rtt_us,) = struct.unpack_from("=I", info, _RTT_US)
            (nbytes,) = struct.unpack_from("=Q", info, _BYTES_ACKED)
            (busy_us,) = struct.unpack_from("=Q", info, _BUSY_US)
            (limited_us,) = struct.unpack_from("=Q", info, _RWND_LIMITED_US)
            return Traffic(nbytes, max(busy_us - limited_us, 0), rtt_us)
    return None


_INTERVAL_S: Final = 1.0
_SILENT_S: Final = 10.0  # a host that has written nothing for so long is not heard of


@dataclass(frozen=True)
class HostReport:
    """The file that one host has written.

    Attributes:
        host: its name.
        age_s: how long ago; by the clocks of the hosts, which may differ a little.
        ranks: its ranks at that moment.
        traffic: (own address, other address) -> what its ranks have sent.
    """

    host: str
    age_s: float
    ranks: tuple[RankSample, ...]
    traffic: Mapping[tuple[str, str], Traffic]


def reports(folder: RunFolder) -> list[HostReport]:
    """Return what hosts have written there; what is none is among the folder's problems."""
    found = []
    for name, data in folder.reports_of_hosts():
        try:
            found.append(parse_report(data, time.time()))
        except ValueError as error:
            folder.problems[name] = str(error)
    return found


class RunFolders:
    """The folders of the runs that are watched.

    Args:
        given: one that is watched wherever its ranks are; None: only those of ranks of this host.

    Attributes:
        problems: what other hosts seem to have written, and cannot be used.
    """

    def __init__(self, given: Path | None = None) -> None:
        self._given = given
        self._of_pids: dict[int, Path | None] = {}
        self._reports: list[HostReport] = []
        self.problems: set[str] = set()

    def with_other_hosts(self, local: Sequence[RankSample]) -> list[RankSample]:
        """Return the ranks of this host, and of the other hosts of their runs, by job and rank."""
        for pid in {each.page["pid"] for each in local} - self._of_pids.keys():
            self._of_pids[pid] = run_folder_of(pid)
        paths = {self._given, *(self._of_pids[each.page["pid"]] for each in local)}
        folders = [RunFolder(path) for path in paths if path is not None]
        self._reports = [each for folder in folders for each in reports(folder)]
        self.problems = {each for folder in folders for each in _problems_of(folder)}
        remote = {(r.job, r.rank): r for each in self._reports for r in _ranks_of(each)}
        here = {(each.job, each.rank): each for each in local}
        return [each for _, each in sorted((remote | here).items())]

    def folder_of(self, members: Sequence[RankSample]) -> Path | None:
        """Return the folder of the run of these ranks, as of with_other_hosts(); None: of none."""
        found = (self._of_pids.get(each.page["pid"]) for each in members)
        return next(filter(None, found), None)

    def traffic(self, job: str) -> dict[tuple[str, str], Traffic]:
        """Return (from host, to host) -> what was sent in a job, as of with_other_hosts()."""
        mine = [each for each in self._reports if any(rank.job == job for rank in each.ranks)]
        return traffic_by_host(mine)


def run_folder_named(what: str) -> Path | None:
    """Return the folder of a run, if `what` leads to one; None: a job's name begins with it."""
    return Path(what).resolve() if what and is_run_folder(Path(what)) else None


def of_run(
    samples: Sequence[RankSample], path: Path, problems: set[str] | None = None
) -> list[RankSample]:
    """Return those of the jobs of a run.

    Args:
        samples: ranks of any jobs.
        path: path of the folder of the run.
        problems: which files in it do not count is added to these.
    """
    folder = RunFolder(path)
    ranks = {(each.pid, each.host): each for each in folder.ranks().values()}
    if problems is not None:
        problems.update(_problems_of(folder))
    found = [each for each in samples if (each.page["pid"], each.page["host"]) in ranks]
    jobs = {each.job for each in found if not _is_of_another(each, ranks)}
    return [each for each in samples if each.job in jobs]


def _problems_of(folder: RunFolder) -> Iterator[str]:
    for name, what in folder.problems.items():
        yield f"{folder.path / name} {what}: it does not count"


def _is_of_another(sample: RankSample, ranks: Mapping[tuple[int, str], RankProcess]) -> bool:
    """Return True if a rank of this host has a pid that a rank of this run had before it."""
    pid, host = sample.page["pid"], sample.page["host"]
    return sample.process is not None and host == host_name() and not ranks[pid, host].lives


def _ranks_of(report: HostReport) -> list[RankSample]:
    if report.age_s < _SILENT_S:
        return list(report.ranks)
    words = f"not heard of for {report.age_s:.0f} s"
    return [each if each.is_over else replace(each, ending=words) for each in report.ranks]


def traffic_by_host(found: Sequence[HostReport]) -> dict[tuple[str, str], Traffic]:
    """Return (from host, to host) -> what was sent until now."""
    host_of = {own: each.host for each in found for own, _ in each.traffic}
    sums: dict[tuple[str, str], Traffic] = {}
    for report in found:
        for (_, other), traffic in report.traffic.items():
            pair = report.host, host_of.get(other, other)
            sums[pair] = sums[pair] + traffic if pair in sums else traffic
    return sums


def main(folder: Path) -> None:
    """Write what the ranks of this host do, until they are over."""
    host, ranks, run = host_name(), Ranks(), RunFolder(folder)
    if run.distrust:  # rank_program.py has said so
        return
    history = UseHistory(run, host)
    mine: list[RankSample] = []
    is_over = False
    while not is_over:
        started = ranks_here(run).values()
        pids = {each.pid for each in started}
        is_over = not any(each.lives for each in started)  # one more report follows
        if {each.page["pid"] for each in mine} != pids:
            ranks.search()
        mine = [each for each in ranks.sample(monotonic_ns()) if each.page["pid"] in pids]
        run.put(f"host-{host}.json", _content(host, mine))
        history.look(pids)
        time.sleep(0 if is_over else _INTERVAL_S)


def run_folder_of(pid: int) -> Path | None:
    """Return the folder of the run that a rank of this host belongs to, or None."""
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None
    match = re.search(rb"(?:^|\0)" + RUN_FOLDER.encode() + rb"=\d+ ([^\0]+)", environ)
    return Path(os.fsdecode(match[1])) if match else None


def _content(host: str, ranks: Sequence[RankSample]) -> bytes:
    traffic = traffic_of([each.page["pid"] for each in ranks if not each.is_over])
    content = {
        "host": host,
        "time": time.time(),
        "ranks": [asdict(each) for each in ranks],
        "traffic": [[*ends, *asdict(each).values()] for ends, each in traffic.items()],
    }
    return json.dumps(content).encode()


# --- what another host has written ----------------------------------------------------------------
_NUMBERS: Final = (
    "pid", "rank", "size", "local_rank", "state", "step", "op_state", "op_sequence", "op_nbytes",
    "op_start_ns", "end_kind", "end_code", "end_time_ns", "leaving_ns", "exit_code", "gone_ns",
    "heartbeat_ns", "n_ended_ops", "ended_nbytes", "busy_ns", "stacks_fd", "stacks_signal",
    "main_thread",
)  # fmt: skip
_TEXTS: Final = ("job", "host", "op_name", "end_what", "end_where", "end_trace", "role")
_FACTS: Final = ("is_reported", "takes_commands", "is_paused")
_MARKS: Final = 5  # of a step


def parse_report(data: bytes, now_s: float) -> HostReport:
    """Return what a host has written. Raises ValueError if it is no report of this version.

    Args:
        data: content of the file.
        now_s: seconds since 1970.
    """
    content = parsed_json(data, has_nan=True)  # a loss may be NaN
    try:
        ranks = tuple(_rank_of(each) for each in content["ranks"])
        traffic = {}
        for own, other, *counts in content["traffic"]:
            _require(_are((own, other), _is_text) and len(counts) == 3 and _are(counts, is_int64))
            traffic[own, other] = Traffic(*counts)
        host, at_s = content["host"], content["time"]
        _require(_is_text(host) and is_number(at_s))
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ValueError("is no report of a host by this version of ringcomm") from error
    return HostReport(host, now_s - at_s, ranks, traffic)


def _rank_of(content: Mapping[str, Any]) -> RankSample:
    page, used, ending = content["page"], content["process"], content["ending"]
    _require(_are((page[name] for name in _NUMBERS), is_int64))
    _require(_are((page[name] for name in _TEXTS), _is_text) and _is_text(ending))
    _require(all(type(page[name]) is bool for name in _FACTS))
    PageState(page["state"]), OpState(page["op_state"]), Ending(page["end_kind"])
    process = None
    if used is not None:
        process = Process(used["cpu_s"], used["nbytes"], used["gpu_nbytes"])
        _require(is_number(process.cpu_s) and _are((process.nbytes, process.gpu_nbytes), is_int64))
    scalars = [(name, step, value) for name, step, value in content["scalars"]]
    for name, step, value in scalars:
        _require(_is_text(name) and is_int64(step) and (type(value) is float or is_int64(value)))
    events = [(at_ns, text) for at_ns, text in content["events"]]
    _require(all(is_int64(at_ns) and _is_text(text) for at_ns, text in events))
    steps = [(number, marks, no_core) for number, marks, no_core in content["steps"]]
    for number, marks, no_core in steps:
        _require(len(marks) == _MARKS and len(no_core) == _MARKS - 1)
        _require(_are((number, *marks, *no_core), is_int64))
    _require(is_int64(content["time_ns"]))
    return RankSample(content["time_ns"], page, scalars, events, process, ending, steps)


def _require(is_so: bool) -> None:
    if not is_so:
        raise ValueError("another type")


def _are(values: Iterable[Any], is_so: Callable[[Any], bool]) -> bool:
    return all(map(is_so, values))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
