"""Reads what ranks and guardians record in the folder of a run, run_records.hpp. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from ringcomm.foreign_text import is_int64, is_number, parsed_json
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


_DEED: Final = re.compile(
    r"x rank .*?\(host .*?, pid [0-9]+\)(?:, [^,]+,)? (?:was )?(.*?)"
    r"(?:(?: \(| after step [0-9]| - exit ).*)?"
)


def deed_in(report: str) -> str:
    """Return what a rank did, as a guardian's report says: "raised ValueError"; "" without one."""
    found = _DEED.fullmatch((report.splitlines() or [""])[0])
    return found[1] if found else ""


@dataclass(frozen=True)
class GuardianFile:
    pid: int
    failures: tuple[RecordedFailure, ...] = ()
    notes: tuple[str, ...] = ()
    has_ended: bool = False
    is_damaged: bool = False  # what follows these records is none


_INT: Final = r"(-?[0-9]{1,19})"
_KINDS: Final = "|".join(Evidence)
_LINE: Final = re.compile(
    rf"(?P<pid>watches) {_INT}|(?P<end>end)|(?P<note>note) {_INT}"
    rf"|(?P<report>report) {_INT} {_INT} ({_KINDS}) {_INT} {_INT}".encode()
)


def parse_guardian_file(data: bytes) -> GuardianFile:
    """Return the content of a guardian's file; a last record that is not whole is left out."""
    pid, has_ended, is_damaged = 0, False, False
    failures, notes = [], []
    while b"\n" in data:
        line, data = data.split(b"\n", 1)
        found = _LINE.fullmatch(line)
        if found is None:
            is_damaged = True
            break
        name, *words = [each.decode() for each in found.groups() if each is not None]
        if name == "watches":
            pid = int(words[0])
            continue
        if name == "end":
            has_ended = True
            continue
        size = int(words[-1])
        is_damaged = size < 0
        if not 0 <= size <= len(data):
            break
        text, data = data[:size].decode(errors="replace"), data[size:]
        if name == "note":
            notes.append(text)
            continue
        rank, code, evidence, time_ns, _ = words
        failures.append(
            RecordedFailure(
                int(rank) if int(rank) >= 0 else None,
                int(code),
                Evidence(evidence),
                int(time_ns),
                text,
            )
        )
    return GuardianFile(pid, tuple(failures), tuple(notes), has_ended, is_damaged)


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


def parse_rank_end(data: bytes) -> RankEnd:
    """Return how far a rank came; a last line that is not whole is left out.

    Raises ValueError if another one is no record.
    """
    has_left, code, role = False, None, ""
    for line in data.split(b"\n")[:-1]:
        if line == b"left":
            has_left = True
        elif found := _EXIT.fullmatch(line):
            code = int(found[1])
        elif line.startswith(b"role "):
            role = line[5:].decode(errors="replace")
        elif line != b"began":
            raise ValueError("is no record of a rank's end")
    return RankEnd(has_left, code, role)


_EXIT: Final = re.compile(rb"exit ([0-9]{3})")


@dataclass(frozen=True)
class RunEnd:
    """How a run has ended, as its end.json says.

    Attributes:
        code: exit code of `ringcomm run`.
        what: in words.
        rank: the one that failed first, None if that is not known.
        report: the guardian's report about it, "" if there is none.
        exit_codes: of the ranks, by rank; None: that of one is not known.
        ended: when, as time_text() writes it; "": that is not known.
        seconds: how long it took; None: that is not known.
        lost: the ranks without which an elastic job went on, and what they did.
    """

    code: int
    what: str
    rank: int | None
    report: str
    exit_codes: dict[int, int | None]
    ended: str = ""
    seconds: float | None = None
    lost: dict[int, str] = field(default_factory=dict)


_RANK: Final = re.compile("[0-9]{1,9}")


def parse_run_end(data: bytes) -> RunEnd:
    """Return what end.json says. Raises ValueError if it is none."""
    content = parsed_json(data)
    try:
        code, what, rank, report, codes = (
            content[name] for name in ("code", "what", "rank", "report", "exit_codes")
        )
        is_right = (
            is_int64(code)
            and isinstance(what, str)
            and (rank is None or is_int64(rank))
            and isinstance(report, str)
            and all(map(_RANK.fullmatch, codes))
            and all(each is None or is_int64(each) for each in codes.values())
        )
    except (LookupError, TypeError, AttributeError):
        is_right = False
    if not is_right:
        raise ValueError("is no record of a run's end")
    found = {int(each): n for each, n in codes.items()}
    ended, seconds = content.get("ended"), content.get("seconds")
    lost = _texts(content.get("lost"))
    return RunEnd(
        code, what, rank, report, found,
        ended if isinstance(ended, str) else "",
        seconds if is_number(seconds) and seconds >= 0 else None,
        {int(rank): deed for rank, deed in lost.items() if _RANK.fullmatch(rank)},
    )  # fmt: skip


_PARAMETER: Final = "RINGCOMM_PARAM_"


@dataclass(frozen=True)
class RunConfig:
    """What run.json says of a run; what it does not say is empty.

    Attributes:
        program: the command of a rank.
        ranks: how many; None: that is not known.
        started: when, as time_text() writes it.
        working_folder: path of that in which the run was started.
        host: on which.
        pid: of `ringcomm run` there; 0: that is not known.
        commit: of the git repository in which it was started; "": there is none.
        versions: of Python, MPI and packages.
        parameters: of rc.Params, by variables: name and value.
    """

    program: tuple[str, ...] = ()
    ranks: int | None = None
    started: str = ""
    working_folder: str = ""
    host: str = ""
    pid: int = 0
    commit: str = ""
    versions: tuple[tuple[str, str], ...] = ()
    parameters: tuple[tuple[str, str], ...] = ()


def parse_run_config(data: bytes) -> RunConfig:
    """Return what run.json says; what has another type than it should is left out.

    Raises ValueError if it is no JSON object.
    """
    content: Any = parsed_json(data)
    if not isinstance(content, dict):
        raise ValueError("is no configuration of a run")
    texts = {name: text for name, text in content.items() if isinstance(text, str)}
    counts = {name: n for name, n in content.items() if is_int64(n) and n > 0}
    program: Any = content.get("program")
    given = {**_texts(content.get("settings")), **_texts(content.get("variables"))}
    parameters = {
        name.removeprefix(_PARAMETER).lower(): value
        for name, value in given.items()
        if name.startswith(_PARAMETER)
    }
    are_words = isinstance(program, list) and all(isinstance(each, str) for each in program)
    return RunConfig(
        tuple(program) if are_words else (),
        counts.get("ranks"),
        texts.get("started", ""),
        texts.get("working_folder", ""),
        texts.get("host", ""),
        counts.get("pid", 0),
        texts.get("commit", ""),
        tuple(_texts(content.get("versions")).items()),
        tuple(parameters.items()),
    )


def _texts(content: Any) -> dict[str, str]:
    found = content.items() if isinstance(content, dict) else ()
    return {name: text for name, text in found if isinstance(text, str)}
