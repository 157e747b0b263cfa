"""Settings, and what the environment says of the launch."""

import math
import os
import re
import sys
from pathlib import Path

import pytest
from harness import run_command

from ringcomm import config
from ringcomm.errors import ConfigError
from ringcomm.launched import child_marks, launcher, mpi_defaults


def test_defaults():
    settings = config.read_settings({"PATH": "/bin"})
    assert (settings.timeout_s, settings.stall_warning_s, settings.grace_s) == (600, 30, 3)


def test_values_are_read():
    assert config.read_settings({"RINGCOMM_TIMEOUT_S": "1.5"}).timeout_s == 1.5


def test_a_text_is_read_as_it_is():
    assert config.read_settings({"RINGCOMM_TIMELINE": "/tmp/1"}).timeline == "/tmp/1"
    assert config.read_settings({}).timeline == ""


@pytest.mark.parametrize(
    ("text", "in_host_memory", "on_a_gpu"), [(None, 25, 64), ("8", 8, 8), ("0", 0, 0)]
)
def test_a_bucket_on_a_gpu_is_larger_unless_the_user_says_its_size(text, in_host_memory, on_a_gpu):
    settings = config.read_settings({} if text is None else {"RINGCOMM_FUSION_MIB": text})
    assert settings.fusion_nbytes(None) == in_host_memory << 20
    assert settings.fusion_nbytes("cuda") == on_a_gpu << 20


def test_zero_means_never():
    settings = config.read_settings({"RINGCOMM_TIMEOUT_S": "0", "RINGCOMM_STALL_WARNING_S": "0"})
    assert settings.timeout_or_inf == settings.stall_warning_or_inf == math.inf


@pytest.mark.parametrize("value", ["-1", "soon", "", "nan"])
def test_a_value_that_is_no_number_names_the_variable(value):
    with pytest.raises(ConfigError, match=f"RINGCOMM_TIMEOUT_S is '{value}'"):
        config.read_settings({"RINGCOMM_TIMEOUT_S": value})


def test_no_server_is_refused_and_not_taken_for_one():
    with pytest.raises(ConfigError, match=r"RINGCOMM_PS_SERVERS is 0, .* one server at least"):
        config.read_settings({"RINGCOMM_PS_SERVERS": "0"})
    assert config.read_settings({"RINGCOMM_PS_SERVERS": "2"}).ps_servers == 2


@pytest.mark.parametrize(("given", "chosen", "warnings"), [(None, 2, 0), (2, 2, 0), (1, 1, 1)])
def test_an_argument_of_ps_init_wins_and_where_the_command_says_otherwise_it_is_told(
    given, chosen, warnings, caplog
):
    assert config.argument_or(2, "worker_spares", given, warns=True) == chosen
    assert config.argument_or(2, "worker_spares", given, warns=False) == chosen
    assert len(caplog.records) == warnings
    text = "ps.init(worker_spares=1) counts, and RINGCOMM_PS_WORKER_SPARES=2"
    assert (text in caplog.text) == bool(warnings)


def test_an_unknown_setting_names_the_known_ones():
    with pytest.raises(ConfigError, match=r"RINGCOMM_TIMOUT_S .*Did you mean RINGCOMM_TIMEOUT_S"):
        config.read_settings({"RINGCOMM_TIMOUT_S": "1"})
    with pytest.raises(ConfigError, match="Known: RINGCOMM_TIMEOUT_S, "):
        config.read_settings({"RINGCOMM_TIMEOUT": "1"})


def test_variables_of_others_are_named_once_by_the_first_rank_and_ignored(caplog):
    others = {"RINGCOMM_PORT": "tcp://10.0.0.17:80", "RINGCOMM_ROOT": "/apps", "RINGCOMM_XYZ": "1"}
    config._warn_of.cache_clear()
    for rank in "10":
        settings = config.read_settings({**others, "OMPI_COMM_WORLD_RANK": rank})
        assert settings == config.Settings()
        assert bool(caplog.records) == (rank == "0")
    config.read_settings(others)
    [record] = caplog.records
    assert "RINGCOMM_PORT, RINGCOMM_ROOT, RINGCOMM_XYZ: not settings" in record.getMessage()


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, ("OMPI_COMM_WORLD_SIZE", 4)),
        ({"PMI_SIZE": "2"}, ("PMI_SIZE", 2)),
        ({"SLURM_STEP_NUM_TASKS": "8"}, ("SLURM_STEP_NUM_TASKS", 8)),
        ({"SLURM_NTASKS": "8"}, None),
        ({"PMI_SIZE": "1"}, None),
    ],
)
def test_launched_size(environ, expected):
    assert launcher.launched_size(environ) == expected


