"""`mpirun ringcomm tune`, and jobs that choose by what it wrote."""

import json
import sys

import pytest
from harness import BIN, job_environment, run_command, run_script

from ringcomm.config import ALGORITHMS, COLLECTIVES
from ringcomm.launch.cli import main

EXPLAIN = """
import ringcomm as rc
rc.init()
for rank in range(rc.size()):
    rc.barrier()
    if rank == rc.rank():
        print(rc.explain(4096), flush=True)
rc.shutdown()
"""


def test_what_is_measured_is_printed_kept_and_chosen_by(tmp_path):
    env = {"RINGCOMM_TUNING": str(tmp_path / "tables")}
    arguments = ["tune", "--sizes", "4K,64K", "-np", "2", "--seconds", "1"]
    tuned = run_command([BIN / "ringcomm", *arguments], env=job_environment(env), cwd=tmp_path)
    assert tuned.returncode == 0, tuned
    first = "[0] no job will choose by this table: ranks of one host"
    assert 0 <= tuned.stdout.find(first) < tuned.stdout.index("measuring "), tuned
    assert "1 host x 2 ranks" in tuned.stdout
    assert tuned.stdout.count("measuring ") == 2 * len(COLLECTIVES)  # by one rank, as it goes on
    [path] = (tmp_path / "tables").iterdir()
    assert f"written to {path}" in tuned.stdout
    seconds = json.loads(path.read_text())["seconds"]
    assert set(seconds) == set(COLLECTIVES)
    assert all(set(rows) == {"4096", "65536"} for rows in seconds.values())
    row = seconds["allreduce"]["4096"]
    assert set(row) == set(ALGORITHMS) - {"hierarchical"}

    explained = run_script(2, EXPLAIN, cwd=tmp_path, env=env)
    assert explained.code == 0, explained.output
    assert explained.output.count(": node, because its ranks share their node's memory") == 2
    assert explained.output.count(f"{row['ring'] * 1e6:10.1f} us") == 2  # beside what it measured


@pytest.mark.parametrize(
    "arguments", [["--sizes", "4Q"], ["--sizes", "1"], ["--seconds", "long"]], ids=" ".join
)
def test_a_wrong_command_line_is_refused_before_mpi_starts(arguments, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", None)  # to import it is an error
    with pytest.raises(SystemExit) as refused:
        main(["tune", *arguments])
    assert refused.value.code == 2
    assert f"argument {arguments[0]}: " in capsys.readouterr().err
