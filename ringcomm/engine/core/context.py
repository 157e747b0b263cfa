"""The parts of an engine that groups, operations and other layers use."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from ringcomm._core import StatusPage
from ringcomm.arrays.base import Bytes
from ringcomm.config import Settings
from ringcomm.engine.core.algorithm_choice import Selection
from ringcomm.engine.core.completion import Completion
from ringcomm.engine.core.layer_hooks import Extensions
from ringcomm.engine.core.pending_operations import Pending
from ringcomm.engine.core.usable_or_broken import EngineState
from ringcomm.engine.peers.tasks_outside_collectives import Conversations
from ringcomm.engine.progress.timeline import timeline_of
from ringcomm.transport.base import Transport
from ringcomm.transport.control_messages import Watch


class Topology(NamedTuple):
    """Place of a rank among the ranks of its host, and of that host among the hosts."""

    local_rank: int
    local_size: int
    cross_rank: int  # among the hosts that have this local_rank
    cross_size: int


class EngineContext:
    """All parts of an engine; the class Engine adds the submission of operations."""

    def __init__(
        self,
        transport: Transport,
        settings: Settings,
        topology: Topology | None = None,
        page: StatusPage | None = None,
    ) -> None:
        self.job_rank, self.job_size = transport.rank, transport.size
        self.topology = topology or Topology(self.job_rank, self.job_size, 0, 1)
        self.settings = settings
        self.transport = transport  # a service may use it only in poll()
        if transport.node is not None and settings.read_memory:
            transport.node.let_read()
        self.watch = Watch(transport)  # news of the other ranks
        self.selection = Selection(settings)
        self.page = page
        self.state = EngineState(self.watch)
        timeline = timeline_of(settings.timeline, self.job_rank, transport.view)
        # With this limit no two operations in flight have the same stream.
        self.pending = Pending(page, timeline, transport.tags.n_streams // 4)
        self.completion = Completion(self.watch, settings, self.state, self.pending)
        self.progress = self.completion.progress
        self.conversations = Conversations(self.job_rank, self.state, self.pending, self.completion)
        self.extensions = Extensions(self.pending, self.progress)

    def run_until(
        self,
        is_enough: Callable[[], bool],
        *,
        is_done: Callable[[], bool] | None = None,
        timeout_s: float = math.inf,
    ) -> None:
        """See Progress.run_until(). Raises RingcommError if the engine is unusable."""
        self.state.require_usable()
        self.progress.run_until(is_enough, is_done=is_done, timeout_s=timeout_s)
        if self.state.is_broken:
            raise self.state.copy_of_error()

    def shared_memory(self, nbytes: int) -> Bytes | None:
        self.state.require_own_process()
        node = self.transport.node
        return None if node is None else node.empty(nbytes)

    def shared_usage(self) -> tuple[int, int, int]:
        """Return bytes of shared memory: in use, kept for reuse, most in use at a time."""
        node = self.transport.node
        return (0, 0, 0) if node is None else node.memory.usage()

    def note_step(self, step: int) -> None:
        if self.page is not None:
            self.page.set_step(step)
