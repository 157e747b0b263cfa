"""Tables of what was measured: their text form, their files, and what becomes of spoilt ones."""

import json
import logging
import os
from dataclasses import replace

import numpy as np
import pytest
from harness import errors_of_ranks, run_ranks
from loopback import LoopbackHub

import ringcomm as rc
from ringcomm import config
from ringcomm._version import __version__
from ringcomm.arrays import DTYPES, Flat
from ringcomm.collectives.measured_times import TimeTable
from ringcomm.collectives.select_algorithm import Case
from ringcomm.config import Settings
from ringcomm.engine.api import tuning_files
from ringcomm.engine.api.init_rank_size import engine
from ringcomm.engine.core.meet_and_leave import meet
from ringcomm.errors import ConfigError
from ringcomm.launch import tune
from ringcomm.transport.channel import Channel

TIMES = {"allreduce": {1000: {"ring": 1.0, "direct": 3.0}, 2000: {"ring": 2.0, "direct": 1.0}}}
TABLE = TimeTable("2 hosts x 1 rank", "threads", __version__, TIMES)
WIRE = LoopbackHub(2).transport(0)


def in_folder(path):
    return Settings(tuning=str(path))


@pytest.mark.parametrize(
    ("nbytes", "expected"),
    [
        (0, {"ring": 1.0, "direct": 3.0}),
        (1000, {"ring": 1.0, "direct": 3.0}),
        (1500, {"ring": 1.5, "direct": 2.0}),
        (2000, {"ring": 2.0, "direct": 1.0}),
        (8000, {"ring": 8.0, "direct": 4.0}),
    ],
)
def test_times_are_linear_between_the_sizes_measured_and_beyond(nbytes, expected):
    assert TABLE.at("allreduce", nbytes) == expected


def test_what_was_not_measured_has_no_times():
    assert TABLE.at("allgather", 1000) == {}


def test_a_table_survives_its_text_form():
    again = TimeTable.loads(TABLE.dumps())
    assert vars(again) == vars(TABLE)


GOOD = json.loads(TABLE.dumps())


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "Expecting value"),
        (TABLE.dumps()[:-9], "Expecting"),
        ("[]", "no tuning table"),
        (json.dumps(GOOD | {"format": 0}), "no tuning table of format 2"),
        (json.dumps(GOOD | {"implementation": None}), "lacks implementation"),
        (json.dumps(GOOD | {"seconds": {"allreduce": 3}}), "not by size and algorithm"),
        (json.dumps(GOOD | {"seconds": {"allreduce": {"1": {"ring": 0}}}}), "not positive"),
        (json.dumps(GOOD | {"seconds": {"allreduce": {"1": {"ring": None}}}}), "not by size"),
        (json.dumps(GOOD | {"seconds": {"allreduce": {"a": {"ring": 1}}}}), "invalid literal"),
        (json.dumps(GOOD | {"layout": "9 hosts x 1 rank"}), "changed since it was written"),
        (json.dumps(GOOD | {"seconds": {"allreduce": {"0": {"ring": 1}}}}), "cannot be"),
        (json.dumps(GOOD | {"seconds": {"allreduce": {str(1 << 63): {"ring": 1}}}}), "cannot be"),
        ("[" * 100_000, "nested too deeply"),
        (replace(TABLE, layout="9 hosts x 1 rank").dumps(), "measured with 9 hosts x 1 rank"),
        (
            replace(TABLE, version="0.0").dumps(),
            f"with ringcomm 0.0, and this job has ringcomm {__version__}",
        ),
    ],
)
def test_a_spoilt_or_foreign_table_is_ignored_with_its_name_and_the_fix(
    text, problem, tmp_path, caplog
):
    path = tuning_files.save(in_folder(tmp_path), TABLE)
    path.write_text(text)
    assert tuning_files.load(in_folder(tmp_path), WIRE) == ""
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert str(path) in record.getMessage()
    assert problem in record.getMessage()
    assert "ringcomm run -np 2 ringcomm tune" in record.getMessage()


def test_what_was_saved_is_loaded_and_nothing_else_is_left(tmp_path, caplog):
    path = tuning_files.save(in_folder(tmp_path / "new"), TABLE)
    assert TimeTable.loads(tuning_files.load(in_folder(tmp_path / "new"), WIRE)).seconds == TIMES
    assert list(path.parent.iterdir()) == [path]
    assert not caplog.records


