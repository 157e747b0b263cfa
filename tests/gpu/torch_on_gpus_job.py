"""What each rank of test_torch_on_gpus.py runs: parts, one after the other, on a simulated GPU.

usage: torch_on_gpus_job.py FOLDER PART...

A part is "c10d TRANSPORT [with-fsdp2]" or "training TRANSPORT SHARD_STATE"; a rank says "is through
PART" of each.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import simulated_torch
import torch
import torch.distributed as dist
from gpu_ranks import begin, choose
from torch.nn.parallel import DistributedDataParallel

import ringcomm as rc
import ringcomm.torch as hvd

gpu = None  # of this rank, in this part


def main(folder, *parts):
    torch.set_num_threads(1)
    for part in parts:
        kind, *options = part.split()
        {"c10d": c10d, "training": training}[kind](folder, *options)
        print(f"is through {part}", flush=True)


def start(folder, transport):
    global gpu  # noqa: PLW0603 - one of the process
    gpu = begin(rc.rank(), folder, slow=0, **choose(transport))
    simulated_torch.count_as_gpu(gpu)


def end():
    gpu.synchronize()
    rc.barrier()
    rc.shutdown()
    simulated_torch.count_as_gpu(None)
    gpu.close()


def small_network():
    torch.manual_seed(1)
    layers = (torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 3))
    return torch.nn.Sequential(*layers).double()


def take_steps(model, optimizer, samples):
    for x in samples:
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()


# --- c10d ---------------------------------------------------------------------------------------
def c10d(folder, transport, with_fsdp2=""):
    dist.init_process_group("ringcomm")
    start(folder, transport)
    check_c10d(dist.get_rank(), dist.get_world_size(), with_fsdp2=with_fsdp2 == "with-fsdp2")
    gpu.synchronize()
    dist.barrier()
    dist.destroy_process_group()
    end()


def check_c10d(r, n, *, with_fsdp2):
    SPLIT = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    WHOLE = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

    def of(rank, count=6, dtype=torch.float32):
        return (torch.arange(count) * 3 + 7 * rank + 1).to(dtype)

    def on_gpu(call, *args, **named):
        """Make an async call, wait for it, and check that it was on the GPU."""
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

    def train(model, samples):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        take_steps(model, optimizer, samples)

    data = torch.randn(4, 4 * n, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    mine = [x.chunk(n)[r] for x in data]
    alone, replica = small_network(), small_network()
    train(alone, data)
    before = gpu.n_done
    train(DistributedDataParallel(replica), mine)
    assert gpu.n_done > before
    for p, q in zip(alone.parameters(), replica.parameters(), strict=True):
        torch.testing.assert_close(q, p, rtol=1e-12, atol=1e-12)
    if with_fsdp2:
        from torch.distributed.fsdp import fully_shard

        sharded = small_network()
        before = gpu.n_done
        train(fully_shard(sharded, mesh=dist.init_device_mesh("cpu", (n,))), mine)
        assert gpu.n_done > before
        for p, s in zip(alone.parameters(), sharded.parameters(), strict=True):
            torch.testing.assert_close(s.full_tensor(), p, rtol=1e-12, atol=1e-12)


# --- training -----------------------------------------------------------------------------------
def training(folder, transport, shard_state):
    hvd.init()
    start(folder, transport)
    check_training(transport, int(shard_state))
    end()


def check_training(transport, shard_state):
    data = torch.randn(
        5, 4 * hvd.size(), 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2)
    )
    for make in (
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.AdamW(p, lr=1e-2),
    ):
        model = small_network()
        if hvd.rank() != 0:
            for p in model.parameters():
                p.data.zero_()
        optimizer = make(model.parameters())
        optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), shard_state=shard_state
        )
        hvd.broadcast_parameters(model.state_dict())
        hvd.broadcast_optimizer_state(optimizer)
        take_steps(model, optimizer, [x.chunk(hvd.size())[hvd.rank()] for x in data])
        simulated_torch.count_as_gpu(None)
        alone = small_network()
        take_steps(alone, make(alone.parameters()), data)
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            assert (p - q).abs().max() <= 1e-10 * q.abs().max()
        simulated_torch.count_as_gpu(gpu)
    chosen = str(rc.explain(1, device="cuda"))
    assert chosen.startswith(f"arrays on GPUs: {transport},"), chosen
    assert gpu.n_done > 100, "the GPU had nothing to do"


if __name__ == "__main__":
    main(*sys.argv[1:])
