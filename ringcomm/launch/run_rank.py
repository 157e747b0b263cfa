"""The program of a rank of run(): calls the function, and writes a report to a file."""

from __future__ import annotations

import pickle
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ringcomm.atomic_files import replacing
from ringcomm.errors import PeerFailedError
from ringcomm.launched.launcher import launched_rank
from ringcomm.regular_files import BrokenFileError, with_checksum, without_checksum
from ringcomm.status.error_text import text_of_error
from ringcomm.trusted_files import read_trusted

CALL: Final = "call"


@dataclass(frozen=True)
class RankReport:
    result: bytes = b""  # pickled; empty after an error
    error: str = ""  # the traceback, without ringcomm's frames
    reason: str = ""  # the error in one line
    exception: bytes = b""  # pickled; empty if that is impossible
    blames: tuple[int, str] | None = None  # another rank that failed first, and how
    is_about_sending: bool = False  # the call or the result cannot be pickled
    time_s: float = 0.0  # when the error came, by this machine's clock


def main(folder: str) -> None:
    """Make the call that the folder has, write this rank's report there, and reraise its error."""
    path = report_path(Path(folder), launched_rank())
    try:
        func, args, kwargs = _loaded(_call_in(Path(folder, CALL)))
        result = func(*args, **kwargs)
        _write(path, RankReport(result=_packed(result)))
    except BaseException as error:
        if not isinstance(error, SystemExit) or error.code:
            _write(path, _failure(error))
        raise


def report_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}"


def dumps() -> tuple[Callable[[Any], bytes], bool]:
    """Return the function that pickles, and True if it is pickle's, False if cloudpickle's."""
    try:
        import cloudpickle  # type: ignore[import-untyped,unused-ignore]
    except ModuleNotFoundError:
        return pickle.dumps, True
    return cloudpickle.dumps, False


def _call_in(path: Path) -> bytes:
    try:
        return without_checksum(read_trusted(path))
    except BrokenFileError as error:
        raise BrokenFileError(f"{path} {error}") from error


class _SendingError(TypeError):
    pass


def _loaded(call: bytes) -> Any:
    try:
        return pickle.loads(call)
    except Exception as error:
        raise _SendingError(
            f"the function cannot be made here, {type(error).__name__}: {error}. Define it in a "
            "module that the ranks can import, or in the notebook"
        ) from error


def _packed(result: Any) -> bytes:
    pack, _ = dumps()
    try:
        return pack(result)
    except Exception as error:
        raise _SendingError(
            f"returned a {type(result).__name__}, which cannot be sent: {error}"
        ) from error


def _failure(error: BaseException) -> RankReport:
    is_about_sending = isinstance(error, _SendingError)
    words = "".join(traceback.format_exception_only(error)).strip()
    return RankReport(
        error=text_of_error(error),
        reason=str(error) if is_about_sending else f"raised {words}",
        exception=_pickled(error),
        blames=(error.rank, error.reason) if isinstance(error, PeerFailedError) else None,
        is_about_sending=is_about_sending,
        time_s=time.monotonic(),
    )


def _pickled(error: BaseException) -> bytes:
    pack, _ = dumps()
    try:
        packed = pack(error)
        pickle.loads(packed)
    except Exception:  # noqa: BLE001 - the report has the traceback, too
        return b""
    return packed


def _write(path: Path, report: RankReport) -> None:
    with replacing(path, mode=0o600) as file:
        file.write(with_checksum(pickle.dumps(report)))
