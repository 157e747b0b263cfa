"""What is compiled calls no function that the oldest supported C library lacks."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from ringcomm import _core

OLDEST = (2, 28)  # manylinux_2_28
# Newer versions of what 2.28 has as well, and what the compiler's own headers choose by the library
# they find: a build against 2.28 takes the older ones.
CHOSEN_BY_BUILD = re.compile(
    r"(fstat|stat|lstat|pow|exp|log|exp2|log2|powf|expf|logf|fmod|fmodf|__isoc23_\w+|dl\w+"
    r"|pthread_\w+|sem_\w+|__libc_start_main|__libc_single_threaded|_dl_find_object)$"
)


@pytest.mark.parametrize("name", [Path(_core.__file__).name, "ringcomm-guardian"])
def test_nothing_newer_than_the_oldest_c_library_is_called(name):
    if shutil.which("objdump") is None:
        pytest.skip("no objdump here (binutils)")
    symbols = subprocess.run(
        ["objdump", "-T", Path(_core.__file__).with_name(name)],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout
    found = re.findall(r"\(GLIBC_(\d+)\.(\d+)[.\d]*\)\s+(\S+)", symbols)
    assert found
    newer = {call for major, minor, call in found if (int(major), int(minor)) > OLDEST}
    assert [call for call in sorted(newer) if not CHOSEN_BY_BUILD.match(call)] == []
