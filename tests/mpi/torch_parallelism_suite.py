"""What stands on torch.distributed, over ringcomm: each must equal one process.

Run by every rank of a job at once; not collected by itself.
"""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from harness import is_at_length
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

import ringcomm as rc
import ringcomm.torch
from ringcomm.torch.distributed.compat import VERSION

pytest_plugins = ["torch_distributed_fixtures"]
torch.set_num_threads(1)
BATCH, STEPS = 4, 4


# What torch 2.6 itself does not do on the CPU, over any backend.
needs_fsdp2 = pytest.mark.skipif(VERSION < (2, 7), reason="FSDP2 of torch 2.6 wants an accelerator")
needs_any_backend = pytest.mark.skipif(
    VERSION < (2, 7), reason="ZeRO of torch 2.6 overlaps with DDP over NCCL alone"
)
needs_scaling = pytest.mark.skipif(
    VERSION < (2, 7), reason="pipelines of torch 2.6 do not scale gradients by the microbatches"
)


@pytest.fixture(scope="module", autouse=True)
def job():
    ringcomm.torch.init_process_group()
    yield
    dist.destroy_process_group()
    rc.shutdown()


def network(dtype=torch.float64):
    torch.manual_seed(0)
    layers = [nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2)]
    return nn.Sequential(*layers).to(dtype)


def batches(size, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(STEPS, size * BATCH, 6, generator=generator, dtype=dtype)
    return list(x)


def loss_of(out):
    return (out**2).mean()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model, optimizer, xs):
    for x in xs:
        optimizer.zero_grad()
        loss_of(model(x)).backward()
        optimizer.step()


def mine(xs, rank, size):
    return [x.chunk(size)[rank] for x in xs]


def alone(size, make=sgd, model=None):
    """Return the weights of one process that gets all batches."""
    model = network() if model is None else model
    train(model, make(model), batches(size))
    return [p.detach() for p in model.parameters()]


def assert_equal(parameters, expected, tolerance=1e-12):
    for p, q in zip(parameters, expected, strict=True):
        assert (p.detach() - q).abs().max() <= tolerance * q.abs().max()


# --- DDP ------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"find_unused_parameters": True},
        {"bucket_cap_mb": 0.001},
        {"broadcast_buffers": False},
    ],
    ids=str,
)
def test_ddp_equals_one_process(options, rank, size):
    model = network()
    ddp = DDP(model, **options)
    train(ddp, sgd(ddp), mine(batches(size), rank, size))
    assert_equal(model.parameters(), alone(size))


def test_ddp_takes_the_weights_of_rank_0(rank, size):
    torch.manual_seed(rank)
    model = nn.Linear(3, 3)
    DDP(model)
    everyone = [None] * size
    dist.all_gather_object(everyone, model.weight.tolist())
    assert all(each == everyone[0] for each in everyone)


def test_ddp_leaves_out_parameters_that_nobody_used(rank, size):
    class TwoHeads(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(6, 2).double(), nn.Linear(6, 2).double()

        def forward(self, x, use_b):
            return self.a(x) + self.b(x) if use_b else self.a(x)

    model = TwoHeads()
    ddp = DDP(model, find_unused_parameters=True)
    x = batches(size)[0].chunk(size)[rank]
    loss_of(ddp(x, rank == 0)).backward()
    assert model.b.weight.grad is not None
    model.zero_grad(set_to_none=True)
    loss_of(ddp(x, False)).backward()
    assert model.b.weight.grad is None


def test_no_sync_sums_up_locally(rank, size):
    model = network()
    ddp = DDP(model)
    optimizer = sgd(model)
    first, second = mine(batches(size)[:2], rank, size)
    with ddp.no_sync():
        loss_of(ddp(first)).backward()
    loss_of(ddp(second)).backward()
    optimizer.step()
    other = network()
    plain = sgd(other)
    for x in batches(size)[:2]:
        loss_of(other(x)).backward()
    plain.step()
    assert_equal(model.parameters(), [p.detach() for p in other.parameters()])


@pytest.mark.parametrize("by_all", [True, False])
def test_join_lets_ranks_have_different_numbers_of_batches(by_all, rank, size):
    model = network()
    ddp = DDP(model)
    optimizer = sgd(model)
    with ddp.join(divide_by_initial_world_size=by_all):
        for x in mine(batches(size), rank, size)[: 1 + rank]:
            optimizer.zero_grad()
            loss_of(ddp(x)).backward()
            optimizer.step()
    other = network()
    plain = sgd(other)
    for step, x in enumerate(batches(size)[:size]):
        plain.zero_grad()
        for part in x.chunk(size)[step:]:  # of the ranks that have so many batches
            (loss_of(other(part)) / (size if by_all else size - step)).backward()
        plain.step()
    assert_equal(model.parameters(), [p.detach() for p in other.parameters()])


def test_sparse_gradients_of_embeddings_are_added(rank, size):
    def make():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.EmbeddingBag(20, 6, sparse=True, mode="sum"), nn.Linear(6, 2)
        ).double()

    model, other = make(), make()
    words = torch.arange(size * BATCH).reshape(-1, 1) % 20
    ddp = DDP(model)
    loss_of(ddp(words.chunk(size)[rank])).backward()
    loss_of(other(words)).backward()
    grads = [p.grad.to_dense() for p in model.parameters()]
    assert model[0].weight.grad.is_sparse
    assert_equal(grads, [p.grad.to_dense() for p in other.parameters()])


