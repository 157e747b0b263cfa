"""The step boundary of this rank, at which commands are taken.

SIGTERM and SIGUSR1 are like a command: whichever rank gets one, the job stops as after `ringcomm
ctl JOB stop`. Ranks that take commands propose it at their next step boundary. Others, such as
servers, ask those.
"""

from __future__ import annotations

import logging
import math
import signal
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, Final

from ringcomm._core import catch_stop_signals, release_stop_signals, stop_signal
from ringcomm.engine.control.commands import STOP, parse, split
from ringcomm.engine.control.live_parameters_and_callbacks import PROGRAM, Program
from ringcomm.engine.control.perform import END, Answer, end, perform, refusal
from ringcomm.engine.control.rounds import ControlRounds, Note, RoundMessage
from ringcomm.engine.core.context import EngineContext
from ringcomm.engine.peers.drive_until import drive_until
from ringcomm.engine.peers.groups import Groups
from ringcomm.errors import CommTimeoutError
from ringcomm.ranks_as_text import ranks_text
from ringcomm.status.run_events import write_event
from ringcomm.transport.control_header import ControlHeader, ControlKind

_log = logging.getLogger("ringcomm")
_WAIT: Final = "a command of `ringcomm ctl`"
_ANY_NUMBER: Final = 1 << 62  # the owner's next step is one step, whatever its number


