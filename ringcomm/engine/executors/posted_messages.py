"""Messages that have been started, and that nobody has waited for yet.

A message of moderate size often comes within the moment when somebody waits for it: then it needs
no task, which would cost many times as much. It gets one if that wait lasts, and else after 0.1 to
0.3 s, as this rank may compute, or wait for other things, while another rank waits for the message.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

from ringcomm._core import PeerMessage
from ringcomm.engine.core.current_engine import serve_thread
from ringcomm.engine.core.engine import Engine
from ringcomm.engine.core.handle import Handle
from ringcomm.engine.core.layer_hooks import Extension
from ringcomm.engine.core.ledger import Ticket
from ringcomm.engine.progress.task import CompletedTask, Task
from ringcomm.errors import RingcommError

R_co = TypeVar("R_co", covariant=True)
_MOST: Final = 1024
_ADOPT_S: Final = 0.1


class PostedMessage(Handle[R_co]):
    """The handle of such a message.

    Args:
        finish: called once the message has passed; returns the result.
        begin: begins the task that carries on; raises a RingcommError if none can begin.
    """

    def __init__(
        self,
        posted: PostedMessages,
        message: PeerMessage,
        finish: Callable[[], R_co],
        begin: Callable[[], Task | CompletedTask],
    ) -> None:
        self._posted, self._message = posted, message
        self._finish, self._begin = finish, begin
        self._completion = posted.engine.completion
        self.posted_at = time.monotonic()

    def wait(self, timeout_s: float | None = None) -> R_co:
        self._settle(self._posted.moment_s if timeout_s is None else 0.0)
        return super().wait(timeout_s)

    def done(self) -> bool:
        self._settle()
        return super().done()

    def wait_unless(self, is_vain: Callable[[Task], bool]) -> bool:
        self._settle()
        return super().wait_unless(is_vain)

    def wait_briefly(self, limit_s: float) -> bool:
        self._settle()
        return super().wait_briefly(limit_s)

    def when_done(self, callback: Callable[[], None]) -> None:
        self._settle()
        super().when_done(callback)

    @property
    def number(self) -> int:
        self._settle()
        return super().number

    def _settle(self, seconds: float = 0.0) -> None:
        """Finish it if the message comes within so many seconds, else make its task."""
        if not hasattr(self, "_task"):
            if self._posted.engine.state.is_usable:
                self._message.drive(seconds)
            self.adopt()

    def adopt(self) -> None:
        """Finish it if the message has come, else make its task; any thread may call."""
        with self._posted.lock:
            if not hasattr(self, "_task"):
                self._task = self._made()
                self._posted.drop(self)

    def _made(self) -> Task | CompletedTask:
        message = self._message
        if message.is_over and message.refusal is None and not message.fault:
            return CompletedTask(self._finish(), 0, lambda: "a message")
        try:
            with serve_thread(self._posted.engine):
                return self._begin()
        except RingcommError as error:
            message.abandon()
            failed = Task("a message", Ticket(None, 0, 0), ())
            failed.error, failed.is_over = error, True
            return failed


class PostedMessages:
    """All of an engine. A service, see Progress.attach(): it makes tasks of those that are old."""

    has_news: Final = False
    is_busy: Final = False
    is_streaming: Final = False

    def __init__(self, engine: Engine, moment_s: float) -> None:
        self.engine, self.moment_s = engine, moment_s
        self.lock = threading.Lock()
        self._messages: dict[PostedMessage[Any], None] = {}  # oldest first
        engine.progress.work_in_background()
        engine.extensions.add_service(self)
        engine.extensions.before_leaving(self._adopt_all)
        engine.extensions.before_closing(self._forget)

    def post(
        self,
        message: PeerMessage,
        finish: Callable[[], R_co],
        begin: Callable[[], Task | CompletedTask],
    ) -> PostedMessage[R_co]:
        handle = PostedMessage(self, message, finish, begin)
        self._messages[handle] = None
        if len(self._messages) > _MOST:
            handle.adopt()
        return handle

    def drop(self, handle: PostedMessage[Any]) -> None:
        self._messages.pop(handle, None)

    def poll(self, *, only_news: bool = False) -> bool:
        if only_news or not self._messages:
            return False
        latest = time.monotonic() - _ADOPT_S
        old = [each for each in tuple(self._messages) if each.posted_at < latest]
        for each in old:
            each.adopt()
        return bool(old)

    def _adopt_all(self) -> None:
        for each in tuple(self._messages):
            each.adopt()

    def _forget(self, *, is_clean: bool) -> None:
        del is_clean
        self._messages.clear()


_KEY = Extension[PostedMessages]()
_making = threading.Lock()


def posted_messages_of(engine: Engine, moment_s: float) -> PostedMessages:
    with _making:
        found = engine.extensions.get(_KEY)
        if found is None:
            found = PostedMessages(engine, moment_s)
            engine.extensions.keep(_KEY, found)
    return found
