"""ci/wheels names wheels as pip reads them, and builds again exactly what has changed."""

import base64
import hashlib
import importlib.machinery
import importlib.util
import shutil
import sys
import zipfile
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


def test_the_platform_stands_in_the_name_in_wheel_and_in_record(tmp_path):
    raw = tmp_path / "x-1-cp311-cp311-linux_x86_64.whl"
    old = b"Root-Is-Purelib: false\nTag: cp311-cp311-linux_x86_64\n\n"
    with zipfile.ZipFile(raw, "w") as file:
        file.writestr("x.py", "")
        file.writestr("x-1.dist-info/WHEEL", old)
        file.writestr("x-1.dist-info/RECORD", "x.py,sha256=a,0\nx-1.dist-info/WHEEL,sha256=b,9\n")
    made = wheels.retagged(raw, "linux_x86_64", "manylinux_2_28_x86_64", tmp_path)
    assert made.name == "x-1-cp311-cp311-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(made) as file:
        text = file.read("x-1.dist-info/WHEEL")
        first, second = file.read("x-1.dist-info/RECORD").decode().splitlines()
    assert b"Tag: cp311-cp311-manylinux_2_28_x86_64\n" in text
    digest = base64.urlsafe_b64encode(hashlib.sha256(text).digest()).decode().rstrip("=")
    assert first == "x.py,sha256=a,0"
    assert second == f"x-1.dist-info/WHEEL,sha256={digest},{len(text)}"


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