def test_no_table_is_told_only_where_the_user_named_the_folder(tmp_path, caplog, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tuning_files.load(Settings(), WIRE) == ""
    assert not caplog.records
    assert tuning_files.load(in_folder(tmp_path), WIRE) == ""
    assert "holds no table for 2 hosts x 1 rank over threads yet" in caplog.text


def test_layouts_and_libraries_have_files_of_their_own():
    layouts = ["2 hosts x 1 rank", "1 host x 2 ranks", f"9 hosts, ranks on hosts {'0 ' * 99}"]
    paths = {
        tuning_files.table_path(Settings(), layout, library)
        for layout in layouts
        for library in ("Open MPI v5.0.11", "MPICH Version: 5.0.2")
    }
    assert len(paths) == 6
    assert all(len(os.path.basename(path)) < 120 for path in paths)


@pytest.mark.parametrize(
    ("settings", "environ", "folder"),
    [
        (Settings(tuning="/t"), {"XDG_CACHE_HOME": "/c"}, "/t"),
        (Settings(), {"XDG_CACHE_HOME": "/c"}, "/c/ringcomm/tuning"),
    ],
)
def test_tables_are_in_the_user_s_cache_or_where_the_user_says(settings, environ, folder):
    assert str(config.tuning_folder(settings, environ)) == folder


def test_all_ranks_choose_by_the_table_of_rank_0():
    def body(rank):
        meet(engine(), __version__, TABLE.dumps() if rank == 0 else "")
        choice = engine().selection.choice
        return [
            choice(Case("allreduce", nbytes, DTYPES["float32"], (0, 1))).algorithm
            for nbytes in (1000, 2000)
        ]

    assert run_ranks(2, body) == [["ring", "direct"]] * 2


@pytest.mark.parametrize(
    ("odd", "both", "advice"),
    [
        (
            {"algorithm": "ring"},
            ("RINGCOMM_ALGORITHM=auto", "RINGCOMM_ALGORITHM=ring"),
            "mpirun -x",
        ),
        (
            {"fusion_mib": 1.0},
            ("RINGCOMM_FUSION_MIB=25 (64 on GPUs)", "RINGCOMM_FUSION_MIB=1"),
            "mpirun -x",
        ),
    ],
)
def test_settings_that_differ_are_the_same_error_on_every_rank(odd, both, advice):
    def body(rank):
        if rank == 1:
            engine().settings = Settings(timeout_s=120, **odd)
        meet(engine(), __version__)

    errors = errors_of_ranks(3, body)
    assert {type(error) for error in errors} == {rc.MismatchError}
    [text] = {str(error) for error in errors}
    assert f"init: ranks 0, 2 started with {both[0]}, rank 1 started with {both[1]}" in text
    assert advice in text


def test_versions_that_differ_are_the_same_error_on_every_rank():
    errors = errors_of_ranks(2, lambda rank: meet(engine(), f"1.{rank}"))
    [text] = {str(error) for error in errors}
    assert "rank 0 started with ringcomm 1.0, rank 1 started with ringcomm 1.1" in text


@pytest.mark.parametrize("collective", config.COLLECTIVES)
def test_what_is_measured_goes_as_operations_do(collective, monkeypatch):
    """Without Python, where the algorithm can be recorded."""
    schedules, run = [], Channel.run
    monkeypatch.setattr(Channel, "run", lambda *a: schedules.append(a[1]) or run(*a))
    x = [Flat(np.zeros(4 * 6133, np.uint8), DTYPES["float32"]) for _ in range(3)]

    def body(rank):
        return tune._seconds(collective, "ring", x[rank])

    assert min(run_ranks(3, body, hub=LoopbackHub(3, (0, 1, 2)))) > 0
    assert len(schedules) == 3


def test_who_has_no_home_or_may_not_write_there_is_told_the_variable(tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as it leaves it
    assert config.tuning_folder(Settings()) is None
    assert tuning_files.load(Settings(), WIRE) == ""
    with pytest.raises(ConfigError, match=r"no home: .* Set RINGCOMM_TUNING"):
        tuning_files.require_place(Settings(), TABLE.layout, TABLE.implementation)
    blocked = tmp_path / "file"
    blocked.touch()
    with pytest.raises(ConfigError, match=f"cannot write to {blocked}/t: .* Set RINGCOMM_TUNING"):
        tuning_files.save(in_folder(blocked / "t"), TABLE)