class Control:
    """Takes the commands of `ringcomm ctl`, at the same step as all other ranks.

    Args:
        engine: of this rank.
        groups: of this engine.
        program: what commands may change.

    Attributes:
        is_paused: this rank waits at a step boundary for the command that resumes it.
        signals: those that stop the job.
        checkpoints: functions of other layers that save one, called after those of the program.
        workers: returns the ranks that take commands, if the default group does not tell.
    """

    def __init__(self, engine: EngineContext, groups: Groups, program: Program = PROGRAM) -> None:
        self._engine = weakref.proxy(engine)
        self._groups = groups
        self._page = engine.page
        self._program = program
        self._lock = threading.Lock()
        self._rounds = ControlRounds(engine.job_rank)
        self._owner: Callable[[], object | None] = lambda: None
        self._has_owner = False  # or had one
        self._steps_itself: Callable[[], object | None] = lambda: None  # the program, by rc.step()
        self._rivals: weakref.WeakSet[object] = weakref.WeakSet()
        self._have_stepped: weakref.WeakSet[object] = weakref.WeakSet()
        # Steps of rc.step(); of the owner; of this rank, which are as many on all ranks.
        self._n_own_steps = self._last = self._step = 0
        self.is_paused = False
        self.signals = StopSignals(self._engine)
        self.checkpoints: list[Callable[[int], object]] = []
        self.workers: Callable[[], Sequence[int]] | None = None
        self._must_end = False
        engine.watch.listeners[ControlKind.CONTROL] = self._hear

    def complete_step_of(self, program: object, step: int | None = None) -> None:
        """Count a step of rc.step(), and come to its boundary; no other one counts from now on."""
        self._n_own_steps += 1
        self._steps_itself = weakref.ref(program)
        if step is not None:
            self.go_on_from(step - 1)
        self.come_to_boundary(program, self._n_own_steps)

    def go_on_from(self, n_steps: int) -> None:
        """Count on from `n_steps`, which an earlier start of the job had made; not back."""
        program = self._program
        if n_steps > program.n_steps:
            program.n_before += n_steps - program.n_steps
            program.n_steps = n_steps
            self._note_step()

    def come_to_boundary(self, owner: object, completed: int) -> None:
        """Take the commands that are due; wait while ranks agree on their step, or for a pause.

        Not collective: ranks send messages if there is a command, and none else.

        Args:
            owner: whose step it is.
            completed: how many steps it has completed. More than one since the last call: a worker
                of parameter servers has left some out.
        """
        if not self._counts(owner):
            return
        if self.workers is not None:  # workers count from where their tables are
            self.go_on_from(completed - 1)
        self._step += max(1, completed - self._last)
        self._last = completed
        self._program.n_steps = self._program.n_before + self._step
        self._note_step()
        if self._savers:
            self.signals.arm(self._members)
        with self._lock:
            self._rounds.enter(self._step)
        while not self._leave():
            for text, is_mine in self._take_due():
                self._perform(text, is_mine=is_mine)
            self._propose()
            if self._is_waiting:
                self._wait()

    @property
    def n_steps(self) -> int:
        """The number of steps of this rank in this view, which are as many on all ranks."""
        return self._step

    def catch_up(self, n_steps: int) -> None:
        """Count the steps at whose boundaries this rank was not: it was in join(), or stood by."""
        self._step, self._last = n_steps, _ANY_NUMBER
        self._program.n_steps = self._program.n_before + n_steps
        with self._lock:
            self._rounds.catch_up(n_steps)

    def tell_of_commands(self, rank: int) -> None:
        """Tell a rank that begins where this one is of the commands that are still to be taken."""
        with self._lock:
            self._send(self._rounds.pass_on(rank))

    def _note_step(self) -> None:
        # What is shown of workers of servers is their clock, which goes back in a recovery.
        if self.workers is None or self._steps_itself() is not None:
            self._engine.note_step(self._program.n_steps)

    def end_job(self) -> None:
        """End the job as `ringcomm ctl JOB stop` does, at the next step boundary; of any rank."""
        self._must_end = True

    def _counts(self, owner: object) -> bool:
        """Return True if the steps of `owner` are those of the job.

        Of several optimizers it is the one that joins in last, from its second step on: where they
        step in turn, what is saved after its step has no step of some of them alone. It is another
        one as soon as that steps twice in a row without it: also if it is gone, which ranks notice
        at different times. A program that calls rc.step() is not displaced.
        """
        is_new = owner not in self._have_stepped
        self._have_stepped.add(owner)
        if self._owner() is owner:
            self._rivals.clear()
            return True
        if (program := self._steps_itself()) is not None and self._owner() is program:
            return False
        if self._has_owner and not is_new and owner not in self._rivals:
            self._rivals.add(owner)
            return False
        is_first, self._has_owner = not self._has_owner, True
        self._owner, self._last = weakref.ref(owner), _ANY_NUMBER
        self._rivals.clear()
        if self._page is not None:
            self._page.note_takes_commands()
        return is_first or not is_new  # the one before has counted this step

    def _leave(self) -> bool:
        if self.is_paused or self._has_mail:
            return False
        with self._lock:
            return self._rounds.leave()

    def _take_due(self) -> list[tuple[str, bool]]:
        with self._lock:
            return self._rounds.take_due()

    # --- the agreement ----------------------------------------------------------------------------
    @property
    def _is_waiting(self) -> bool:
        """True if only others, or a command, can change anything."""
        with self._lock:
            is_held = self._rounds.must_hold
            is_idle = not self._rounds.has_due and not self._has_mail
        return is_held or (self.is_paused and is_idle)

    @property
    def _has_mail(self) -> bool:
        has_command = self._page is not None and self._page.has_command
        return has_command or self.signals.has_come or self._must_end

    @property
    def _savers(self) -> list[Callable[[int], object]]:
        return self._program.checkpoints + self.checkpoints

    def _wait(self) -> None:
        """Return once something may have changed; a pause has no deadline.

        Raises:
            PeerFailedError: a rank died.
            CommTimeoutError: ranks have not answered, or the one that had the command does not go
                on.
        """
        engine = self._engine

        def has_changed() -> bool:
            with self._lock:
                self._send(self._rounds.settle(self._gone))
            return not self._is_waiting

        limit_s = math.inf if self.is_paused else engine.settings.timeout_or_inf
        if not drive_until(engine, has_changed, _WAIT, limit_s):
            raise CommTimeoutError(
                f"{_WAIT}: ranks have not agreed on a step within RINGCOMM_TIMEOUT_S={limit_s:g}"
                f"{_from(self._rounds.missing)}. End this job",
                missing=self._rounds.missing,
            )

    def _propose(self) -> None:
        """Propose what a signal or the command in the mailbox asks for, or refuse the command."""
        if self.signals.take() and not self._program.is_stopping:
            self._propose_to_all(STOP, unless_known=True)
        if self._must_end and not self._program.is_stopping:
            self._propose_to_all(END, unless_known=True)
        self._must_end = False
        if self._page is None or not self._page.has_command:
            return
        text = self._page.take_command()
        if not text:
            return
        try:
            why = refusal(
                parse(split(text)), self._program, self._engine,
                is_paused=self.is_paused, can_save=bool(self._savers),
            )  # fmt: skip
        except ValueError as error:  # written by something else than `ringcomm ctl`
            why = str(error)
        if why:
            self._page.answer_command(f"no {why}")
            return
        self._propose_to_all(text)

    def _propose_to_all(self, text: str, *, unless_known: bool = False) -> None:
        with self._lock:
            if unless_known and self._rounds.knows(text):
                return
            self._send(self._rounds.propose(text, self._members, self._gone))

    @property
    def _members(self) -> Sequence[int]:
        return self._groups.default.ranks if self.workers is None else self.workers()

    @property
    def _gone(self) -> Collection[int]:
        peers = self._engine.watch.peers
        return {*peers.left, *(peers.dead.keys() & peers.survivable)}

    def _hear(self, source: int, header: ControlHeader, text: str) -> None:
        """Take a message about a command; called in the progress loop."""
        note = Note(source, RoundMessage(header.round), header.key, header.value, text)
        if note.phase >= RoundMessage.READY:
            self.signals.hear(source, note.phase)
            return
        with self._lock:
            self._send(self._rounds.hear(source, note, self._gone))

    def _send(self, notes: list[Note]) -> None:
        for note in notes:
            self._engine.watch.tell(
                note.dest,
                ControlKind.CONTROL,
                note.text,
                key=note.key,
                value=note.step,
                round=note.phase,
            )

    # --- what is done -----------------------------------------------------------------------------
    def _perform(self, text: str, *, is_mine: bool) -> None:
        self._program.taken.append(text)
        reply = self._reply if is_mine else _ignore
        answer = Answer(self._program.n_before + self._step, partial(self._tell, text, reply))
        if text == END:
            self._set_paused(is_paused=False)
            self.signals.tell_of_stop(self._members)
            end(self._program, self._savers, answer._replace(tell=_ignore))
            return
        command = parse(split(text))
        if command.word in ("pause", "resume"):
            self._set_paused(is_paused=command.word == "pause")
            answer.give("paused" if self.is_paused else "goes on")
        else:
            if command.word == "stop":
                self._set_paused(is_paused=False)
                self.signals.tell_of_stop(self._members)
            live = {*self._groups.default.ranks}.difference(self._engine.watch.peers.gone)
            perform(
                command, self._program, self._savers, self._engine, answer,
                is_first=self._engine.job_rank == min(live, default=None),
            )  # fmt: skip

    def _set_paused(self, *, is_paused: bool) -> None:
        self.is_paused = is_paused
        if self._page is not None:
            self._page.set_paused(is_paused)

    def _tell(self, text: str, reply: Callable[[str], None], answer: str) -> None:
        if self._page is not None:
            self._page.note_event(f"ctl {text}: {answer.partition(' ')[2]}")
            write_event("command", f"{text}: {answer.partition(' ')[2]}")
        reply(answer)

    def _reply(self, answer: str) -> None:
        if self._page is not None:
            self._page.answer_command(answer)