ONE_HOST = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
TWO_HOSTS = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "0",
}


MEMORY = "OMPI_MCA_btl_sm_backing_directory"
MEMORY_OF_RUN = {MEMORY: "/dev/shm/ringcomm-mpi-abc"}


def test_quick_start_settings_are_for_one_host_only():
    here, there, direct = dict(ONE_HOST), dict(TWO_HOSTS), {"PMIX_RANK": "1"}
    for environ in (here, there, direct):
        mpi_defaults.set_mpi_defaults(environ)
        assert environ["OMPI_MCA_coll"] == "^han"
    assert here["OMPI_MCA_pml"] == "ob1"
    assert "OMPI_MCA_pml" not in there
    assert "OMPI_MCA_pml" not in direct  # srun says nothing of hosts


def test_a_process_without_a_launcher_uses_no_shared_memory_of_mpi_and_listens_nowhere():
    alone = {}
    mpi_defaults.set_mpi_defaults(alone)
    assert alone["OMPI_MCA_btl"] == "self"


@pytest.mark.parametrize(("do_share", "btl"), [(True, "self,sm"), (False, "self,sm,tcp")])
def test_ranks_of_one_host_have_tcp_only_if_they_cannot_share_memory(do_share, btl):
    asked = []
    environ = ONE_HOST | MEMORY_OF_RUN
    mpi_defaults.set_mpi_defaults(environ, lambda n: asked.append(n) or do_share)
    assert (environ["OMPI_MCA_btl"], asked) == (btl, [2])
    assert MEMORY_OF_RUN.items() <= environ.items() if do_share else MEMORY not in environ


def test_ranks_over_hosts_keep_the_networks_that_mpi_finds():
    environ = dict(TWO_HOSTS)
    mpi_defaults.set_mpi_defaults(environ, lambda _: True)
    assert "OMPI_MCA_btl" not in environ


def test_who_sees_no_launcher_does_not_rely_on_shared_memory():
    assert not mpi_defaults.share_memory(1)


@pytest.mark.parametrize("n_ranks", [1, 10**9])
def test_shared_memory_must_be_the_launcher_s_and_have_room(n_ranks, monkeypatch):
    monkeypatch.setattr(mpi_defaults, "launchers", lambda: iter([os.getpid()]))
    assert mpi_defaults.share_memory(n_ranks) == (n_ranks == 1)


def test_a_job_that_a_rank_starts_inherits_no_choice_of_btl_and_no_folder_of_its_memory():
    environ = ONE_HOST | MEMORY_OF_RUN
    added = mpi_defaults.set_mpi_defaults(environ, lambda _: True)
    mpi_defaults.hide_from_children(added, environ)
    assert not {"OMPI_MCA_btl", MEMORY} & environ.keys()
    chosen = {"OMPI_MCA_btl": "self,tcp", MEMORY: "/dev/shm/mine"}
    of_user = ONE_HOST | chosen
    mpi_defaults.hide_from_children(mpi_defaults.set_mpi_defaults(of_user), of_user)
    assert chosen.items() <= of_user.items()


def test_the_user_s_own_mpi_setting_wins():
    environ = ONE_HOST | {"OMPI_MCA_coll": "basic", "OMPI_MCA_pml": "ucx"}
    added = mpi_defaults.set_mpi_defaults(environ, lambda _: True)
    assert environ["OMPI_MCA_coll"] == "basic"
    assert environ["OMPI_MCA_pml"] == "ucx"
    assert not any(line.startswith(("OMPI_MCA_coll", "OMPI_MCA_pml")) for line in added)
    assert "OMPI_MCA_btl=self,sm" in added


def test_only_what_a_job_lacks_has_come_too_late():
    made = [f"{name}={value}" for name, value in settings_in(ONE_HOST)]
    assert len(made) == 6
    missed = mpi_defaults.missed_settings
    assert missed(made, is_open_mpi=True, n_hosts=1) == []
    assert missed(made, is_open_mpi=False, n_hosts=2) == []
    lacks = ["OMPI_MCA_coll=^han", "OMPI_MCA_btl_tcp_links=2"]
    assert missed(made, is_open_mpi=True, n_hosts=2) == lacks
    assert missed(made[1:], is_open_mpi=True, n_hosts=3) == lacks[1:]  # the user has set it


def test_all_settings_of_mpi_are_in_the_docs_and_no_others():
    page = (Path(__file__).parents[2] / "docs" / "cluster.md").read_text()
    cases = [(ONE_HOST, True), (ONE_HOST, False), (TWO_HOSTS, True), ({}, True)]
    made = [f"{k}={v}" for environ, do_share in cases for k, v in settings_in(environ, do_share)]
    assert set(re.findall(r"^\| `(OMPI_MCA_\S+)`", page, re.MULTILINE)) == set(made)


