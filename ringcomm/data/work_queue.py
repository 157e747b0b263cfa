"""rc.data.WorkQueue: ranks take the parts of an epoch one by one, so that fast ranks take more."""

from __future__ import annotations

import itertools
import json
import operator
import reprlib
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from ringcomm.data.epoch_order import Indices, epoch_order
from ringcomm.data.leases import OVER, WAIT, Leases, require_state
from ringcomm.engine.api import init_rank_size
from ringcomm.engine.core.engine import Engine
from ringcomm.engine.core.layer_hooks import Extension
from ringcomm.engine.peers.drive_until import drive_until
from ringcomm.errors import (
    CommTimeoutError,
    MismatchError,
    NotInitializedError,
    PeerFailedError,
    RingcommError,
)
from ringcomm.transport.control_header import TEXT_MAX, ControlHeader, ControlKind

_AGAIN_S: Final = 1.0  # a question is asked again: who keeps the queue may not have had it yet
_PAUSE_S: Final = 0.01  # before a rank asks again while others have the last parts
_OTHERS_S: Final = 1e-3  # for which who keeps the queue looks for questions before its own
_NO_ANSWER: Final = 0  # number of a message that is no question
_LEASES: Final = ("epoch", "next", "undone")  # of a state; see Leases.state()
_ORDER: Final = ("n", "size", "shuffle", "seed")  # of a state: arguments that say what a part is
_Spec = dict[str, Any]


@dataclass
class _KeptQueue:
    """A queue that this rank keeps: as `first`, the rank that asked first, has described it."""

    first: int
    spec: _Spec
    leases: Leases
    mismatch: str = ""  # what each rank is told once others have described it otherwise


class Queues:
    """The queues of this rank: those that it keeps for all, and its questions about others.

    Args:
        engine: of this rank.
        home: the rank of the job that keeps new queues.
    """

    def __init__(self, engine: Engine, home: int) -> None:
        self._engine, self.home = engine, home
        self._kept: dict[str, _KeptQueue] = {}
        self._asked: dict[str, tuple[int, _Spec]] = {}  # by queue: who keeps it; of which object
        self._answers: dict[str, tuple[int, Any]] = {}  # by queue: number of the question
        self._numbers = itertools.count(_NO_ANSWER + 1)  # a late answer is none to another object
        self._lock = threading.RLock()  # a loop that ends within it gives its part back
        engine.watch.listeners[ControlKind.WORK] = self._hear

    def require_unused(self, name: str, home: int, spec: _Spec) -> None:
        """Raise RingcommError if another object of this rank has asked about such a queue.

        Nobody could tell which of the two the other ranks mean: they may be behind, or have come
        later. With who kept it a queue is gone, and its name is free.
        """
        kept_at, asked = self._asked.get(name, (home, spec))
        if asked is spec or kept_at != home or home in self._engine.watch.peers.dead:
            return
        raise RingcommError(
            f"queue[{name}]: this rank has used another WorkQueue with this name in this job. "
            "Iterate that one again for the next epoch. For other samples, for a new beginning, or "
            "to go on from a state_dict(), pass a name= that is new, on all ranks"
        )

    def ask(self, question: _Spec, limit_s: float) -> Any:
        """Return the answer of the rank that keeps the queues.

        Raises:
            CommTimeoutError: it does not come within limit_s.
            PeerFailedError: a rank died without which the job cannot go on.
            RingcommError: see require_unused().
        """
        engine, name, home = self._engine, question["name"], question["home"]
        self._require_home(home, name)
        self.require_unused(name, home, question["spec"])
        self._asked[name] = home, question["spec"]
        if engine.job_rank == home:
            drive_until(engine, lambda: False, f"queue[{name}]", _OTHERS_S)
            return self._answer(home, question)
        number, text = next(self._numbers), _text_of(question)
        end = time.monotonic() + limit_s

        def is_there() -> bool:
            return self._answers.get(name, (-1, None))[0] == number

        while not is_there():
            self._require_home(home, name)
            if time.monotonic() >= end:
                raise CommTimeoutError(
                    f"queue[{name}]: {engine.transport.label(home)}, which keeps the queue, "
                    f"did not answer within {limit_s:g} s. Each rank of the job must make the "
                    "queue; raise the limit with RINGCOMM_TIMEOUT_S",
                    missing=[home],
                )
            engine.watch.tell(home, ControlKind.WORK, text, value=number)
            drive_until(engine, is_there, f"queue[{name}]", min(_AGAIN_S, limit_s))
        return self._answers.pop(name)[1]

    def _require_home(self, home: int, name: str) -> None:
        how = self._engine.watch.peers.dead.get(home)
        if how is not None:
            transport = self._engine.transport
            raise PeerFailedError(
                f"queue[{name}]: {transport.label(home)}, which kept the queue, {how}. After "
                "ps.recover() make the queue again, on all ranks, with the state_dict() of a "
                "checkpoint",
                rank=home,
                reason=how,
                view=transport.view.number,
            )

    def leave(self, question: _Spec) -> None:
        """Give a part back, and wait for nothing: a loop may end at any time, and in any thread."""
        if question["home"] != self.home:
            return  # it died with what it had
        if self._engine.job_rank == self.home:
            self._answer(self.home, question)
        else:
            self._engine.watch.tell(
                self.home, ControlKind.WORK, _text_of(question), value=_NO_ANSWER
            )

    def _hear(self, source: int, header: ControlHeader, text: str) -> None:
        content = json.loads(text)
        if header.flag:
            self._answers[content["name"]] = header.value, content["answer"]
            return
        answer = {"name": content["name"], "answer": self._answer(source, content)}
        if header.value == _NO_ANSWER:
            return
        self._engine.watch.tell(
            source, ControlKind.WORK, json.dumps(answer), value=header.value, flag=True
        )

    def _answer(self, rank: int, question: _Spec) -> Any:
        with self._lock:
            name, spec = question["name"], question["spec"]
            kept = self._kept.get(name)
            if kept is None:
                kept = _KeptQueue(rank, spec, Leases(spec["parts"], spec["state"]))
                self._kept[name] = kept
            if kept.spec != spec and not kept.mismatch:
                kept.mismatch = _mismatch_of(name, kept, rank, spec)
            if kept.mismatch:
                return {"error": kept.mismatch}
            leases = kept.leases
            for gone in self._engine.watch.peers.gone:
                leases.leave(gone)
            if question["do"] == "state":
                return leases.state()
            is_done = question["part"] >= 0
            is_done = is_done and leases.done(rank, question["epoch"], question["part"])
            if question["do"] == "leave":
                leases.leave(rank)
            takes = question["do"] == "take"
            part = leases.take(rank, question["epoch"]) if takes else OVER
            return {"part": part, "holders": leases.holders if part == WAIT else []}


