"""The modes of a table, sync, async, SSP and FirstOf: when pushes become updates."""

from __future__ import annotations

from dataclasses import dataclass

from ringcomm.integers import is_integer


@dataclass(frozen=True)
class Mode:
    """How pushes become updates: "sync" and "async" in a user's words, or SSP and FirstOf.

    Attributes:
        name: sync, async, ssp or first_of.
        bound: s of SSP, k of FirstOf.
    """

    name: str
    bound: int = 0

    def __str__(self) -> str:
        names = {"ssp": f"SSP({self.bound})", "first_of": f"FirstOf({self.bound})"}
        return names.get(self.name, repr(self.name))

    @property
    def has_rounds(self) -> bool:
        """True if an update is the mean over several workers."""
        return self.name in ("sync", "first_of")


def SSP(staleness: int) -> Mode:
    """Return bounded staleness: no worker is more than `staleness` steps ahead of the slowest."""
    if not is_integer(staleness) or staleness < 0:
        raise ValueError(f"SSP takes a number of steps >= 0, not {staleness!r}")
    return Mode("ssp", int(staleness))


def FirstOf(k: int) -> Mode:
    """Return rounds that consist of the first k gradients; later ones are dropped.

    A gradient has come once all of its blocks have been pushed, of the table or of all tables of an
    optimizer. It counts in all of them or in none.
    """
    if not is_integer(k) or k < 1:
        raise ValueError(f"FirstOf takes a number of workers >= 1, not {k!r}")
    return Mode("first_of", int(k))


def mode_of(mode: str | Mode) -> Mode:
    """Return the mode for the user's argument `mode`. Raises ValueError."""
    if isinstance(mode, Mode):
        return mode
    if mode not in ("sync", "async"):
        raise ValueError(
            f"mode is {mode!r}; it must be 'sync', 'async', ps.SSP(s) or ps.FirstOf(k)"
        )
    return Mode(mode)
