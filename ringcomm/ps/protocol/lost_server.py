"""What is lost with a server that died, and the error that says so."""

from __future__ import annotations

from typing import Final, NamedTuple

from ringcomm.errors import ServerLostError

_SHOWN: Final = 8  # tables in an error


class Loss(NamedTuple):
    """A server that died, and what it had alone.

    Attributes:
        server: its number.
        rank: in the job.
        name: of that rank.
        how: it died.
        tables: of which it had a part.
        copies: so many there were of what it had; the other one is lost, too.
    """

    server: int
    rank: int
    name: str
    how: str
    tables: tuple[str, ...]
    copies: int = 1

    def error(self, label: str) -> ServerLostError:
        shown = ", ".join(self.tables[:_SHOWN]) + ", ..." * (len(self.tables) > _SHOWN)
        what = f"its part of {shown}" if self.tables else "what it had of the tables"
        lost = "is lost, with its copy" if self.copies > 1 else "is lost"
        then = (
            "call ps.recover(path) on every worker, which goes back to the newest checkpoint, or "
            "end this job"
        )
        return ServerLostError(
            f"{label}: server {self.server} ({self.name}) {self.how}, and {what} {lost}. The "
            f"other servers go on, but calls for tables do not: {then}",
            rank=self.rank,
            reason=self.how,
        )
