"""init_process_group("ringcomm") with tensors of simulated GPUs: c10d, DDP, FSDP2."""

from pathlib import Path

import pytest
from harness import at_length, run_script

TESTS = Path(__file__).parents[1]

SCRIPT = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
import torch
import torch.distributed as dist
import ringcomm as rc
import ringcomm.torch
import simulated_torch
from gpu_ranks import begin, choose
from torch.nn.parallel import DistributedDataParallel

transport, folder, trained = sys.argv[1:]
dist.init_process_group("ringcomm")
torch.set_num_threads(1)
r, n = dist.get_rank(), dist.get_world_size()
gpu = begin(r, folder, slow=0, **choose(transport))
simulated_torch.count_as_gpu(gpu)
SPLIT = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
WHOLE = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def of(rank, count=6, dtype=torch.float32):
    return (torch.arange(count) * 3 + 7 * rank + 1).to(dtype)


def on_gpu(call, *args, **named):
    \"\"\"Make an async call, wait for it, and check that it was on the GPU.\"\"\"
    before = gpu.n_done
    call(*args, async_op=True, **named).wait()
    gpu.synchronize()
    assert gpu.n_done > before, call


def same(found, wanted):
    assert torch.equal(found, wanted), (found, wanted)


every = [of(k) for k in range(n)]
total = sum(every)
x = of(r)
on_gpu(dist.all_reduce, x)
same(x, total)
x = of(r, dtype=torch.bfloat16)
on_gpu(dist.all_reduce, x, op=dist.ReduceOp.MAX)
same(x, of(n - 1, dtype=torch.bfloat16))
wide = torch.zeros(6, 2)
wide[:, 0] = of(r)
strided = wide[:, 0]  # is copied, and the result back
on_gpu(dist.all_reduce, strided)
same(strided, total)
x = of(r)
on_gpu(dist.reduce, x, 1)
same(x, total if r == 1 else of(r))
x = of(r)
on_gpu(dist.broadcast, x, 1)
same(x, of(1))
x = of(r).to(torch.float8_e4m3fn)  # a dtype that only moves
on_gpu(dist.broadcast, x, 0)
same(x.float(), of(0).to(torch.float8_e4m3fn).float())
outs = [torch.zeros(6) for _ in range(n)]
on_gpu(dist.all_gather, outs, of(r))
for out, wanted in zip(outs, every, strict=True):
    same(out, wanted)
whole = torch.zeros(6 * n)
on_gpu(WHOLE, whole, of(r))
same(whole, torch.cat(every))
outs = [torch.zeros(6) for _ in range(n)] if r == 0 else None
on_gpu(dist.gather, of(r), outs, dst=0)
if r == 0:
    same(torch.cat(outs), torch.cat(every))
out = torch.zeros(6)
on_gpu(dist.scatter, out, [of(k) * 2 for k in range(n)] if r == 1 else None, src=1)
same(out, of(r) * 2)
out = torch.zeros(6)
on_gpu(dist.reduce_scatter, out, [of(r) + k for k in range(n)])
same(out, total + n * r)
out, rows = torch.zeros(6), torch.cat([of(r) + k for k in range(n)])
on_gpu(SPLIT, out, rows)
same(out, total + n * r)
on_gpu(SPLIT, rows[6 * r : 6 * r + 6], rows)  # in place
same(rows[6 * r : 6 * r + 6], total + n * r)
out = torch.zeros(2 * n)
on_gpu(dist.all_to_all_single, out, torch.cat([of(r, 2) + 100 * k for k in range(n)]))
same(out, torch.cat([of(k, 2) + 100 * r for k in range(n)]))
sent, received = [k + r for k in range(n)], [k + r for k in range(n)]
out = torch.zeros(sum(received))
on_gpu(dist.all_to_all_single, out, of(r, sum(sent)), received, sent)
starts = [sum(k + i for i in range(r)) for k in range(n)]
same(out, torch.cat([of(k, 20)[s : s + k + r] for k, s in enumerate(starts)]))
outs = [torch.zeros(k + 1) for k in range(n)]
on_gpu(dist.all_to_all, outs, [of(r, r + 1) + k for k in range(n)])
for k, out in enumerate(outs):
    same(out, of(k, k + 1) + r)
right, left = (r + 1) % n, (r - 1) % n
out = torch.zeros(6)
works = [dist.isend(of(r), right), dist.irecv(out, left)]
for work in works:
    work.wait()
same(out, of(left))
x, y = of(r), of(r, 9)
with dist._coalescing_manager(async_ops=True) as manager:
    dist.all_reduce(x)
    dist.all_reduce(y)
manager.wait()
same(y, sum(of(k, 9) for k in range(n)))
x = of(r)
future = dist.all_reduce(x, async_op=True).get_future()
same(future.wait()[0], total)
half = dist.new_group([0, n - 1])
if r in (0, n - 1):
    x = of(r)
    on_gpu(dist.all_reduce, x, group=half)
    same(x, of(0) + of(n - 1))
dist.barrier()


def network():
    torch.manual_seed(1)
    layers = torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 3)
    return torch.nn.Sequential(*layers).double()


def train(model, samples):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for x in samples:
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()


data = torch.randn(4, 4 * n, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
mine = [x.chunk(n)[r] for x in data]
alone, replica = network(), network()
train(alone, data)
before = gpu.n_done
train(DistributedDataParallel(replica), mine)
assert gpu.n_done > before
for p, q in zip(alone.parameters(), replica.parameters(), strict=True):
    torch.testing.assert_close(q, p, rtol=1e-12, atol=1e-12)
if trained == "with FSDP2":
    from torch.distributed.fsdp import fully_shard

    sharded = network()
    before = gpu.n_done
    train(fully_shard(sharded, mesh=dist.init_device_mesh("cpu", (n,))), mine)
    assert gpu.n_done > before
    for p, s in zip(alone.parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(s.full_tensor(), p, rtol=1e-12, atol=1e-12)
gpu.synchronize()
dist.barrier()
print("done", r, flush=True)
dist.destroy_process_group()
rc.shutdown()
gpu.close()
"""


# The group asks for no transport, and each moves data between processes in test_mpirun_jobs.py. To
# import FSDP2, whose collectives are among those above, takes a rank 2 s of a core.
@pytest.mark.parametrize("transport", at_length(["ipc", "nccl", "staged"], ["ipc"]))
def test_c10d_on_gpus(transport, tmp_path):
    trained = at_length("with FSDP2", "DDP alone")
    job = run_script(3, SCRIPT, transport, tmp_path, trained, cwd=tmp_path)
    assert job.code == 0, job.output
    assert job.output.count("done") == 3, job.output
