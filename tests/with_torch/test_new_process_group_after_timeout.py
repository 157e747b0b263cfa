"""After a timeout: destroy_process_group() and init_process_group(), as programs for torch do."""

from harness import run_script

# Rank 0 gives up on a barrier of ranks 0 and 1. The others come late, or not at all: they are in
# init_process_group() by then.
SCRIPT = """
import os, time
from datetime import timedelta
import torch, torch.distributed as dist
import ringcomm as rc, ringcomm.torch

for life, others in enumerate(["late", "ahead"]):
    dist.init_process_group("ringcomm", init_method="mpi://")
    rank, size = dist.get_rank(), dist.get_world_size()
    for _ in range(life + 1):  # so that the numbers of operations differ from life to life
        x = torch.arange(1000.0) * (rank + 1)
        dist.all_reduce(x)
        assert torch.equal(x, torch.arange(1000.0) * 6)
    pair = dist.new_group([0, 1], timeout=timedelta(seconds=0.5))
    if rank == 0:
        try:
            dist.barrier(pair)
        except rc.CommTimeoutError:
            open(f"over.{life}", "w").close()
    elif others == "late":
        while not os.path.exists(f"over.{life}"):
            time.sleep(0.01)
        if rank == 1:
            try:
                dist.barrier(pair)
            except rc.CommTimeoutError as error:
                assert "rank 0 has waited" in str(error)
    assert rank > 0 or os.path.exists(f"over.{life}")
    dist.destroy_process_group()
print("through", flush=True)
"""


def test_groups_can_be_made_anew_whoever_knows_of_the_timeout(tmp_path):
    script = SCRIPT + 'dist.init_process_group("ringcomm", init_method="mpi://")\ndist.barrier()\n'
    job = run_script(3, script, cwd=tmp_path)
    assert job.code == 0, job.output
    assert job.output.count("through") == 3
    assert "x rank" not in job.output
