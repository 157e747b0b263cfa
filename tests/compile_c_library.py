"""Libraries that stand in for those of a driver that is not here."""

import shutil
import subprocess

import pytest


def compile_library(source, path, *flags):
    """Compile a library of C, and return its path; skip the test if there is no compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    path.parent.mkdir(parents=True, exist_ok=True)
    command = [compiler, "-shared", "-fPIC", *flags, "-x", "c", "-", "-o", str(path)]
    subprocess.run(command, input=source, text=True, check=True)
    return path
