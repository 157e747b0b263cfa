"""The part of the engine that control uses."""

from __future__ import annotations

from typing import Protocol

from ringcomm._core import StatusPage
from ringcomm.config import Settings
from ringcomm.engine.core.layer_hooks import Extensions
from ringcomm.engine.core.pending_operations import Pending
from ringcomm.engine.peers.drive_until import Driving
from ringcomm.engine.peers.groups import Groups
from ringcomm.transport.base import Transport


class ControlledEngine(Driving, Protocol):
    job_rank: int
    page: StatusPage | None
    settings: Settings
    pending: Pending
    transport: Transport
    groups: Groups
    extensions: Extensions

    def note_step(self, step: int) -> None: ...
