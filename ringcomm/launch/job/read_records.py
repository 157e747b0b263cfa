"""Reads what ranks and guardians record in the folder of a run, run_records.hpp. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ringcomm.status.page_enums import RESERVE, SPARE


class Evidence(StrEnum):
    """By what a guardian knows of a failure, the surest sign that it came first at the front.

    report.hpp says what each is.
    """

    ABORT = "abort"
    OWN = "own"
    KILLED = "killed"
    SILENT = "silent"
    ASKED = "asked"
    MPI = "mpi"


@dataclass(frozen=True)
class RecordedFailure:
    """A guardian's report: the first failure on its node."""

    rank: int | None  # None: nobody failed; the ranks were ended from outside
    code: int  # the exit code that it gives to the job; 0: not known
    evidence: Evidence
    time_ns: int  # when it failed, since 1970, by the clock of its host
    text: str  # "": the one before it names this rank, too


@dataclass(frozen=True)
class GuardianFile:
    pid: int
    failures: tuple[RecordedFailure, ...] = ()
    notes: tuple[str, ...] = ()
    has_ended: bool = False


def parse_guardian_file(data: bytes) -> GuardianFile:
    """Return the content of a guardian's file; a record that is not whole is left out."""
    pid, has_ended = 0, False
    failures, notes = [], []
    while b"\n" in data:
        line, data = data.split(b"\n", 1)
        match line.decode().split():
            case ["watches", number]:
                pid = int(number)
            case ["report", number, code, evidence, time_ns, size] if len(data) >= int(size):
                text, data = data[: int(size)].decode(errors="replace"), data[int(size) :]
                rank = int(number) if int(number) >= 0 else None
                failures.append(
                    RecordedFailure(rank, int(code), Evidence(evidence), int(time_ns), text)
                )
            case ["note", size] if len(data) >= int(size):
                notes.append(data[: int(size)].decode(errors="replace"))
                data = data[int(size) :]
            case ["end"]:
                has_ended = True
            case _:
                break
    return GuardianFile(pid, tuple(failures), tuple(notes), has_ended)


@dataclass(frozen=True)
class RankEnd:
    has_left: bool = False  # it called shutdown(), and so did all others
    code: int | None = None  # of its exit; None: it has not exited, or was killed
    role: str = ""  # as on its status page: "worker", "server 0", "spare"; "" and "rank 3" train

    @property
    def is_worker(self) -> bool:
        return self.role.partition(" ")[0] in ("", "rank", "worker")

    @property
    def may_train(self) -> bool:
        return self.is_worker or self.role in (SPARE, RESERVE)


def parse_rank_end(text: str) -> RankEnd:
    lines = text.splitlines()
    codes = [line.removeprefix("exit ") for line in lines if line.startswith("exit ")]
    roles = [line.removeprefix("role ") for line in lines if line.startswith("role ")]
    return RankEnd("left" in lines, int(codes[-1]) if codes else None, roles[-1] if roles else "")
