"""A filter of system calls (seccomp), as those of containers and sandboxes."""

import ctypes
import errno
import os
import platform
import struct

_IS_X86 = platform.machine() == "x86_64"
PROCESS_VM_READV = 310 if _IS_X86 else 270
MEMFD_CREATE = 319 if _IS_X86 else 279

_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_NO_NEW_PRIVILEGES, _SET_SECCOMP, _FILTER = 38, 22, 2


def refuse(number, error=errno.EPERM):
    """Make a system call fail in this thread and its children, for good, whatever they execute.

    Raises OSError if there is no seccomp here.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    program = b"".join(
        struct.pack("HBBI", *each)
        for each in [
            (_LOAD, 0, 0, 0),  # the number of the call
            (_JUMP_IF_EQUAL, 0, 1, number),
            (_RETURN, 0, 0, _ERRNO | error),
            (_RETURN, 0, 0, _ALLOW),
        ]
    )
    code = ctypes.create_string_buffer(program)
    filters = ctypes.create_string_buffer(struct.pack("HxxxxxxP", 4, ctypes.addressof(code)))
    is_set = libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) == 0
    if not is_set or libc.prctl(_SET_SECCOMP, _FILTER, filters, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
