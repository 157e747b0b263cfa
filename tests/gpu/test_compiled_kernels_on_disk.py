"""Compiled kernels that the next process finds in the user's cache."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ringcomm.config import kernel_folder
from ringcomm.gpu.kernels.kernel_cache import compiled_once

KEY = ("source", "--std=c++17", "sm_90")


def compile_to(code, folder, key=KEY):
    """Return the code that was found or compiled, and how often it was compiled."""
    n_compiled = []
    return compiled_once(folder, key, lambda: n_compiled.append(1) or code), len(n_compiled)


def test_a_kernel_is_compiled_once(tmp_path):
    folder = tmp_path / "ringcomm" / "kernels"
    assert compile_to(b"cubin", folder) == (b"cubin", 1)
    assert compile_to(b"other", folder) == (b"cubin", 0)
    assert len(list(folder.iterdir())) == 1


@pytest.mark.parametrize(
    "key",
    [("source ", *KEY[1:]), (*KEY[:2], "sm_100"), (*KEY, "-DX=1"), ("source--std=c++17", "sm_90")],
)
def test_another_source_option_or_gpu_has_a_kernel_of_its_own(key, tmp_path):
    compile_to(b"cubin", tmp_path)
    assert compile_to(b"other", tmp_path, key) == (b"other", 1)
    assert compile_to(b"", tmp_path) == (b"cubin", 0)


@pytest.mark.parametrize(
    "harm", [lambda x: x[:-1], lambda x: x[:9], lambda x: x + b"!", lambda _: b""]
)
def test_a_damaged_file_is_written_anew(harm, tmp_path):
    compile_to(b"cubin", tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_bytes(harm(path.read_bytes()))
    assert compile_to(b"again", tmp_path) == (b"again", 1)
    assert compile_to(b"", tmp_path) == (b"again", 0)


def test_files_that_no_process_uses_any_more_are_removed(tmp_path):
    keys = [(*KEY, f"-DX={n}") for n in range(4)]
    for key in keys[:3]:
        compile_to(b"cubin", tmp_path, key)
    cut, others = tmp_path / ".0a-x.tmp", tmp_path / "notes"
    cut.write_bytes(b"half")
    others.write_bytes(b"not ours")
    for path in tmp_path.iterdir():
        os.utime(path, (0, 0))
    assert compile_to(b"", tmp_path, keys[0]) == (b"cubin", 0)  # is in use
    compile_to(b"cubin", tmp_path, keys[3])
    assert not cut.exists()
    assert others.exists()
    assert [compile_to(b"new", tmp_path, key)[1] for key in keys] == [0, 1, 1, 0]


def test_a_folder_that_another_process_cleans_is_no_error(tmp_path, monkeypatch):
    compile_to(b"cubin", tmp_path)
    (old,) = tmp_path.iterdir()
    os.utime(old, (0, 0))
    unlink = Path.unlink

    def be_late(path):
        unlink(path)
        unlink(path)

    monkeypatch.setattr(Path, "unlink", be_late)
    assert compile_to(b"other", tmp_path, (*KEY, "-DX=1")) == (b"other", 1)
    assert not old.exists()


def test_a_kernel_that_cannot_be_marked_as_used_is_used(tmp_path, monkeypatch):
    compile_to(b"cubin", tmp_path)

    def refuse(*_):
        raise PermissionError("a folder of another user")

    monkeypatch.setattr(os, "utime", refuse)
    assert compile_to(b"other", tmp_path) == (b"cubin", 0)


def test_a_place_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    for folder in (None, tmp_path / "file" / "kernels"):
        assert [compile_to(b"cubin", folder) for _ in range(2)] == [(b"cubin", 1)] * 2


def test_the_folder_is_in_the_cache_of_the_user(tmp_path):
    assert kernel_folder({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "ringcomm" / "kernels"


NVRTC = """
import os
getSupportedArchs, NVRTCError, destroyProgram = lambda: [90], RuntimeError, lambda _: None
getVersion = lambda: (13, int(os.environ["MINOR"]))
createProgram = lambda *_: []
def compileProgram(program, options):
    print("compiled", options[-1])
getCUBIN = getPTX = lambda program: b"code"
"""
SCRIPT = """
from ringcomm.gpu.kernels.compiling import compile_for
assert compile_for(90, ("-DA=1",)) == compile_for(100, ("-DA=1",)) == b"code"
"""


def test_another_process_compiles_with_another_compiler_alone(tmp_path):
    (tmp_path / "cupy" / "cuda").mkdir(parents=True)
    (tmp_path / "cupy" / "__init__.py").write_text("")
    (tmp_path / "cupy" / "cuda" / "__init__.py").write_text("from cupy.cuda import nvrtc")
    (tmp_path / "cupy" / "cuda" / "nvrtc.py").write_text(NVRTC)
    said = []
    for minor in "001":
        paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
        known = {"PYTHONPATH": paths, "XDG_CACHE_HOME": str(tmp_path), "MINOR": minor}
        command = [sys.executable, "-c", SCRIPT]
        said.append(subprocess.check_output(command, env=os.environ | known, text=True, cwd="/"))
    both = "compiled --gpu-architecture=sm_90\ncompiled --gpu-architecture=compute_90\n"
    assert said == [both, "", both]