def settings_in(environ, do_share=True):
    environ = dict(environ)
    mpi_defaults.set_mpi_defaults(environ, lambda _: do_share)
    return [each for each in environ.items() if each[0].startswith("OMPI_MCA_")]


def test_hydra_is_known_by_its_pmi():
    assert launcher.is_hydra({"PMI_FD": "7", "PMI_RANK": "0"})
    assert launcher.is_hydra({"PMI_PORT": "host:1234"})
    assert not launcher.is_hydra({"PMI_FD": "7", "PMIX_NAMESPACE": "job"})
    assert not launcher.is_hydra({})


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("true", True), ("0", False)])
def test_fault_tolerance_is_what_mpirun_says(value, expected):
    assert launcher.is_fault_tolerant({"OMPI_MCA_mpi_ft_enable": value}) is expected
    assert not launcher.is_fault_tolerant({})


def test_children_of_a_rank_know_it_and_jobs_started_by_a_rank_do_not():
    environ = {"PMIX_NAMESPACE": "job1", "PMIX_RANK": "0"}
    child_marks.mark_children_of_this_rank(environ)
    assert child_marks.parent_rank_pid(environ) is None  # the rank itself
    pid = str(os.getpid())
    marked = environ["RINGCOMM_RANK_PROCESS"].replace(pid, "1", 1)
    child = environ | {"RINGCOMM_RANK_PROCESS": marked}
    assert child_marks.parent_rank_pid(child) == 1
    assert child_marks.parent_rank_pid(child | {"PMIX_NAMESPACE": "job2"}) is None
    assert config.read_settings(child).timeout_s == 600  # the mark is no setting


# --- what launchers say -------------------------------------------------------------------------
@pytest.mark.parametrize("variable", ["OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "PMI_ID"])
def test_a_rank_variable_of_mpi_tells_its_launcher(variable):
    assert launcher.is_launched_by_mpi({variable: "0"})


def test_torchs_own_variables_are_no_sign_of_mpi():
    assert not launcher.is_launched_by_mpi({"RANK": "0", "WORLD_SIZE": "2"})


@pytest.mark.parametrize(
    ("variable", "name"), [("TORCHELASTIC_RUN_ID", "torchrun"), ("RAY_JOB_ID", "Ray"), ("X", "")]
)
def test_other_launchers_are_named(variable, name):
    assert launcher.foreign_launcher({variable: "1"}) == name


@pytest.mark.parametrize(
    ("environ", "by"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2"}, "no MPI launcher"),
        ({"WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}, "torchrun"),
    ],
)
def test_ranks_that_are_not_mpis_are_refused(environ, by):
    with pytest.raises(ConfigError, match=rf"WORLD_SIZE wants 2 ranks, but {by} started"):
        launcher.refuse_foreign_ranks(environ)


@pytest.mark.parametrize(
    ("command", "program"),
    [
        (["-m", "package.train", "--lr", "1"], "-m package.train --lr 1"),
        (["-m", "package"], "-m package"),
        (["package/train.py"], "package/train.py"),
        (["package"], "package"),
    ],
)
def test_the_command_in_the_hint_starts_what_torchrun_has_started(command, program, tmp_path):
    (tmp_path / "package").mkdir()
    body = "from ringcomm.launched.launcher import refuse_foreign_ranks\nrefuse_foreign_ranks()\n"
    for name in ("train.py", "__main__.py"):
        (tmp_path / "package" / name).write_text(body)
    environ = os.environ | {"WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
    done = run_command([sys.executable, *command], cwd=tmp_path, env=environ)
    assert f"Run instead: ringcomm run -np 2 {program} (or mpirun" in done.stderr


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "none"},
        {"WORLD_SIZE": "huge"},
        {"RANK": "1", "WORLD_SIZE": "2", "PMIX_RANK": "1"},
        {"WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
    ],
)
def test_a_process_that_is_to_be_alone_or_is_mpis_is_no_foreign_rank(environ):
    launcher.refuse_foreign_ranks(environ)


def test_torchs_ranks_are_read_and_what_is_missing_is_known():
    assert launcher.torch_ranks({"RANK": "1", "WORLD_SIZE": ""}) == {"rank": 1}
    assert launcher.missing_of_torch({"rank"}, {"WORLD_SIZE": "2"}) == [
        "MASTER_ADDR",
        "MASTER_PORT",
    ]
    with pytest.raises(ConfigError, match="RANK is 'one'"):
        launcher.torch_ranks({"RANK": "one"})
