"""torch.distributed's backend in real jobs: the suites, the examples, and ways to start."""

from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest
from harness import (
    BIN,
    HANG_S,
    IS_MPICH,
    PROMPTLY_S,
    at_length,
    is_at_length,
    job_environment,
    run_command,
    run_job,
    run_script,
    suite_command,
)

ROOT = Path(__file__).parents[2]
EXAMPLES = ["ddp_backend", "fsdp_transformer", "zero1", "pipeline_tp"]
# Of torch's own modules, in the version at hand: they are not ours to mend.
FOREIGN = [
    "-W",
    "ignore::DeprecationWarning",
    "-W",
    "ignore::UserWarning",
    "-W",
    "ignore::FutureWarning",
]


pytestmark = [
    # Not imported: the ranks do so, and it would take this process 1 s, too.
    pytest.mark.skipif(find_spec("torch") is None, reason="the core is tested without torch, too"),
    # What MPI is beneath changes nothing above the engine, whose own suites run with both.
    pytest.mark.skipif(
        IS_MPICH and not is_at_length(), reason="the gate has no time for it: set AT_LENGTH=1"
    ),
]
ALL = [
    (suites, n)
    for suites in ("torch_distributed*_suite.py", "torch_parallelism_suite.py")
    for n in (2, 3, 4)
]
SUITES = at_length(ALL, [("torch_distributed*_suite.py", 3)])


@pytest.mark.parametrize(("suites", "size"), SUITES)
def test_suites_pass_on_every_rank(suites, size, tmp_path):
    files = sorted((ROOT / "tests" / "mpi").glob(suites))
    foreign = FOREIGN if suites == "torch_parallelism_suite.py" else []
    job = run_job(size, *suite_command(*files, *foreign), cwd=tmp_path, timeout_s=240)
    assert job.code == 0, job.output
    assert job.output.count(" passed") == size, job.output
    assert "x rank" not in job.output


@pytest.mark.at_length  # a job takes 12 s of a core
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", EXAMPLES)
def test_example_equals_one_process(name, size, tmp_path):
    if name == "fsdp_transformer" and metadata.version("torch").startswith("2.6."):
        pytest.skip("FSDP2 of torch 2.6 wants an accelerator")
    job = run_job(size, ROOT / "examples" / f"{name}.py", cwd=tmp_path, timeout_s=120)
    assert job.code == 0, job.output
    assert "from one process by" in job.output.replace("from one\nprocess", "from one process")


SUM = """
import torch, torch.distributed as dist
import ringcomm.torch
dist.init_process_group({arguments})
x = torch.ones(2)
dist.all_reduce(x)
assert (x == dist.get_world_size()).all()
group = dist.new_group([0, 1])
if dist.get_rank() < 2:
    dist.all_reduce(x, group=group)
print("summed", dist.get_backend(), flush=True)
dist.destroy_process_group()
"""
OVER_MPI = ['"ringcomm", init_method="mpi://"', '"gloo", init_method="mpi://"']
FORMS = [
    '"ringcomm"',
    '"ringcomm", init_method="env://"',
    '"cpu:ringcomm"',
    '"gloo"',
    *OVER_MPI,
]


def test_ranks_and_store_come_from_mpi_without_an_import_of_ringcomm(tmp_path):
    """So they do in a group whose timeout ends the job: rule 7, here for torch starts slowly."""
    script = "".join(SUM.format(arguments=each) for each in OVER_MPI)
    script += LATE.format(call=LATE_CALLS[0])
    script = script.replace("import ringcomm.torch\n", "")
    assert "import ringcomm" not in script
    job = run_script(2, script, cwd=tmp_path, timeout_s=HANG_S)
    require_the_timeout_to_name_the_missing(job)
    assert job.output.count("summed ringcomm") == job.output.count("summed gloo") == 2


@pytest.mark.at_length  # each start of torch takes 2 s of a core, and the test above shows most
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("arguments", FORMS)
def test_each_form_of_init_process_group_works_alone(arguments, size, tmp_path):
    script = SUM.format(arguments=arguments)
    job = run_script(size, script, cwd=tmp_path)
    assert job.code == 0, job.output
    assert job.output.count("summed") == size


@pytest.mark.at_length  # as above
@pytest.mark.parametrize("arguments", [OVER_MPI[0], '"cpu:ringcomm", init_method="mpi://"'])
def test_the_backend_is_there_without_an_import_of_ringcomm(arguments, tmp_path):
    script = SUM.format(arguments=arguments).replace("import ringcomm.torch\n", "")
    job = run_script(2, script, cwd=tmp_path)
    assert job.code == 0, job.output
    assert job.output.count("summed") == 2


@pytest.mark.at_length
def test_variables_of_torch_are_used_where_all_are_set(tmp_path):
    """A script that copies its rank from mpirun, as many do, goes on working."""
    head = """
import os, socket
os.environ["RANK"] = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"]
os.environ["WORLD_SIZE"] = "2"
os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", "{port}"
"""
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = head.format(port=port) + SUM.format(arguments='"ringcomm"')
    job = run_script(2, script, cwd=tmp_path)
    assert job.code == 0, job.output
    assert job.output.count("summed") == 2


@pytest.mark.at_length  # likewise, of the process below
@pytest.mark.parametrize(("method", "n"), [("env://", 2), ("mpi://", 2)])
def test_a_rank_that_is_not_mpis_is_an_error_with_both(method, n, tmp_path):
    script = 'import os\nos.environ["RANK"] = "1"\n' + SUM.format(
        arguments=f'"ringcomm", init_method="{method}"'
    )
    job = run_script(n, script, cwd=tmp_path)
    assert job.code != 0
    assert f"torch.distributed says rank 1 of {n}" in job.output, job.output
    assert f"MPI says rank 0 of {n}" in job.output