def _mismatch_of(name: str, kept: _KeptQueue, rank: int, spec: _Spec) -> str:
    names = [each for each in spec if spec[each] != kept.spec[each] and each != "parts"]
    passed, first = (
        ", ".join(f"{each}={reprlib.repr(said[each])}" for each in names)
        for said in (spec, kept.spec)
    )
    return (
        f"queue[{name}]: rank {rank} passes {passed}, and rank {kept.first}, which asked first, "
        f"{first}. Pass the same on all ranks; a queue of other samples, or from another state, "
        "needs a name= of its own"
    )


def _text_of(question: _Spec) -> str:
    text = json.dumps(question, separators=(",", ":"))
    if len(text.encode()) > TEXT_MAX:
        name = question["name"]
        raise RingcommError(f"queue[{name}]: its name and state take more than {TEXT_MAX} bytes")
    return text


QUEUES: Final = Extension[Queues]()


def keep_queues(engine: Engine, home: int) -> None:
    """Choose the rank of the job that keeps all queues. Every rank calls it."""
    engine.extensions.keep(QUEUES, Queues(engine, home))
    if engine.job_rank == home:
        engine.progress.work_in_background()  # it answers while it computes


def _queues_of(engine: Engine) -> Queues:
    """Return the queues of this rank; without parameter servers rank 0 keeps them."""
    if engine.extensions.get(QUEUES) is None:
        keep_queues(engine, 0)
    queues = engine.extensions.get(QUEUES)
    assert queues is not None
    return queues


def keep_queues_at(engine: Engine, home: int) -> None:
    """Change the rank that keeps queues which are made from now on, if the one before has died."""
    queues = engine.extensions.get(QUEUES)
    assert queues is not None
    queues.home = home


