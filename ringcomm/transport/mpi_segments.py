"""The files by which the ranks of a host share MPI's own memory: nobody else may have made them.

Open MPI opens its file in /dev/shm without O_EXCL (5.0.11), and others can know the name before.
So who has made it first can read, and change, all that ranks send by it, also what they unpickle.
Where the kernel forbids such an open (sysctl fs.protected_regular), MPI does not start instead.
"""

from __future__ import annotations

import os
import re
import stat
from typing import Final

from ringcomm.system_text import read_text

_FOLDER: Final = "/dev/shm/"
_MAPS: Final = "/proc/self/maps"
_SEGMENT: Final = re.compile(r"/(?:sm|vader)_segment\.[^/]*$")
# Of a line of /proc/PID/maps, for memory that is shared: inode and path.
_SHARED: Final = re.compile(r"^\S+ \S\S\Ss \S+ \S+ (\d+) +(/.*)$", re.MULTILINE)


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
        return f"MPI's memory in {_FOLDER} has lost its name"
    return ""


def _distrust(path: str, inode: str, *, is_segment: bool) -> str:
    if not is_segment and not path.startswith(_FOLDER):
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
