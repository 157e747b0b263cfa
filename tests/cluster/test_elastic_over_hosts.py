"""Elastic jobs over hosts: ranks die, and those of all hosts go on with exact results."""

import os
import threading

import pytest
from fakecluster import running
from harness import at_length, start_job, wait_until
from storms import Storm

STORMS = {
    "a rank, then rank 0": (6, 0, ["3@20:inside", "0@23:after"]),
    "all ranks of a host, whose places spares of another host take": (
        4,
        2,
        ["2@20:before", "3@20:before"],
    ),
}


@pytest.mark.parametrize("name", at_length(list(STORMS), list(STORMS)[1:]))
def test_ranks_of_all_hosts_go_on_with_the_same_exact_state(name, cluster):
    n, n_spares, kills = STORMS[name]
    outcome = Storm(n, kills, "ulfm", n_spares, cluster=cluster).run()
    assert outcome.verdict == "right", (outcome.output, outcome.results)
    assert len(outcome.killed) == 2


WAITS = """
import os, sys
import numpy as np
import ringcomm as rc
rc.init()
me = rc.rank()
state = rc.elastic.ArrayState(step=0, x=np.zeros(100))

def write(name, text):
    with open(f"part.{me}", "w") as file:
        file.write(text)
    os.rename(file.name, f"{name}.{me}")

@rc.on_checkpoint
def save(step):
    write("saved", f"{step} {state.x[0]:g}")

@rc.elastic.run
def train(state):
    while state.step < 1_000_000:
        state.x += rc.allreduce(np.ones(100))
        state.step += 1
        state.commit()
        if state.step == 20:
            write("started", "")

try:
    train(state)
except SystemExit as end:
    write("ended", str(end.code))
    raise
"""


def test_when_a_link_fails_each_side_saves_its_last_commit_and_ends_by_the_deadline(
    cluster, tmp_path
):
    (tmp_path / "script.py").write_text(WAITS)
    layout = ("--with-ft", "ulfm", "--map-by", "slot", "--host", "h0:2,h1:1")
    env = {"RINGCOMM_ELASTIC": "1", "RINGCOMM_ELASTIC_HANG_S": "4"}

    def wait_for(name, limit_s):
        files = [tmp_path / f"{name}.{rank}" for rank in range(3)]
        missing = lambda: [path.name for path in files if not path.exists()]  # noqa: E731
        wait_until(lambda: not missing(), lambda: f"no {missing()}", limit_s)
        return [path.read_text() for path in files]

    with running(f"link-{os.getpid()}", 2, cluster.rate) as doomed:
        job = start_job(3, "script.py", cwd=tmp_path, env=env, options=layout, cluster=doomed)
        lines = []
        reader = threading.Thread(target=lambda: lines.extend(job.stdout))
        reader.start()
        try:
            wait_for("started", 60)
            doomed.link("h1", "down")
            assert wait_for("ended", 60) == ["75"] * 3
            # mpirun may pass on what a rank has printed only after the rank has ended.
            told = (
                "The job ends with a checkpoint: start it again to go on",
                "for ranks 2 of view 0",
            )
            wait_until(lambda: all(each in "".join(lines) for each in told), lambda: lines, 60)
        finally:
            doomed.kill("h1")
            doomed.kill("h0")  # mpirun with it, which hangs: its daemon cannot be reached
            reader.join()
            job.communicate()
    steps = [text.split() for text in wait_for("saved", 1)]
    assert all(float(x) == 3 * int(step) for step, x in steps), steps
    assert max(int(step) for step, _ in steps) - min(int(step) for step, _ in steps) <= 1