HOOKS = {
    "allreduce": (lambda: (None, default_hooks.allreduce_hook), 1e-12),
    "fp16": (lambda: (None, default_hooks.fp16_compress_hook), 1e-2),
    "fp16 wrapper": (
        lambda: (None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
        1e-2,
    ),
    "PowerSGD": (
        lambda: (
            powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=16, start_powerSGD_iter=2),
            powerSGD_hook.powerSGD_hook,
        ),
        1e-3,
    ),
    "post-local SGD": (
        lambda: (
            post_localSGD_hook.PostLocalSGDState(None, dist.new_group(), 100),
            post_localSGD_hook.post_localSGD_hook,
        ),
        1e-12,
    ),
    "node": (lambda: (None, ringcomm.torch.node_hook), 1e-12),
}


@pytest.mark.parametrize("cap", [25, 0.0005])
@pytest.mark.parametrize("name", HOOKS)
def test_every_hook_of_ddp_trains(name, cap, rank, size):
    make, tolerance = HOOKS[name]
    model = network()
    ddp = DDP(model, bucket_cap_mb=cap)
    ddp.register_comm_hook(*make())
    train(ddp, sgd(ddp), mine(batches(size), rank, size))
    assert_equal(model.parameters(), alone(size), tolerance)
    everyone = [None] * size
    dist.all_gather_object(everyone, model[0].weight.tolist())
    assert all(each == everyone[0] for each in everyone)


@pytest.fixture
def shapely_powersgd(monkeypatch):
    """torch 2.13's batched hook passes a matrix where its own helper wants a stack of them."""
    plain = powerSGD_hook._orthogonalize

    def orthogonalize(x, epsilon=0):
        plain(x if x.dim() == 3 else x.unsqueeze(0), epsilon)

    monkeypatch.setattr(powerSGD_hook, "_orthogonalize", orthogonalize)


@pytest.mark.usefixtures("shapely_powersgd")
@pytest.mark.parametrize("name", ["powerSGD_hook", "batched_powerSGD_hook"])
def test_powersgd_with_several_buckets_leaves_all_ranks_with_the_same_weights(name, rank, size):
    hook = getattr(powerSGD_hook, name)
    torch.manual_seed(0)
    layers = [nn.Linear(16, 16, bias=False) for _ in range(7)]
    model = nn.Sequential(*layers).double()
    ddp = DDP(model, bucket_cap_mb=0.0005)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    buckets = set()

    def noting(state, bucket):
        buckets.add(bucket.index())
        return hook(state, bucket)

    ddp.register_comm_hook(state, noting)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(30 if is_at_length() else 5):
        x = torch.randn(4, 16, generator=generator, dtype=torch.float64)
        optimizer.zero_grad()
        (ddp(x) ** 2).mean().backward()
        optimizer.step()
    assert len(buckets) >= 6
    assert state.iter >= 2
    assert state.compression_stats()[0] > 1
    weights = torch.stack([layer.weight.detach() for layer in layers])
    theirs = weights.clone()
    dist.broadcast(theirs, 0)
    assert torch.equal(weights, theirs)


