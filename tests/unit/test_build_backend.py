"""What `pip install .` does without a C++ compiler or Python's headers, and what it installs."""

import importlib.metadata
import subprocess
import sysconfig
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
build_backend = pytest.importorskip("build_backend", reason="needs the extra 'build'")


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Return a function that makes PATH hold these commands alone, and CXX be this."""

    def make(*commands, cxx=None):
        for name in commands:
            (tmp_path / name).write_text("#!/bin/sh\n")
            (tmp_path / name).chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.chdir(ROOT)
        monkeypatch.delenv("CXX", raising=False)
        if cxx is not None:
            monkeypatch.setenv("CXX", cxx)

    return make


@pytest.mark.parametrize("compiler", ["c++", "g++", "clang++"])
def test_a_compiler_on_path_is_used(machine, compiler):
    machine(compiler)
    assert "ziglang" not in build_backend.get_requires_for_build_wheel()


def test_cxx_is_used_as_it_is(machine):
    machine(cxx="/opt/new/g++ -m64")
    assert "ziglang" not in build_backend.get_requires_for_build_wheel()


@pytest.mark.parametrize("cxx", [None, ""])
def test_without_a_compiler_zig_is_required(machine, cxx):
    machine("gcc", cxx=cxx)  # a compiler of C is none of C++
    assert "ziglang" in build_backend.get_requires_for_build_wheel()
    assert "ziglang" in build_backend.get_requires_for_build_editable()


def test_zig_is_told_a_target_and_given_its_own_archiver(tmp_path, monkeypatch):
    monkeypatch.setenv("CMAKE_ARGS", "-DX=1")
    zig, folder = tmp_path / "a zig", tmp_path / "tools"
    zig.write_text('#!/bin/sh\necho "$@"\n')
    zig.chmod(0o755)
    made = build_backend.zig_environment(zig, folder, "x86_64-linux-gnu.2.28")
    assert made["CMAKE_ARGS"] == f"-DX=1 -DCMAKE_AR={folder}/ar -DCMAKE_RANLIB={folder}/ranlib"

    def says(tool):
        return subprocess.run([tool, "-x"], check=True, capture_output=True, text=True).stdout

    assert says(made["CXX"]) == "c++ -target x86_64-linux-gnu.2.28 -x\n"
    assert says(folder / "ar") == "ar -x\n"


def test_missing_headers_are_one_sentence_that_names_the_wheel(machine, monkeypatch, tmp_path):
    machine("g++")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / name))
    with pytest.raises(SystemExit) as ended:
        build_backend.build_wheel(str(tmp_path))
    assert "install a wheel of ringcomm" in ended.value.code
    assert "\n" not in ended.value.code


def test_the_installed_package_holds_programs_licences_and_one_version():
    package = importlib.metadata.distribution("ringcomm")
    names = {Path(str(each)).name for each in package.files}
    assert {"ringcomm-guardian", "ringcomm-launcher-door.so", "py.typed", "kernels.cu"} <= names
    licences = {each.name for each in ROOT.glob("licenses/*")}
    assert {"nanobind.LICENSE", "robin-map.LICENSE", "zig.LICENSE"} == licences
    assert licences | {"LICENSE", "uPlot.LICENSE"} <= names
    assert not {name for name in names if name.endswith((".hpp", ".cpp", ".a"))}
    import ringcomm

    assert package.version == ringcomm.__version__
    supported = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert package.metadata["Requires-Python"] == supported
