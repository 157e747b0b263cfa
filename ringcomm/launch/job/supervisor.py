"""Runs the launcher of a job: shows its output, passes signals on, and leaves no process behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
import selectors
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING, Any, Final

from ringcomm.config import environment
from ringcomm.foreign_text import printable
from ringcomm.launch.job.output_lines import (
    LauncherText,
    LinesOf,
    Tracebacks,
    error_of_log,
    prefix_of,
)
from ringcomm.launch.job.processes.local_ranks import (
    MpiFiles,
    live_ranks_here,
    ranks_here,
    send_signal,
    session_members,
)
from ringcomm.launch.job.processes.stalls import Hung, Orphan, StartWait, Unseen
from ringcomm.launch.job.run_folder import CONFIG, END, LAUNCHER_LOG, RunFolder, time_text
from ringcomm.launch.job.run_words import Stages, start_text
from ringcomm.launch.job.show import can_show_line, say, show, show_line
from ringcomm.launch.job.verdict import SIGNAL_NAMES, JobEnding, Verdict, judge_ending, lost_ranks
from ringcomm.launched.launcher_door import LAUNCH_AGENT, PRELOAD, agent_with_door, with_door
from ringcomm.launched.mpi_defaults import MEMORY, MEMORY_OF_RUN
from ringcomm.launched.rank_process import RankProcess
from ringcomm.system_text import text_of

if TYPE_CHECKING:
    from ringcomm.launch.job.use_history import UseHistory

_ASKING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # ask the job to stop
_PASSED: Final = (signal.SIGUSR1, signal.SIGUSR2)  # mean what the program makes of them
_TICK_S: Final = 0.05
_REDRAW_S: Final = 0.2
_USE_AFTER_S: Final = 1.0  # when the ranks are about to have used something
_TERM_TO_KILL_S: Final = 3.0
_GUARDIANS_S: Final = 15.0  # they end soon after their ranks, at most 8 s
_DRAIN_S: Final = 2.0
_PIECE: Final = 1 << 16
_TAIL: Final = 1 << 18  # bytes of what the launcher says that are kept, to find out how it ended
# What a rank says there; see rank_program.py.
_BLIND: Final = re.compile(rb"ringcomm run: host (\S+) does not see ")
_PR_SET_PDEATHSIG: Final = 1
_SESSIONS: Final = "PRTE_MCA_prte_local_tmpdir_base"  # of Open MPI 5; on this host alone
_ALL_SESSIONS: Final = "PRTE_MCA_prte_tmpdir_base"
_PREFIX: Final = Path(MEMORY_OF_RUN).name
_CANNOT_START: Final = 127
_OTHER_FILES: Final = 64  # that are opened beside the logs of the ranks


class Supervisor:
    """Starts the launcher, and waits for its end.

    Args:
        argv: the command.
        environ: its environment.
        folder: the folder of the run.
        size: number of ranks.
        grace_s: seconds that ranks have to stop in order when they are asked to.
        least: an elastic job goes on after deaths with so many workers, and each is reported at
            once; None: it is not elastic.
        silent_hosts: asks the hosts of the job, and returns those that do not answer. If there is
            one, and all ranks of this host have ended (not well, unless the job goes on after
            deaths), the launcher is ended, which may hang. None: the job has no other hosts.
        forks_ranks: the launcher starts the ranks of its host below itself. If all ranks are of
            this host, and have ended, a launcher that hangs is ended.
        hosts: the names of the hosts; (): this one alone.
        tells_beginning: until the first line of a rank, a line on a terminal says what they do.
    """

    def __init__(
        self,
        argv: Sequence[str],
        environ: Mapping[str, str],
        folder: RunFolder,
        *,
        size: int,
        grace_s: float,
        least: int | None = None,
        silent_hosts: Callable[[], Collection[str]] | None = None,
        forks_ranks: bool = False,
        hosts: Sequence[str] = (),
        tells_beginning: bool = False,
    ) -> None:
        self._folder = folder
        self._size = size
        self._launcher: int | None = None  # its pid
        self._passed_over: set[int] = set()  # ranks whose process seemed to be of another run
        self._stop = _Stop(grace_s, self._send)
        self._least = least
        self._goes_on = least is not None
        self._orphan = None if silent_hosts is None else Orphan(grace_s, silent_hosts)
        self._launcher_name = Path(argv[0]).name
        self._start = StartWait(folder)
        self._unseen = Unseen(folder, size, hosts, self._launcher_name)
        self._hung = Hung(folder, size, grace_s)
        self._mpi_files = MpiFiles(folder, size)
        self._use: UseHistory | None = None
        # Each of several hosts writes its own.
        self._use_begins = float("inf") if hosts else time.monotonic() + _USE_AFTER_S
        self._forks_ranks = forks_ranks
        self._kill_at = float("inf")  # the launcher, which was asked to end
        self._logs: dict[int, _Log] = {}
        self._tracebacks = Tracebacks()
        tells_beginning = tells_beginning and can_show_line()
        self._beginning = _Beginning(folder, size) if tells_beginning else None
        self._launcher_text = LauncherText()
        self._launcher_tail = b""
        self._blind_hosts: set[str] = set()
        self._has_gaps = False  # in the launcher's log
        self._reports_shown = 0
        self._argv, self._environ = argv, environ

    def run(self) -> JobEnding:
        """Run the job to its end; return what is known of it.

        Raises OSError if the launcher cannot be started.
        """
        with (
            _private_folder() as sessions,
            _private_folder("/dev/shm") as memory,
            _room_for_files(self._size + _OTHER_FILES) as limits,
            _Signals() as signals,
            self._folder.open_launcher_log() as log,
        ):
            process = subprocess.Popen(
                self._argv,
                stdin=subprocess.DEVNULL,  # Open MPI 5.0.11 loses some of it, or hangs (measured)
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**self._environ, **self._private_places(sessions, memory)},
                start_new_session=True,  # Ctrl-C reaches this process alone
                preexec_fn=_in_child(os.getpid(), limits),  # noqa: PLW1509 - one thread is here
            )
            self._launcher = process.pid
            with (
                process,
                _watchdog(self._end_job_of(process.pid, [sessions, memory]), self._folder.fileno()),
                selectors.DefaultSelector() as s,
            ):
                try:
                    self._watch(process, s, signals, log)
                finally:
                    _end_all(lambda: session_members(process.pid))
            self._end_beginning()
            self._await_guardians()
            self._mpi_files.remove()
            self._show_rest(signals)
        ending = self._ending(process.returncode)
        for name, what in sorted(self._folder.problems.items()):
            say(f"{name} in the folder of the run {what}: it does not count")
        return ending

    def _private_places(self, sessions: str, memory: str) -> dict[str, str]:
        """Return variables that keep others out of what launcher and ranks have on this host."""
        if not self._forks_ranks:
            return {}
        is_given = _SESSIONS in self._environ or _ALL_SESSIONS in self._environ
        # Of a TMPDIR where every user can replace it, it would be whose they like.
        place = memory if memory and _is_open_to_all(os.path.dirname(sessions)) else sessions
        places = {} if is_given else {_SESSIONS: place}
        if preload := with_door(self._environ.get(PRELOAD, "")):
            places[PRELOAD] = preload
        if agent := agent_with_door(self._environ.get(LAUNCH_AGENT, "")):
            places[LAUNCH_AGENT] = agent
        if memory and self._environ.get(MEMORY, MEMORY_OF_RUN).startswith(MEMORY_OF_RUN):
            places[MEMORY] = memory
        return places

    def _ending(self, launcher_code: int) -> JobEnding:
        return JobEnding(
            size=self._size,
            ends=self._folder.ends(),
            seen=self._folder.ranks().keys(),
            failures=tuple(f for g in self._folder.guardians() for f in g.failures),
            launcher_code=launcher_code,
            launcher_text=self._launcher_tail.decode(errors="replace"),
            asked=self._stop.signal,
            least=self._least,
            is_stopped=self._folder.is_stopped,
            lost_before_init=self._start.lost,
            has_hung=self._hung.is_found,
            aborted=self._folder.aborted(),
            launcher=self._launcher_name,
            is_launcher_ended=self._kill_at != float("inf"),
        )

    def run_and_record(self) -> tuple[Verdict, JobEnding | None]:
        """Run the job to its end; return the verdict, and what is known of the end.

        That is None if the launcher cannot be started. The folder has the record of the end then.
        """
        start = time.time()
        ending = None
        try:
            ending = self.run()
            verdict = self._with_error(judge_ending(ending))
        except OSError as error:
            verdict = Verdict(_CANNOT_START, f"{self._argv[0]}: {error}")
        if ending is not None and verdict.code != 0 and verdict.rank is None and not verdict.report:
            show(b"".join(self._launcher_text.held), sys.stderr)  # about deaths
        try:
            self._folder.record_end(_record(verdict, ending, start))
        except OSError as error:  # the disk is full, or somebody has removed the folder
            say(f"{self._folder.path / END} cannot be written: {error.strerror}")
        return verdict, ending

    def _with_error(self, verdict: Verdict) -> Verdict:
        """Add the error of a rank of which no guardian tells, from the end of its log."""
        if verdict.code != 1 or verdict.rank is None or verdict.report:
            return verdict
        if (log := self._folder.open_log_of(verdict.rank)) is None:
            return verdict
        with log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - _PIECE))
            error = error_of_log(log.read(_PIECE))
        lines = [f"x {verdict.what} - exit {verdict.code}", *(f"    {each}" for each in error)]
        return replace(verdict, report="\n".join([*lines, ""])) if error else verdict

    def _watch(
        self,
        process: subprocess.Popen[bytes],
        selector: selectors.BaseSelector,
        signals: _Signals,
        log: IO[bytes],
    ) -> None:
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            selector.register(stream, selectors.EVENT_READ)
        selector.register(signals.fd, selectors.EVENT_READ)
        drained_by, tick_s = float("inf"), _TICK_S
        while len(selector.get_map()) > 1 and time.monotonic() < drained_by:
            for key, _ in selector.select(tick_s):
                if key.fd == signals.fd:
                    self._pass_on(signals.take(), process)
                elif data := os.read(key.fd, _PIECE):
                    self._take(data, log)
                else:
                    selector.unregister(key.fileobj)
            if process.poll() is not None and drained_by == float("inf"):
                drained_by = time.monotonic() + _DRAIN_S  # a child of a rank may hold the pipe
            tick_s = self._act(process)
        while process.poll() is None:  # it has closed its output
            self._pass_on(signals.take(), process)
            tick_s = self._act(process)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(tick_s)
        show(self._launcher_text.flush(), sys.stderr)

    def _act(self, process: subprocess.Popen[bytes]) -> float:
        """Do what is due; return the seconds until the next time."""
        tick_s = 0 if self._show_logs() else _TICK_S
        self._mpi_files.look()
        self._stop.go_on(process, self._local_ranks)
        if self._beginning is not None:
            show_line(self._beginning.look())
        if self._use is None and time.monotonic() >= self._use_begins:
            self._use = _use_history(self._folder)
        if self._use is not None and self._use.is_due:
            self._use.look([each.pid for each in self._local_ranks().values()])
        self._end_what_waits_in_vain(process)
        return tick_s

    def _take(self, data: bytes, log: IO[bytes]) -> None:
        try:
            log.write(data)
        except OSError as error:  # the disk is full
            if not self._has_gaps:
                say(f"{LAUNCHER_LOG}: {error.strerror}")
            self._has_gaps = True
        self._launcher_tail = (self._launcher_tail + data)[-_TAIL:]
        self._blind_hosts |= {text_of(host) for host in _BLIND.findall(self._launcher_tail)}
        show(self._launcher_text.add(data), sys.stderr)

    def _pass_on(self, numbers: Sequence[int], process: subprocess.Popen[bytes]) -> None:
        for number in numbers:
            if number in _ASKING:
                self._mpi_files.note()
                self._stop.ask(number, self._local_ranks())
            else:
                self._send(number, self._local_ranks())

    def _local_ranks(self) -> dict[int, RankProcess]:
        return ranks_here(self._folder)

    def _send(self, number: int, ranks: Mapping[int, RankProcess]) -> Collection[int]:
        """Send a signal to ranks of this host; return those that have got it, or have ended."""
        passed_over = send_signal(number, ranks, self._folder, self._launcher)
        for rank in passed_over.keys() - self._passed_over:
            say(
                f"rank {rank}: process {passed_over[rank].pid}, which it has recorded, shows no "
                "sign that it is of this run, and gets no signal"
            )
        self._passed_over.update(passed_over)
        return ranks.keys() - passed_over.keys()

    # --- output -----------------------------------------------------------------------------------
    def _show_logs(self) -> bool:
        """Show what the ranks have written, or a piece of it; return True if there is more."""
        if len(self._logs) < self._size:
            for rank in range(self._size):
                if rank not in self._logs and (file := self._folder.open_log_of(rank)):
                    prefix = prefix_of([rank]) if self._size > 1 else b""
                    self._logs[rank] = _Log(file, LinesOf(prefix))
        for rank, log in self._logs.items():
            self._show_lines(rank, log.news())
        show(self._tracebacks.due(time.monotonic()), sys.stdout)
        if self._goes_on:
            self._show_reports()
        return any(log.has_more for log in self._logs.values())

    def _show_rest(self, signals: _Signals) -> None:
        """Show all that the ranks have written, unless a signal comes meanwhile."""
        signals.take()
        self._show_logs()
        is_cut = False
        for rank, log in self._logs.items():
            for lines in log.rest():
                is_cut = is_cut or bool(signals.take())
                if is_cut:
                    break
                self._show_lines(rank, lines)
        show(self._tracebacks.flush(), sys.stdout)
        if is_cut:
            say(f"the rest of the output is in the logs of the ranks, {self._folder.path}")

    def _show_lines(self, rank: int, lines: bytes) -> None:
        if lines:
            self._end_beginning()
        if self._size > 1:
            lines = self._tracebacks.add(rank, lines, time.monotonic())
        show(lines, sys.stdout)

    def _end_beginning(self) -> None:
        if self._beginning is not None:
            self._beginning = None
            show_line("")

    def _show_reports(self) -> None:
        texts = [f.text for g in self._folder.guardians() for f in g.failures]
        for text in texts[self._reports_shown :]:
            show(printable(text, keeps_lines=True).encode(), sys.stderr)
        self._reports_shown = len(texts)

    def _end_what_waits_in_vain(self, process: subprocess.Popen[bytes]) -> None:
        """End a launcher that waits for a lost host or hangs, or ranks that wait in init()."""
        if process.poll() is not None or self._stop.signal is not None:
            return
        if time.monotonic() > self._kill_at:
            process.kill()
        elif self._kill_at == float("inf") and (text := self._vain_wait(process.pid)):
            say(text)
            process.terminate()
            self._kill_at = time.monotonic() + _TERM_TO_KILL_S
        elif text := self._unseen.look(process.pid, self._blind_hosts):
            say(text)

    def _vain_wait(self, launcher: int) -> str:
        """Return for what the job waits in vain; "" if it does not."""
        if text := self._start.look():
            return text
        if self._forks_ranks and (text := self._hung.look(launcher)):
            return text
        if self._orphan is None or not self._orphan.is_due:
            return ""
        here = self._local_ranks()
        is_idle = bool(here) and not any(rank.lives for rank in here.values())
        return self._orphan.look(is_idle=is_idle and (self._goes_on or self._has_failed()))

    def _has_failed(self) -> bool:
        """Return True if a rank has recorded a bad end; the others of a good job may work on."""
        return any(end.code for end in self._folder.ends().values())

    # --- the end ----------------------------------------------------------------------------------
    def _end_job_of(self, launcher: int, private: Sequence[str]) -> Callable[[], None]:
        """Return what the watchdog does: it ends a job whose `ringcomm run` has been killed."""

        def left() -> set[int]:
            ranks = live_ranks_here(self._folder, launcher).values()
            return {*session_members(launcher), *(rank.pid for rank in ranks)}

        def end_job() -> None:
            files = MpiFiles(self._folder, self._size)
            files.note()
            _end_all(left)
            files.remove()
            for each in private:
                shutil.rmtree(each, ignore_errors=True)

        return end_job

    def _await_guardians(self) -> None:
        """Return when each guardian of this host has written its record, or is dead."""
        deadline = time.monotonic() + _GUARDIANS_S
        while time.monotonic() < deadline:
            waited_for = [g for g in self._folder.guardians() if not g.has_ended]
            if not any(Path(f"/proc/{guardian.pid}").exists() for guardian in waited_for):
                return
            time.sleep(_TICK_S / 5)


def supervise(path: str, *, forks_ranks: bool) -> None:
    """Run the job that a folder describes to its end; its output is only in the logs there.

    Ends this process if the folder is not this user's alone: it says what is started.
    """
    sys.stdout = None
    folder = RunFolder(Path(path))
    config = None if folder.distrust else folder.launch_config()
    if config is None or config.get("folder") != text_of(os.fsencode(path)):
        why = folder.distrust or folder.problems.get(CONFIG) or "is not the one that was made"
        sys.exit(f"ringcomm: {path} {why}. Set TMPDIR to a folder that is yours alone")
    Supervisor(
        config["launcher"],
        environment() | config["variables"],
        folder,
        size=config["ranks"],
        grace_s=0.0,
        forks_ranks=forks_ranks,
    ).run_and_record()


def _record(verdict: Verdict, ending: JobEnding | None, start: float) -> dict[str, Any]:
    """Return the content of end.json."""
    ends = {} if ending is None else ending.ends
    lost = {} if ending is None else lost_ranks(ending)
    return {
        "code": verdict.code,
        "what": verdict.what,
        "rank": verdict.rank,
        "report": verdict.report,
        "lost": {str(rank): deed for rank, deed in lost.items()},
        "exit_codes": {str(rank): end.code for rank, end in sorted(ends.items())},
        "launcher_code": None if ending is None else ending.launcher_code,
        "ended": time_text(time.time()),
        "seconds": round(time.time() - start, 3),
    }


@dataclass
class _Log:
    file: IO[bytes]  # without a buffer
    lines: LinesOf
    has_more: bool = False

    def news(self) -> bytes:
        """Return lines of the next piece; the rank may write faster than they can be shown."""
        data = self.file.read(_PIECE)
        self.has_more = len(data) == _PIECE
        return self.lines.add(data)

    def rest(self) -> Iterator[bytes]:
        """Yield the lines until the present end; a process that was left behind may write on."""
        with self.file:
            left = os.fstat(self.file.fileno()).st_size - self.file.tell()
            while left > 0 and (data := self.file.read(min(left, _PIECE))):
                left -= len(data)
                yield self.lines.add(data)
        yield self.lines.flush()


def _use_history(folder: RunFolder) -> UseHistory:
    # No job begins later for this, and `ringcomm check` imports this file where there is no _core.
    from ringcomm.launch.job.use_history import UseHistory

    return UseHistory(folder)


class _Beginning:
    """Tells what the ranks do until the first line of one; a look takes some microseconds."""

    def __init__(self, folder: RunFolder, size: int) -> None:
        self._folder, self._stages = folder, Stages(size)
        self._began = time.monotonic()
        self._init_began = self._init_ended = 0.0
        self._look_at = 0.0
        self._text = ""

    def look(self) -> str:
        now = time.monotonic()
        if now < self._look_at:
            return self._text
        self._look_at = now + _REDRAW_S
        with contextlib.suppress(OSError):  # somebody has removed the folder
            found, before = self._folder.stages(self._stages.size), self._stages
            arrived = max(found.arrived, before.arrived)  # between two records a rank has none
            self._stages = replace(found, arrived=arrived)
        if self._stages.arrived and not self._init_began:
            self._init_began = now
        if self._stages.through == self._stages.size and not self._init_ended:
            self._init_ended = now
        init_s = (self._init_ended or now) - (self._init_began or now)
        self._text = start_text(self._stages, now - self._began, init_s)
        return self._text


class _Stop:
    """Stops a job in steps: its ranks are asked, then the launcher, then all are killed.

    Open MPI's mpirun kills ranks 0.25 s after a SIGTERM (measured), which is no time for a
    checkpoint. So the ranks are asked first, directly. A second signal skips the grace period.
    """

    def __init__(
        self, grace_s: float, send: Callable[[int, Mapping[int, RankProcess]], Collection[int]]
    ) -> None:
        self.signal: int | None = None
        self._grace_s = grace_s
        self._send = send
        self._asked: set[RankProcess] = set()
        self._next_at = float("inf")
        self._next = signal.SIGTERM

    def ask(self, number: int, ranks: Mapping[int, RankProcess]) -> None:
        """Pass a signal on to the ranks, or go on to the next step if that was done."""
        if self.signal is not None:
            self._next_at = 0.0
            return
        self.signal = number
        name = SIGNAL_NAMES[number]
        say(f"{name}: the ranks have {self._grace_s:g} s to end")
        # A shell script may go on when its rank has ended.
        has_ranks = any(rank.lives for rank in ranks.values())
        self._next_at = time.monotonic() + (self._grace_s if has_ranks else 0.0)
        self._ask_new(ranks)

    def go_on(
        self, process: subprocess.Popen[bytes], ranks: Callable[[], dict[int, RankProcess]]
    ) -> None:
        if self.signal is None or process.poll() is not None:
            return
        if time.monotonic() < self._next_at:
            self._ask_new(ranks())
            return
        if self._next == signal.SIGTERM:
            process.send_signal(signal.SIGTERM)
            self._next, self._next_at = signal.SIGKILL, time.monotonic() + _TERM_TO_KILL_S
        else:
            self._send(signal.SIGKILL, ranks())
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            self._next_at = float("inf")

    def _ask_new(self, ranks: Mapping[int, RankProcess]) -> None:
        assert self.signal is not None
        new = {rank: process for rank, process in ranks.items() if process not in self._asked}
        self._asked.update(new[rank] for rank in self._send(self.signal, new))


class _Signals:
    """Catches signals, which wake a selector; a signal that is ignored stays so (nohup)."""

    def __enter__(self) -> _Signals:
        self.fd, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._caught: list[int] = []
        self._before = {}
        for number in (*_ASKING, *_PASSED):
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self.fd)
        os.close(self._writer)

    def take(self) -> list[int]:
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, _PIECE)
        caught, self._caught = self._caught, []
        return caught

    def _note(self, number: int, _: FrameType | None) -> None:
        self._caught.append(number)
        with contextlib.suppress(BlockingIOError):
            os.write(self._writer, b"!")


@contextlib.contextmanager
def _private_folder(parent: str | None = None) -> Iterator[str]:
    """Yield a new folder of this user alone, and remove it; "" if the parent cannot be written.

    Unless prterun is given one, it uses ompi.PID in TMPDIR, also if it is there and another user's.
    And ranks use files in /dev/shm whose names others can know, and claim, before.

    Args:
        parent: the folder to make it in; None: TMPDIR, which must be writable.
    """
    try:
        path = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
    except OSError:
        if parent is None:
            raise
        yield ""
        return
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _is_open_to_all(folder: str) -> bool:
    """Return True if every user can rename what is in a folder, also what is not his."""
    mode = os.stat(folder).st_mode
    return bool(mode & stat.S_IWOTH) and not mode & stat.S_ISVTX


@contextlib.contextmanager
def _room_for_files(count: int) -> Iterator[tuple[int, int]]:
    """Let this process open so many more files; yield the limits for its children, as before."""
    count += len(os.listdir("/proc/self/fd"))
    before = soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count:  # 1024 most often
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(count, hard), hard))
    try:
        yield before
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def _end_all(pids_left: Callable[[], Collection[int]]) -> None:
    """End processes that are left of a job, such as daemons of the launcher."""
    deadline = time.monotonic() + _TERM_TO_KILL_S
    number = signal.SIGTERM
    while pids := pids_left():
        if time.monotonic() > deadline:
            number, deadline = signal.SIGKILL, time.monotonic() + _TERM_TO_KILL_S
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        time.sleep(_TICK_S)  # nobody tells of the end of a process that is not our child


@contextlib.contextmanager
def _watchdog(end_job: Callable[[], None], kept: int) -> Iterator[None]:
    """Run a process that ends the job if this one is killed, and needs the descriptor `kept`.

    The launcher gets a signal from the kernel then; but mpirun may be a shell script, as Intel
    MPI's is, which passes no signal on, or be stopped. And MPICH's ranks have sessions of their
    own.
    """
    reader, writer = os.pipe()
    pid = os.fork()  # no exec: that takes time of each start, and one thread is here
    if pid == 0:
        try:
            _wait_for_end_of_parent(reader, kept)
            end_job()
        finally:
            os._exit(0)
    os.close(reader)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(writer)


def _wait_for_end_of_parent(reader: int, kept: int) -> None:
    """Return when the pipe closes. Hold no more than `kept` of the parent, as its output."""
    for number in (*_ASKING, *_PASSED):
        signal.signal(number, signal.SIG_IGN)
    os.setsid()
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor not in (reader, kept):
            with contextlib.suppress(OSError):  # that of the folder itself
                os.close(descriptor)
    os.read(reader, 1)


def _in_child(parent: int, limits: tuple[int, int]) -> Any:
    """Return a function for the child, which has these limits of open files.

    It will get SIGTERM if this process is killed.
    """
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def ask_kernel() -> None:
        if resource.getrlimit(resource.RLIMIT_NOFILE) != limits:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it was killed before the call
            os._exit(1)

    return ask_kernel