@pytest.mark.parametrize("hook", [quantization_hooks.quantization_pertensor_hook], ids=["tensor"])
def test_quantizing_hooks_run(hook, rank, size):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = network(torch.float32)
        ddp = DDP(model)
        ddp.register_comm_hook(dist.group.WORLD, hook)
        loss_of(ddp(batches(size, torch.float32)[0].chunk(size)[rank])).backward()
    assert model[0].weight.grad.isfinite().all()


def test_the_built_in_allreduce_hook_of_cpp_trains(rank, size):
    model = network()
    ddp = DDP(model)
    ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    train(ddp, sgd(ddp), mine(batches(size), rank, size))
    assert_equal(model.parameters(), alone(size))


def test_noop_hook_keeps_gradients_apart(rank, size):
    model = network()
    ddp = DDP(model)
    ddp.register_comm_hook(None, debugging_hooks.noop_hook)
    x = batches(size)[0].chunk(size)[rank]
    loss_of(ddp(x)).backward()
    other = network()
    loss_of(other(x)).backward()
    assert_equal([p.grad for p in model.parameters()], [p.grad for p in other.parameters()])


def test_sync_batch_norm_needs_gpus_and_ddp_says_so():
    model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(3)))
    with pytest.raises(ValueError, match="SyncBatchNorm layers only work with GPU modules"):
        DDP(model)


# --- rule 4: torch.compile ----------------------------------------------------------------------
@pytest.mark.parametrize("inside", [False, True], ids=["compile(DDP)", "DDP(compile)"])
def test_rule_4_compiled_ddp_equals_one_process(inside, rank, size):
    torch._dynamo.reset()
    model = network()
    if inside:
        step = DDP(torch.compile(model, backend="aot_eager"))
    else:
        step = torch.compile(DDP(model), backend="aot_eager")
    train(step, sgd(model), mine(batches(size), rank, size))
    assert_equal(model.parameters(), alone(size))


def test_rule_4_a_compiled_step_with_collectives_runs(rank, size):
    torch._dynamo.reset()

    @torch.compile(backend="aot_eager")
    def step(x):
        y = x * 2
        dist.all_reduce(y)
        return y + 1

    assert torch.equal(step(torch.ones(3)), torch.full((3,), 2.0 * size + 1))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("shard_state", [0, 1])
def test_a_whole_step_of_a_distributed_optimizer_is_compiled(shard_state, backend, rank, size):
    """Hooks of ringcomm and its step() are not traced: they wait for other ranks."""
    torch._dynamo.reset()
    model = network()
    optimizer = ringcomm.torch.DistributedOptimizer(sgd(model), shard_state=shard_state)

    @torch.compile(backend=backend)
    def step(x):
        optimizer.zero_grad()
        loss_of(model(x)).backward()
        optimizer.clip_grad_norm_(1e6)
        optimizer.step()

    for x in mine(batches(size), rank, size):
        step(x)
    assert_equal(model.parameters(), alone(size))


# --- ZeRO-1 ---------------------------------------------------------------------------------------
def zero(model, **options):
    return ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.AdamW, lr=0.01, **options
    )


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


@pytest.mark.parametrize("as_view", [False, True])
def test_zero_redundancy_optimizer_equals_one_process(as_view, rank, size):
    model = network()
    ddp = DDP(model)
    optimizer = zero(model, parameters_as_bucket_view=as_view)
    train(ddp, optimizer, mine(batches(size), rank, size))
    assert_equal(model.parameters(), alone(size, adamw), 1e-10)
    optimizer.consolidate_state_dict(0)
    if rank == 0:
        assert len(optimizer.state_dict()["state"]) == len(list(model.parameters()))