class StopSignals:
    """The stop signals that this rank, or another one, has received.

    They are caught from the first step boundary on at which the program can save a checkpoint.
    Before, and in a program that cannot, they end the process as ever.

    Args:
        engine: of this rank.

    Attributes:
        has_stopped: this rank takes no commands, and those that do have stopped.
    """

    has_news = is_busy = is_streaming = False  # as a service: others make the loop poll

    def __init__(self, engine: EngineContext) -> None:
        self._engine = engine
        self._page = engine.page
        self._is_armed = self._is_asked = self._is_taken = False
        self._takers: list[int] = []  # ranks that take commands, if this one does not
        self.has_stopped = False

    def arm(self, members: Collection[int]) -> None:
        """Catch them, and have the ranks catch them that take no commands; members are others."""
        if not self._is_armed:
            self._is_armed = True
            catch_stop_signals()
            self._tell_others(members, RoundMessage.READY)

    def release(self) -> None:
        if self._is_armed:
            release_stop_signals()

    @property
    def has_come(self) -> bool:
        return self._is_armed and not self._is_taken and (self._is_asked or stop_signal() != 0)

    def take(self) -> bool:
        if not self.has_come:
            return False
        self._is_taken = True
        self._say()
        return True

    def tell_of_stop(self, members: Collection[int]) -> None:
        self._tell_others(members, RoundMessage.STOPPED)

    def hear(self, source: int, phase: RoundMessage) -> None:
        """Take a message of READY, ASKED or STOPPED; called in the progress loop."""
        if phase == RoundMessage.ASKED:
            self._is_asked = True
        elif phase == RoundMessage.STOPPED:
            self.has_stopped = True
        else:
            self._takers.append(source)
            if not self._is_armed:
                self._is_armed = True
                catch_stop_signals()
                self._engine.extensions.add_service(self)

    def poll(self, *, only_news: bool = False) -> bool:
        """Ask the ranks that take commands, if a signal has come; see Service."""
        if only_news or self._is_taken or stop_signal() == 0:
            return False
        self._is_taken = True
        self._say()
        gone = self._engine.watch.peers.gone
        for rank in self._takers:
            if rank not in gone:
                self._engine.watch.tell(rank, ControlKind.CONTROL, round=RoundMessage.ASKED)
        return True

    def _tell_others(self, members: Collection[int], phase: RoundMessage) -> None:
        engine = self._engine
        gone = engine.watch.peers.gone
        for rank in range(engine.job_size):
            if rank not in members and rank not in gone:
                engine.watch.tell(rank, ControlKind.CONTROL, round=phase)

    def _say(self) -> None:
        if not (number := stop_signal()):  # the rank that has got it has said so
            return
        name = signal.Signals(number).name
        text = f"{name}: the job saves a checkpoint after this step, and ends"
        _log.warning("%s", text)
        if self._page is not None:
            self._page.note_event(text)


def _from(ranks: list[int]) -> str:
    return f": no answer from {ranks_text(ranks)}" if ranks else ""


def _ignore(_: Any) -> None:
    """Say nothing: another rank answers."""
