"""The error of what every rank must take part in, while some are in join()."""

from __future__ import annotations

from collections.abc import Sequence

from ringcomm.errors import MismatchError


def require_nobody_in_join(
    caller: str,
    gathered: Sequence[object],
    ranks: Sequence[int],
    *,
    must: str = "take part",
    advice: str = "Do it before the first rank calls join(), or after join() has returned",
) -> None:
    """Raise MismatchError if some of the ranks are in join(): `gathered` has None for them."""
    joined = [rank for rank, each in zip(ranks, gathered, strict=True) if each is None]
    if joined:
        raise MismatchError(
            f"{caller}: ranks {joined} are in join(), and every rank must {must}. {advice}"
        )
