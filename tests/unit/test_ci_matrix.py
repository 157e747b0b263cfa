"""ci/matrix has a cell for what the project says it supports; docs say of each what came of it."""

import argparse
import importlib.machinery
import importlib.util
import itertools
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from ringcomm.launch.check_install.judge_facts import TESTED_TORCH

ROOT = Path(__file__).parents[2]
loader = importlib.machinery.SourceFileLoader("matrix", str(ROOT / "ci/matrix"))
matrix = importlib.util.module_from_spec(importlib.util.spec_from_loader("matrix", loader))
loader.exec_module(matrix)

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
GATE = "3.11-2.13-openmpi"
CELLS = [matrix.parts(name) for name in (*matrix.CELLS, GATE)]
PAGE = (ROOT / "docs/torch_distributed.md").read_text()


def test_cells_and_gate_have_all_pairs_but_those_that_are_said_to_be_left_out():
    pythons = {python for python, _, _ in CELLS} - {"3.14"}
    torches = {torch for _, torch, _ in CELLS}
    assert len(matrix.CELLS) == len(set(matrix.CELLS)) <= 12
    with_torch = {(python, torch) for python, torch, _ in CELLS}
    assert set(itertools.product(pythons, torches)) <= with_torch
    with_mpi = {(python, mpi) for python, _, mpi in CELLS}
    assert set(itertools.product(pythons, matrix.MPIS)) <= with_mpi
    left_out = set(itertools.product(torches, matrix.MPIS)) - {(t, mpi) for _, t, mpi in CELLS}
    assert left_out == {("2.6", "mpich-abi"), ("2.13", "intel"), ("2.14", "openmpi")}


def test_cells_are_of_the_versions_that_pip_and_ringcomm_check_are_told():
    classifiers = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    assert {python for python, _, _ in CELLS} == set(classifiers)
    torches = sorted({torch for _, torch, _ in CELLS}, key=lambda text: int(text.split(".")[1]))
    assert tuple(torches) == TESTED_TORCH
    assert PROJECT["optional-dependencies"]["torch"] == [f"torch>={torches[0]}"]


def test_the_table_in_docs_has_a_row_for_each_cell_with_a_date_or_that_it_was_not_run():
    rows = dict(re.findall(r"^\| `(3\.[\w.-]+)` \|(.*)\|$", PAGE, re.MULTILINE))
    assert set(rows) == {*matrix.CELLS, GATE}
    for cell, row in rows.items():
        assert re.search(r"\| 20\d\d-\d\d-\d\d |not run", row), cell
        if "not run" not in row:
            python, torch, _ = matrix.parts(cell)
            versions = row.split("|")[0]
            assert f"{python}." in versions, cell
            assert f", {torch}." in versions, cell


@pytest.mark.parametrize("name", ["3.11-2.6", "3.11-2.6-lam", "2.7-2.6-mpich", "3.11-2-mpich"])
def test_a_cell_that_is_none_is_refused(name):
    with pytest.raises(argparse.ArgumentTypeError, match="PYTHON-TORCH-MPI"):
        matrix.parts(name)


def test_a_wheel_is_that_of_the_python(tmp_path):
    machine = matrix.os.uname().machine
    names = [f"ringcomm-1-{tag}-any_{machine}.whl" for tag in ("cp311-cp311", "cp312-abi3")]
    for name in names:
        (tmp_path / name).touch()
    old, new = (matrix.Cell("x", python, "2.6", "mpich") for python in ("3.11", "3.13"))
    assert [old.wheel_in(tmp_path).name, new.wheel_in(tmp_path).name] == names
    (tmp_path / names[1]).unlink()
    with pytest.raises(matrix.Failed, match="no wheel of tag cp312-abi3"):
        new.wheel_in(tmp_path)


def test_a_cell_that_fails_is_a_row_that_says_so_and_leaves_no_environment(monkeypatch, tmp_path):
    monkeypatch.setattr(matrix, "WORK", tmp_path)

    def install(cell, wheels):
        cell.call(["sh", "-c", "echo no such torch; exit 3"])

    monkeypatch.setattr(matrix.Cell, "install", install)
    given = SimpleNamespace(wheels=None, tests=False, frameworks=False)
    row = matrix.result(matrix.parts(GATE), given)
    assert row.startswith(f"{GATE}: FAILED: ")
    assert "exit code 3, not 0: no such torch" in row
    assert [path.name for path in tmp_path.iterdir()] == [f"{GATE}.log"]
    assert "FAILED: there is no Python 3.99" in matrix.result(("3.99", "2.6", "mpich"), given)


def test_ranks_that_were_each_alone_are_no_job():
    cell = matrix.Cell("x", "3.11", "2.6", "mpich")
    cell.require_right(2, "right on 2 ranks: all\n")
    for told in ("right on 1 ranks: all\n" * 2, "right on 2 ranks: all\n" * 2, ""):
        with pytest.raises(matrix.Failed, match="no line 'right on 2 ranks'"):
            cell.require_right(2, told)