@needs_any_backend
def test_zero_overlapped_with_ddp_equals_one_process(rank, size):
    from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step

    model = network()
    ddp = DDP(model, gradient_as_bucket_view=True, static_graph=True)
    optimizer = ZeroRedundancyOptimizer(
        ddp.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1
    )
    ddp.register_comm_hook(None, hook_with_zero_step(default_hooks.allreduce_hook, ddp, optimizer))
    xs = batches(size)
    plain = network()
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    before, n_updates = model[0].weight.detach().clone(), 0
    for x in [*xs, *xs]:
        ddp.zero_grad()
        loss_of(ddp(x.chunk(size)[rank])).backward()
        optimizer.step()
        if n_updates or not torch.equal(model[0].weight, before):
            n_updates += 1  # the first steps find out the order of buckets, and change nothing
            train(plain, reference, [x])
    assert n_updates >= STEPS
    assert_equal(model.parameters(), [p.detach() for p in plain.parameters()])


# --- FSDP -----------------------------------------------------------------------------------------
def shard(model, mesh, **options):
    from torch.distributed.fsdp import fully_shard

    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def mesh_of(shape, names):
    return dist.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=names)


@needs_fsdp2
@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}], ids=str)
def test_fsdp2_equals_one_process(options, rank, size):
    model = shard(network(), mesh_of((size,), ("shard",)), **options)
    train(model, adamw(model), mine(batches(size), rank, size))
    full = [p.full_tensor() for p in model.parameters()]
    assert_equal(full, alone(size, adamw), 1e-10)
    held = sum(p.to_local().numel() for p in model.parameters())
    assert held < sum(p.numel() for p in full)


@needs_fsdp2
def test_sharded_parameters_need_no_distributed_optimizer_and_are_refused(rank, size):
    model = shard(network(), mesh_of((size,), ("shard",)))
    with pytest.raises(TypeError, match=r"0.weight is a DTensor, whose gradient FSDP"):
        ringcomm.torch.DistributedOptimizer(adamw(model), model.named_parameters())


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("keeps_parameters", [True, False])
def test_fsdp1_equals_one_process(strategy, keeps_parameters, rank, size):
    from torch.distributed import fsdp

    model = fsdp.FullyShardedDataParallel(
        network(),
        sharding_strategy=fsdp.ShardingStrategy[strategy],
        auto_wrap_policy=fsdp.wrap.ModuleWrapPolicy({nn.Linear}),
        use_orig_params=keeps_parameters,
        device_id=torch.device("cpu"),  # without it FSDP1 wants an accelerator
    )
    train(model, adamw(model), mine(batches(size), rank, size))
    whole = fsdp.FullStateDictConfig(rank0_only=False)
    with model.state_dict_type(model, fsdp.StateDictType.FULL_STATE_DICT, whole):
        full = list(model.state_dict().values())
    assert_equal(full, alone(size, adamw), 1e-10)


@needs_fsdp2
def test_hsdp_equals_one_process(rank, size):
    if size % 2:
        pytest.skip("2 replicas need an even number of ranks")
    model = shard(network(), mesh_of((2, size // 2), ("replicate", "shard")))
    train(model, adamw(model), mine(batches(size), rank, size))
    assert_equal([p.full_tensor() for p in model.parameters()], alone(size, adamw), 1e-10)


@needs_fsdp2
def test_fsdp2_clips_the_norm_of_all_shards(rank, size):
    model = shard(network(), mesh_of((size,), ("shard",)))
    loss_of(model(batches(size)[0].chunk(size)[rank])).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-3).full_tensor()
    plain = network()
    loss_of(plain(batches(size)[0])).backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 1e-3)
    assert (norm - expected).abs() <= 1e-12 * expected


@needs_fsdp2
def test_checkpoints_of_dcp_come_back_on_other_meshes(rank, size, tmp_path_factory):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    where = [str(tmp_path_factory.mktemp("dcp"))]
    dist.broadcast_object_list(where)
    model = shard(network(), mesh_of((size,), ("shard",)))
    train(model, adamw(model), mine(batches(size), rank, size))
    expected = [p.full_tensor() for p in model.parameters()]
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=where[0])
    torch.manual_seed(9)
    whole = network()
    nn.init.zeros_(whole[0].weight)
    state = {"model": get_model_state_dict(whole)}
    dcp.load(state, checkpoint_id=where[0])  # from shards to whole tensors
    set_model_state_dict(whole, state["model"])
    assert_equal(whole.parameters(), expected, 0)
    pending = dcp.async_save(
        {"model": get_model_state_dict(model)},
        checkpoint_id=where[0] + "-async",
        process_group=dist.new_group(),  # a thread of its own communicates in it
    )
    x = torch.ones(3)
    dist.all_reduce(x)  # goes on beside it
    pending.result()