class WorkQueue:
    """Samples that ranks take part by part: who is fast takes more.

    Each iteration is an epoch, and yields arrays of indices. A part is done when this rank asks for
    the next one, or calls done(). Of an epoch each part that is reported done was given out once;
    one whose rank died, or broke off the loop, before that is given out again. The loop ends on all
    ranks once all parts are done.

    Beside parameter servers a server keeps the queue, so that any other rank may die. Else rank 0
    does, and answers at the latest 0.2 s after a question if it computes.

    Args:
        n: samples of an epoch.
        size: samples of a part; the last one of an epoch may be shorter.
        name: of the queue. On all ranks that use it, all arguments are the same. A rank uses one
            WorkQueue of each name in a job, or, with rc.elastic.run, in a view.
        shuffle: another order in each epoch.
        seed: of the order.
        state: a state_dict() to go on from; the number of ranks may be another one.

    Raises:
        ValueError: n or size is less than 1, or state is of a queue with another n, size, seed or
            shuffle, or names parts that there are not.
        TypeError: state is not of state_dict(), or name is no string.
        RingcommError: this rank has used another WorkQueue with this name.
    """

    def __init__(
        self, n: int, size: int, *, name: str = "work", shuffle: bool = True, seed: int = 0,
        state: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self._n, self._size = operator.index(n), operator.index(size)
        if self._n < 1 or self._size < 1:
            raise ValueError(f"WorkQueue: n is {n}, size is {size}; both must be 1 or more")
        self._name, self._shuffle, self._seed = name, bool(shuffle), operator.index(seed)
        if not isinstance(name, str):
            raise TypeError(f"WorkQueue: name is {name!r}; it must be a string")
        if state is not None and not (
            isinstance(state, dict) and state.keys() == {*_LEASES, *_ORDER}
        ):
            raise TypeError(f"WorkQueue: state is {state!r}; it must be of state_dict()")
        parts = -(-self._n // self._size)
        self._spec = {
            "n": self._n, "size": self._size, "parts": parts, "shuffle": self._shuffle,
            "seed": self._seed, "state": state and {each: state[each] for each in _LEASES},
        }  # fmt: skip
        for each, mine in self._order.items():
            if state is not None and state[each] != mine:
                raise ValueError(
                    f"WorkQueue: the state has {each}={state[each]}, this queue {mine}: its parts "
                    "have other samples. Pass the same, or no state"
                )
        if state is not None:
            require_state(parts, state)
        self.epoch = 0 if state is None else int(state["epoch"])
        self._part = -1
        queues = _queues_of(init_rank_size.engine())
        self._queues = weakref.ref(queues)
        self._has_asked = False
        self._home = queues.home  # it dies with what it has
        queues.require_unused(name, self._home, self._spec)

    def __iter__(self) -> Iterator[Indices]:
        """Yield the samples of the parts that this rank takes, until the epoch is over.

        Raises:
            CommTimeoutError: others have the last parts for longer than RINGCOMM_TIMEOUT_S.
            MismatchError: ranks pass different arguments.
            PeerFailedError: a rank died without which the job cannot go on.
            RingcommError: another WorkQueue with this name was used before this one.
        """
        order = epoch_order(self._n, seed=self._seed, epoch=self.epoch, is_shuffled=self._shuffle)
        is_whole = False
        try:
            while (part := self._take()) != OVER:
                self._part = part
                yield order[part * self._size : (part + 1) * self._size]
            is_whole = True
        finally:
            if not is_whole and self._part >= 0:  # the loop was broken off within a part
                self._part = -1
                self._leave()
        self.epoch += 1

    def done(self) -> None:
        """Report the part that was yielded last as done, such as before a checkpoint."""
        if self._part >= 0:
            self._ask("done")
            self._part = -1

    def state_dict(self) -> dict[str, Any]:
        """Return where the epoch stands, for WorkQueue(state=): what is not done comes again."""
        return {**self._ask("state"), **self._order}

    @property
    def _order(self) -> dict[str, Any]:
        return {each: self._spec[each] for each in _ORDER}

    def _take(self) -> int:
        engine = init_rank_size.engine()
        limit_s = engine.settings.timeout_or_inf
        end = time.monotonic() + limit_s
        while True:
            answer = self._ask("take")
            self._part = -1
            if answer["part"] != WAIT:
                return int(answer["part"])
            if time.monotonic() >= end:
                raise CommTimeoutError(
                    f"queue[{self._name}]: ranks {answer['holders']} have had the last parts of "
                    f"epoch {self.epoch} for {limit_s:g} s. They compute, or have stopped taking: "
                    "a loop that ends early gives its part back with its end",
                    missing=answer["holders"],
                )
            drive_until(engine, lambda: False, f"queue[{self._name}]", _PAUSE_S)

    def _leave(self) -> None:
        """Give back what this rank has, unless the queue is gone."""
        try:
            engine = init_rank_size.engine()
        except NotInitializedError:
            return
        queues = engine.extensions.get(QUEUES)
        if queues is not None and self._queues() is queues:
            queues.leave(self._question("leave"))

    def _ask(self, do: str) -> Any:
        engine = init_rank_size.engine()
        if not self._has_asked:
            self._has_asked, queues = True, _queues_of(engine)
            if self._queues() is not queues:  # it was made before ps.init()
                self._queues, self._home = weakref.ref(queues), queues.home
        own = self._queues()
        if own is None or own is not engine.extensions.get(QUEUES):
            raise RingcommError(
                f"queue[{self._name}]: it was used before rc.shutdown() or ps.init(), or before "
                "ranks were lost. Make it again, with the state_dict() of a checkpoint"
            )
        answer = own.ask(self._question(do), engine.settings.timeout_or_inf)
        if "error" in answer:
            raise MismatchError(answer["error"])
        return answer

    def _question(self, do: str) -> _Spec:
        return {
            "name": self._name, "do": do, "spec": self._spec, "epoch": self.epoch,
            "part": self._part, "home": self._home,
        }  # fmt: skip