@pytest.mark.at_length  # what a rank of this job is told, the process below is told, too
def test_one_number_for_all_ranks_is_refused_before_torch_opens_a_store(tmp_path):
    """As of a framework that goes by SLURM_PROCID; torch says EADDRINUSE, or lets a rank wait."""
    head = """
import os
os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", "1"
"""
    script = head + SUM.format(arguments='"ringcomm", rank=0, world_size=2')
    job = run_script(2, script, cwd=tmp_path)
    assert job.code != 0
    assert "torch.distributed says rank 0 of 2" in job.output, job.output
    assert "MPI says rank 1 of 2. Unset RANK" in job.output
    assert "EADDRINUSE" not in job.output


# With one start of torch for both children; the ranks need none.
CHILDREN = """
import os, torch, torch.distributed as dist, ringcomm.torch
store = dist.TCPStore("127.0.0.1", 0, None, True)
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port))
os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the store is there
child = os.fork()
dist.init_process_group("gloo", init_method="env://", rank=int(not child), world_size=2)
x = torch.ones(1)
dist.all_reduce(x)
assert x == 2
dist.destroy_process_group()
if child:
    assert os.waitpid(child, 0)[1] == 0
"""
OF_ITS_OWN = """
import os, subprocess, sys
import numpy as np, ringcomm as rc
rc.init()
if rc.rank() == 1:
    assert subprocess.run([sys.executable, "-c", CHILDREN]).returncode == 0
rc.allreduce(np.ones(1))
print("all right", flush=True)
""".replace("CHILDREN", repr(CHILDREN))


def test_processes_that_a_rank_starts_number_themselves(tmp_path):
    job = run_script(2, OF_ITS_OWN, cwd=tmp_path)
    assert job.output.count("all right") == 2, job.output


ALONE = """
import os, sys
import torch.distributed as dist
import ringcomm.torch

def refused(**arguments):
    try:
        dist.init_process_group("ringcomm", **arguments)
    except Exception as error:
        print(error, flush=True)
    else:
        sys.exit(f"{arguments} are taken")

of_job = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
os.environ.update(of_job)
for variables in LAUNCHERS:
    os.environ.update(variables)
    refused(store=dist.HashStore(), rank=0, world_size=2)
    for name in variables:
        del os.environ[name]
for name in of_job:
    del os.environ[name]

of_mpirun = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
os.environ.update(of_mpirun, MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
refused(rank=0, world_size=2)  # a store would tell that the port is another's
for name in of_mpirun:
    del os.environ[name]

os.environ["RANK"] = "1"
refused(init_method="mpi://")
"""
OTHER_LAUNCHERS = {
    "torchrun": {"TORCHELASTIC_RUN_ID": "none"},
    "Ray": {"RAY_JOB_ID": "01000000"},
    "no MPI launcher": {},
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What a process that no mpirun has started is told, and its path."""
    path = tmp_path_factory.mktemp("alone") / "script.py"
    path.write_text(ALONE.replace("LAUNCHERS", repr([*OTHER_LAUNCHERS.values()])))
    return path, run_command([BIN / "python", path], env=job_environment())


@pytest.mark.parametrize("launcher", OTHER_LAUNCHERS)
def test_another_launcher_is_an_error_that_says_what_to_do(launcher, alone):
    """Each process would be rank 0 of 1 to MPI, and sums would be of one rank."""
    path, told = alone
    [text] = [line for line in told.stdout.splitlines() if f"{launcher} started this" in line]
    assert f"Run instead: ringcomm run -np 2 {path} (or mpirun" in text


def test_a_rank_that_is_not_the_one_of_mpi_is_an_error_with_both(alone):
    _, told = alone
    assert told.returncode == 0, told
    assert "torch.distributed says rank 1 of 1" in told.stdout, told
    assert "MPI says rank 0 of 1" in told.stdout
    assert "torch.distributed says rank 0 of 2" in told.stdout
    assert "MPI says rank 1 of 2. Unset RANK" in told.stdout


LATE = """
import datetime, torch, torch.distributed as dist
import ringcomm.torch
dist.init_process_group("ringcomm", timeout=datetime.timedelta(seconds=0.5))
x = torch.ones(2)
if dist.get_rank() == 1:
    dist.recv(x, 0)         # nobody sends
{call}
"""


LATE_CALLS = ["dist.all_reduce(x, async_op=True).wait()", "dist.all_reduce(x)", "dist.barrier()"]


@pytest.mark.at_length  # the first of them ends the job of another test, in the gate
@pytest.mark.parametrize("call", LATE_CALLS)
def test_rule_7_a_groups_timeout_ends_its_operations_and_names_the_missing(call, tmp_path):
    job = run_script(2, LATE.format(call=call), cwd=tmp_path, timeout_s=HANG_S)
    require_the_timeout_to_name_the_missing(job)


def require_the_timeout_to_name_the_missing(job):
    assert job.code != 0
    assert "for rank 1, which did not answer or did not enter it" in job.output or (
        "for rank 0, which did not answer or did not enter it" in job.output
    )
    assert " timeout of 0.5 s is over" in job.output
    assert job.seconds < PROMPTLY_S


DEATH = """
import os, signal, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
import ringcomm.torch
dist.init_process_group("ringcomm")
model = DDP(torch.nn.Linear(4, 4))
for step in range(100):
    if step == 3 and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    model(torch.ones(2, 4)).sum().backward()
"""


@pytest.mark.at_length
def test_a_rank_that_dies_ends_the_others_backward(tmp_path):
    job = run_script(3, DEATH, cwd=tmp_path, timeout_s=HANG_S)
    assert job.code != 0
    assert "x rank 1" in job.output
    assert job.seconds < PROMPTLY_S
