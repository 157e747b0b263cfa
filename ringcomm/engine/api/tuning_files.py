"""The files of `ringcomm tune`: one table per topology and MPI implementation."""

from __future__ import annotations

import logging
import os
import re
from typing import TYPE_CHECKING

from ringcomm._version import __version__
from ringcomm.atomic_files import replacing
from ringcomm.collectives.measured_times import TimeTable
from ringcomm.collectives.ranks_by_host import describe
from ringcomm.config import Settings, tuning_folder
from ringcomm.errors import ConfigError
from ringcomm.foreign_text import printable
from ringcomm.regular_files import BrokenFileError, read_regular
from ringcomm.transport.base import Transport

if TYPE_CHECKING:
    from pathlib import Path

_log = logging.getLogger("ringcomm")


def load(settings: Settings, transport: Transport) -> str:
    """Return the text of this topology's table. If it cannot be used, warn and return ""."""
    layout = describe(transport.nodes)
    path = table_path(settings, layout, transport.implementation)
    if path is None:
        return ""
    try:
        text = read_regular(path).decode()
        problem = _problem(TimeTable.loads(text), layout, transport.implementation)
    except FileNotFoundError:
        if settings.tuning:
            _log.warning(
                "RINGCOMM_TUNING: %s holds no table for %s over %s yet; algorithms are chosen by "
                "estimate. `ringcomm run -np %d ringcomm tune` writes one.",
                os.path.dirname(path),
                layout,
                transport.implementation,
                transport.size,
            )
        return ""
    except UnicodeDecodeError as error:
        problem = f"it is no text: {error}"
    except (OSError, BrokenFileError, ValueError) as error:
        problem = f"it {error}" if isinstance(error, BrokenFileError) else str(error)
    if problem:
        _log.warning(
            "%s is ignored: %s. `ringcomm run -np %d ringcomm tune` writes it anew.",
            path,
            printable(problem),
            transport.size,
        )
        return ""
    return text


def save(settings: Settings, table: TimeTable) -> Path:
    """Write the table where load() finds it, as a whole or not at all, and return the path.

    Raises ConfigError if the folder cannot be written.
    """
    path = require_place(settings, table.layout, table.implementation)
    with replacing(path) as file:
        file.write(table.dumps().encode())
    return path


def require_place(settings: Settings, layout: str, implementation: str) -> Path:
    """Return the path of a table. Raises ConfigError if a file cannot be written there."""
    import tempfile  # these take 10 ms, which a rank saves
    from pathlib import Path

    found = table_path(settings, layout, implementation)
    advice = "Set RINGCOMM_TUNING to a folder that this user can write"
    if found is None:
        raise ConfigError(f"no home: HOME is not set, and user {os.getuid()} has none. {advice}")
    path = Path(found)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ConfigError(f"cannot write to {path.parent}: {error.strerror}. {advice}") from error
    return path


def table_path(settings: Settings, layout: str, implementation: str) -> str | None:
    """Return the path of the table for an MPI implementation and a layout of ranks over hosts.

    None if there is no folder for it, because the user has no home.
    """
    key = f"{layout} {implementation}"
    name = re.sub(r"[^a-z0-9.]+", "-", key.lower())
    if len(name) > 100:
        import hashlib  # here, or `import ringcomm` would load OpenSSL, too (5 ms)

        name = f"{name[:80]}-{hashlib.blake2b(key.encode(), digest_size=8).hexdigest()}"
    folder = tuning_folder(settings)
    return None if folder is None else os.path.join(folder, f"{name}.json")


def _problem(table: TimeTable, layout: str, implementation: str) -> str:
    found = (table.layout, table.implementation, f"ringcomm {table.version}")
    here = (layout, implementation, f"ringcomm {__version__}")
    pairs = zip(found, here, strict=True)
    return "; ".join(f"it was measured with {a}, and this job has {b}" for a, b in pairs if a != b)
