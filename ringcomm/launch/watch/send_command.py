"""Puts a command into the mailbox of a live job, and waits for the answer."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ringcomm._core import StatusPage
from ringcomm.engine.control.commands import Command
from ringcomm.launch.watch.find_ranks import Ranks
from ringcomm.launch.watch.rank_rows import RankSample
from ringcomm.status.page_enums import Mail

_TICK_S: Final = 0.01


@dataclass(frozen=True)
class CommandOutcome:
    is_done: bool
    text: str


def choose_job(samples: Sequence[RankSample], job: str) -> list[RankSample]:
    """Return the live ranks of the only job whose name begins so.

    Raises LookupError if there is none, or more than one.
    """
    live = [each for each in samples if not each.is_over and each.job.startswith(job)]
    jobs = sorted({each.job for each in live})
    if len(jobs) == 1:
        return live
    if not jobs:
        what = f"live job {job!r}" if job else "live job"
        raise LookupError(f"there is no {what} of this user on this host")
    raise LookupError(f"several live jobs fit: {', '.join(jobs)}. Name one")


def ask(
    ranks: Ranks, members: Sequence[RankSample], command: Command, limit_s: float
) -> CommandOutcome:
    """Give a command to a job; return what became of it, at the latest after limit_s.

    Args:
        ranks: the ranks of this host.
        members: live ranks of the job.
        command: what the job shall do.
        limit_s: how long it may take until the ranks have come to a step boundary.
    """
    taking = [each for each in members if each.page["takes_commands"]]
    if not taking:
        return CommandOutcome(
            False,
            "this job has not come to a step boundary. It needs a DistributedOptimizer, or one "
            "rc.step() per training step",
        )
    here = [each for each in taking if ranks.has(each)]
    if not here:
        hosts = ", ".join(sorted({str(each.page["host"]) for each in taking}))
        return CommandOutcome(False, f"no rank on this host takes commands: give it on {hosts}")
    asked = here[0]
    deadline = time.monotonic() + limit_s
    with contextlib.suppress(OSError), _mailbox(ranks, asked, deadline) as page:
        if page is None:
            return CommandOutcome(False, "another command waits for its answer")
        page.put_command(command.text)
        return _await(page, asked, deadline, limit_s)
    return CommandOutcome(False, f"rank {asked.rank} has ended")


@contextlib.contextmanager
def _mailbox(ranks: Ranks, asked: RankSample, deadline: float) -> Iterator[StatusPage | None]:
    """Yield the page of a rank whose mailbox is this process's; None if others use it too long."""
    page = ranks.page_to_ask(asked)
    while not page.take_mailbox(os.getpid()):
        if time.monotonic() >= deadline:
            yield None
            return
        time.sleep(_TICK_S)  # nobody tells of the end of another `ringcomm ctl`
    try:
        yield page
    finally:
        page.give_mailbox_back()


def _await(page: StatusPage, asked: RankSample, deadline: float, limit_s: float) -> CommandOutcome:
    while page.mail != Mail.ANSWERED:
        if not Path(f"/proc/{asked.page['pid']}/fd").exists():
            return CommandOutcome(False, f"rank {asked.rank} ended before it answered")
        if time.monotonic() >= deadline and page.withdraw_command():
            return CommandOutcome(
                False,
                f"rank {asked.rank} has not come to a step boundary within {limit_s:g} s, so the "
                "command is withdrawn. `ringcomm top` names the rank for which the others wait, if "
                "there is one; `ringcomm stacks` shows where each is",
            )
        if time.monotonic() >= deadline and page.mail == Mail.TAKEN:
            return CommandOutcome(
                False,
                f"not all ranks have come to a step boundary within {limit_s:g} s. They will "
                "take the command when they do. See `ringcomm top`",
            )
        time.sleep(_TICK_S)  # the job tells nobody of its answer
    verdict, _, text = page.answer.partition(" ")
    return CommandOutcome(verdict == "ok", text)