# --- DTensor, tensor and sequence parallel, pipelines -----------------------------------------
def test_dtensors_are_sharded_replicated_and_summed(rank, size):
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh = mesh_of((size,), ("x",))
    whole = torch.arange(2.0 * size * 3).reshape(2 * size, 3)
    x = distribute_tensor(whole, mesh, [Shard(0)])
    assert torch.equal(x.to_local(), whole[2 * rank : 2 * rank + 2])
    assert torch.equal(x.redistribute(mesh, [Shard(1)]).full_tensor(), whole)
    assert torch.equal(x.redistribute(mesh, [Replicate()]).to_local(), whole)
    partial = DTensor.from_local(torch.ones(4), mesh, [Partial()])
    assert torch.equal(partial.full_tensor(), torch.full((4,), float(size)))
    other = distribute_tensor(whole.T.contiguous(), mesh, [Replicate()])
    assert torch.equal((x @ other).full_tensor(), whole @ whole.T)


@pytest.mark.parametrize("is_sequence", [False, True], ids=["tensor", "sequence"])
def test_tensor_parallel_equals_one_process(is_sequence, rank, size):
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    width = 12  # of the hidden layer: every size of job here divides it
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 6)).double()
    model = copy.deepcopy(plain)
    mesh = mesh_of((size,), ("tp",))
    layout = Shard(0) if is_sequence else Replicate()
    parallelize_module(
        model,
        mesh,
        {
            "0": ColwiseParallel(input_layouts=layout),
            "2": RowwiseParallel(output_layouts=Replicate()),
        },
    )
    x = batches(size)[0]
    optimizer, reference = sgd(model), sgd(plain)
    for _ in range(3):
        optimizer.zero_grad(), reference.zero_grad()
        loss_of(model(x.chunk(size)[rank] if is_sequence else x)).backward()
        loss_of(plain(x)).backward()
        optimizer.step(), reference.step()
    full = [getattr(p, "full_tensor", lambda p=p: p)() for p in model.parameters()]
    assert_equal(full, [p.detach() for p in plain.parameters()])


@needs_scaling
@pytest.mark.parametrize("name", ["ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B"])
def test_pipelines_equal_one_process(name, rank, size):
    from torch.distributed import pipelining

    schedule_class = getattr(pipelining, name)
    n_per_rank = 2 if "Interleaved" in name else 1
    n_stages = size * n_per_rank
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()).double() for _ in range(n_stages)]
    plain = copy.deepcopy(nn.Sequential(*layers))
    x = batches(size)[0]
    own = [rank + i * size for i in range(n_per_rank)]
    stages = [pipelining.PipelineStage(layers[i], i, n_stages, torch.device("cpu")) for i in own]
    stage = stages if n_per_rank > 1 else stages[0]
    schedule = schedule_class(
        stage, n_microbatches=size * BATCH // 2, loss_fn=lambda y, _: loss_of(y)
    )
    losses = []
    first, last = rank == 0, rank == size - 1
    schedule.step(*([x] if first else []), **({"target": x, "losses": losses} if last else {}))
    for piece in x.chunk(size * BATCH // 2):
        (loss_of(plain(piece)) / (size * BATCH // 2)).backward()
    for i in own:
        got = [p.grad for p in layers[i].parameters()]
        assert_equal(got, [p.grad for p in plain[i].parameters()])


# --- the process group's life ---------------------------------------------------------------------
def test_loader_workers_leave_the_group_alone(rank, size):
    data = torch.utils.data.TensorDataset(torch.arange(8.0))
    sampler = torch.utils.data.DistributedSampler(data, shuffle=False)
    loader = torch.utils.data.DataLoader(data, batch_size=2, sampler=sampler, num_workers=1)
    seen = torch.cat([x for (x,) in loader])
    total = seen.sum()
    dist.all_reduce(total)
    assert total >= torch.arange(8.0).sum()


def test_destroyed_and_made_again(rank, size):
    x = torch.ones(2)
    dist.destroy_process_group()
    assert not dist.is_initialized()
    dist.init_process_group("ringcomm", init_method="mpi://")
    dist.all_reduce(x)
    assert (x == size).all()
