"""ci/wheels names wheels as pip reads them, and builds again exactly what has changed."""

import importlib.machinery
import importlib.util
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
loader = importlib.machinery.SourceFileLoader("wheels", str(ROOT / "ci/wheels"))
wheels = importlib.util.module_from_spec(importlib.util.spec_from_loader("wheels", loader))
sys.modules["wheels"] = wheels  # dataclasses look themselves up
loader.exec_module(wheels)

OLD, NEW = (wheels.Python("python", (3, minor), "/include") for minor in (11, 14))


def test_a_wheel_for_311_and_one_of_the_stable_abi_for_all_newer_versions():
    assert (OLD.tag, OLD.extension) == ("cp311-cp311", "cpython-311")
    assert (NEW.tag, NEW.extension) == ("cp312-abi3", "abi3")
    assert wheels.tag_of("aarch64") == "manylinux_2_28_aarch64"


def test_of_many_interpreters_one_makes_each_wheel(monkeypatch):
    have = {"a": (3, 13), "b": (3, 11), "c": (3, 14), "d": (3, 11)}
    monkeypatch.setattr(wheels.shutil, "which", lambda name: name)
    monkeypatch.setattr(wheels, "asked", lambda name: wheels.Python(name, have[name], ""))
    assert [each.path for each in wheels.chosen(["a", "b", "c", "d"])] == ["b", "c"]
    assert [each.path for each in wheels.chosen(["a"])] == ["a"]


def test_without_a_newer_python_there_is_one_sentence(monkeypatch):
    monkeypatch.setattr(wheels.shutil, "which", lambda name: name)
    monkeypatch.setattr(wheels, "asked", lambda name: wheels.Python(name, (3, 11), ""))
    with pytest.raises(SystemExit, match=r"3\.12 or newer with its headers is missing"):
        wheels.chosen(None)


def test_a_wheel_is_built_again_if_a_source_an_interpreter_or_a_tool_has_changed(
    monkeypatch, tmp_path
):
    for each in wheels.SOURCES:
        wheels.copy(ROOT / each, tmp_path / each)
    monkeypatch.setattr(wheels, "ROOT", tmp_path)
    tools = Path("tools-1")

    def digest(*arguments):
        return wheels.digest_of_sources(*arguments)

    first = digest(tools, OLD, "x86_64")
    assert first == digest(tools, OLD, "x86_64")
    (tmp_path / "ringcomm/__pycache__").mkdir()
    (tmp_path / "ringcomm/__pycache__/x.pyc").touch()
    (tmp_path / "ringcomm/_core.so").touch()
    assert first == digest(tools, OLD, "x86_64")
    others = [(Path("tools-2"), OLD, "x86_64"), (tools, NEW, "x86_64"), (tools, OLD, "aarch64")]
    assert len({first, *(digest(*each) for each in others)}) == 4
    with (tmp_path / "csrc/module.cpp").open("a") as file:
        file.write("//\n")
    changed = digest(tools, OLD, "x86_64")
    shutil.move(tmp_path / "csrc/module.cpp", tmp_path / "csrc/other.cpp")
    assert len({first, changed, digest(tools, OLD, "x86_64")}) == 3
