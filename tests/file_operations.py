"""Sees each operation that changes files, in whatever thread: what a kill at any moment leaves.

A profile function hears of each call of a function in C, so the code that is watched is as it is.
"""

import contextlib
import io
import os
import sys
import threading

CHANGES = {
    "chmod", "fsync", "ftruncate", "link", "mkdir", "open", "remove", "rename", "replace", "rmdir",
    "truncate", "unlink",
}  # fmt: skip
OF_FILES = {"write", "flush", "close"}


@contextlib.contextmanager
def watched(at):
    """Call at(name) before and after each operation of this thread and of those that begin here.

    From before an operation until after it, no other begins.
    """
    lock = threading.RLock()

    def hear(_frame, event, function):
        if not event.startswith("c_") or not _changes_files(function):
            return
        if event == "c_call":
            lock.acquire()
        try:
            sys.setprofile(None)
            at(function.__name__)
        finally:
            sys.setprofile(hear)
            if event != "c_call":
                lock.release()

    threading.setprofile(hear)
    sys.setprofile(hear)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def _changes_files(function):
    if isinstance(getattr(function, "__self__", None), io.BufferedWriter):
        return function.__name__ in OF_FILES
    return function.__name__ in CHANGES and function.__module__ in ("posix", "io", "_io")


class Disk:
    """The files of a folder, and what would be left of them if power failed.

    What was not flushed to disk is lost then. That names of files are lost, too, is left out.
    """

    def __init__(self, folder, monkeypatch):
        self._folder = folder
        self._flushed = {}  # bytes that are on disk, by file

        def fsync(descriptor):  # it only notes what would be on disk: that takes no time
            found = os.stat(descriptor)
            self._flushed[found.st_ino] = found.st_size

        monkeypatch.setattr(os, "fsync", fsync)

    def files(self):
        """Return the bytes of each file, and those that are left if power fails."""
        found = {}
        for path in sorted(self._folder.rglob("*")):
            if path.is_file():
                content, n = path.read_bytes(), self._flushed.get(path.stat().st_ino, 0)
                found[path.relative_to(self._folder)] = content, content[:n]
        return found
