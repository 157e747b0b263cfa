"""Files of another user of this machine, who truly is another where root runs the tests."""

import os
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path

OTHER = 61234  # a user whom no machine has
IS_ROOT = os.geteuid() == 0
AS_ANOTHER = ["setpriv", f"--reuid={OTHER}", f"--regid={OTHER}", "--clear-groups"]


@contextmanager
def shared_folder(mode=0o1777):
    """Yield a folder that every user reaches; those of pytest are closed to others."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, mode)
        yield Path(name)


def write_as_another(path, data, monkeypatch, *, mode=0o644):
    """Let another user write a file. Without root's rights, this user becomes another instead."""
    program = f'cat >"$1"; chmod {mode:o} "$1"'
    subprocess.run(
        [*(AS_ANOTHER if IS_ROOT else []), "sh", "-c", program, "sh", path],
        input=data,
        check=True,
        timeout=120,
    )
    if not IS_ROOT:
        monkeypatch.setattr(os, "geteuid", lambda: OTHER)


def give_to_another(path, monkeypatch):
    """Let a path belong to another user, or without root's rights let this one be another."""
    if IS_ROOT:
        os.chown(path, OTHER, OTHER)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: OTHER)
