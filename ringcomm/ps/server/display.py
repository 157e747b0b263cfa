"""Shows what a server has and does on the status page of its rank, for `ringcomm top`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from ringcomm.ps.server.busy_time import OwnTime
from ringcomm.status.page_enums import BUSY

if TYPE_CHECKING:
    from ringcomm._core import StatusPage

_SHOWN_S: Final = 1.0  # between two looks that others may have at a server


class Display:
    """What others see of a server.

    Attributes:
        page: the status page of this rank, if it has one.
        own_time: how long this process has worked on requests.
    """

    def __init__(self) -> None:
        self.page: StatusPage | None = None
        self.own_time = OwnTime()
        self._shows_at = 0.0

    def show(self, counts: Callable[[], Mapping[str, int]]) -> None:
        """Write the counts to the page, if that is due: once per second."""
        if self.page is None or time.monotonic() < self._shows_at:
            return
        self._shows_at = time.monotonic() + _SHOWN_S
        for name, value in counts().items():
            self.page.log_scalar(name, -1, float(value))
        self.page.log_scalar(BUSY, -1, self.own_time.total_ns / 1e9)
