"""Checkpoint: a job goes on where it was, on any number of ranks, whatever ended it."""

import copy
import itertools
import os
import signal
import stat
import subprocess
import sys
import threading
import zipfile

import pytest
import torch
from harness import HANG_S, at_length, errors_of_ranks, run_job, run_ranks
from planted_files import WITHOUT_END, damaged, in_time, plant
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader
from training_models import SMALL, copies, network, weights, wrap

import ringcomm as rc
import ringcomm.torch as hvd
from ringcomm.data import Loader, ShardedSampler
from ringcomm.regular_files import BrokenFileError
from ringcomm.torch.training import checkpoint_files as files

SAMPLES = 64


def adam(parameters):
    return torch.optim.Adam(parameters, lr=1e-2)


def samples():
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(SAMPLES, k, generator=generator, dtype=torch.float64) for k in (5, 3))


class Job:
    """What one rank trains."""

    def __init__(self, model, rank, size, folder, batch_size=None, **kwargs):
        self.model = model
        self.optimizer = wrap(model, adam)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 30)
        sampler = ShardedSampler(SAMPLES, rank=rank, size=size, remainder="uneven")
        self.loader = Loader(
            samples(), batch_size or 12 // size, sampler=sampler, optimizer=self.optimizer
        )
        self.checkpoint = hvd.Checkpoint(folder, **kwargs)
        self.step = 0

    @property
    def parts(self):
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "sampler": self.loader,
        }

    def train(self, until, saving_at=()):
        while self.step < until:
            for x, y in self.loader:
                self.optimizer.zero_grad()
                mse_loss(self.model(x), y).backward()
                self.optimizer.step()
                self.schedule.step()
                self.step += 1
                if self.step in saving_at:
                    self.checkpoint.save(self.step, **self.parts)
                if self.step == until:
                    break
        return weights(self.model)


@pytest.fixture
def trained(tmp_path):
    """Save at steps 3, 8 and 11 on 2 ranks; return the folder."""
    replicas = copies(network(), 2)

    def body(rank):
        Job(replicas[rank], rank, 2, tmp_path).train(11, saving_at=(3, 8, 11))

    run_ranks(2, body, settings=SMALL)
    return tmp_path


# --- going on -----------------------------------------------------------------------------------
@pytest.mark.parametrize("step", [3, 8, None])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_job_goes_on_as_if_it_had_not_ended(size, step, trained):
    """Global batches of 12 are the same whatever the number of ranks."""
    (whole,) = copies(network(), 1)
    expected = run_ranks(1, lambda rank: Job(whole, 0, 1, trained).train(20), settings=SMALL)[0]
    others = [nn.Sequential(*(copy.deepcopy(m) for m in network())) for _ in range(size)]
    for seed, model in enumerate(others):
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(seed)

    def body(rank):
        job = Job(others[rank], rank, size, trained)
        found = job.checkpoint.restore(step=step, rng=False, **job.parts)
        job.step = found.step
        return found.step, job.train(20)

    for found, got in run_ranks(size, body, settings=SMALL):
        assert found == (11 if step is None else step)
        for mine, want in zip(got, expected, strict=True):
            assert (mine - want).abs().max() <= 1e-10 * want.abs().max()


COUNTED = """
import os, signal, sys
import torch
import ringcomm as rc
import ringcomm.torch as hvd

rc.init()
model = torch.nn.Linear(2, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
checkpoint = hvd.Checkpoint(sys.argv[1])

@rc.on_checkpoint
def save(step):
    checkpoint.save(step, model=model, optimizer=optimizer)

found = checkpoint.restore(model=model, optimizer=optimizer)
print("from", found and found.step, flush=True)
made = 0
while True:
    model(torch.ones(1, 2)).sum().backward()
    made += 1
    if made == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGTERM)
    optimizer.step()
    optimizer.zero_grad()
"""


def test_what_is_saved_after_a_restart_has_a_larger_number_than_before(tmp_path):
    """Else the next restart would go back to the older one."""
    begins = []
    for n_steps in (5, 3, 2):
        command = [sys.executable, "-P", "-c", COUNTED, tmp_path, str(n_steps)]
        done = subprocess.run(
            command, timeout=HANG_S, check=False, capture_output=True, text=True
        )  # fmt: skip
        assert done.returncode == os.EX_TEMPFAIL, done.stderr
        begins += done.stdout.split("\n")[:1]
    assert begins == ["from None", "from 5", "from 8"]
    assert files.steps_in(tmp_path) == [5, 8, 10]


def test_an_empty_folder_is_a_new_job(tmp_path):
    replicas = copies(network(), 2)

    def body(rank):
        job = Job(replicas[rank], rank, 2, tmp_path / "new")
        assert job.checkpoint.latest() is None
        return job.checkpoint.restore(**job.parts)

    assert run_ranks(2, body) == [None, None]


def test_only_rank_0_must_see_the_folder(trained):
    replicas = copies(network(), 2)

    def body(rank):
        job = Job(replicas[rank], rank, 2, trained if rank == 0 else "/nonexistent")
        found = job.checkpoint.restore(rng=False, **job.parts)
        job.step = found.step
        return job.train(12, saving_at=(12,))

    one, two = run_ranks(2, body, settings=SMALL)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert files.steps_in(trained)[-1] == 12


def test_the_file_is_plain_torch(trained):
    content = torch.load(trained / "step-11.pt", weights_only=True)
    model = network()
    model.load_state_dict(content["model"])
    optimizer = adam(model.parameters())
    optimizer.load_state_dict(content["optimizer"])
    assert content["schedule"]["last_epoch"] == 11
    assert set(content) == {"model", "optimizer", "schedule", "ringcomm"}


def test_values_come_back_and_objects_may_be_left_out(tmp_path):
    values = {"best": 0.5, "names": ["a", None], "table": {"x": torch.arange(3)}}
    replicas = copies(network(), 2)

    def body(rank):
        checkpoint = hvd.Checkpoint(tmp_path)
        path = checkpoint.save(0, model=replicas[rank], **values)
        return path, checkpoint.restore()

    for path, found in run_ranks(2, body):
        assert path == tmp_path / "step-0.pt"
        assert (found.step, found.size, found.shard, found.shards) == (0, 2, None, ())
        table = found.values.pop("table")
        assert found.values == {"best": 0.5, "names": ["a", None]}
        assert torch.equal(table["x"], torch.arange(3))


# --- what each rank has for itself --------------------------------------------------------------
@pytest.mark.parametrize("size", [1, 2, 3])
def test_shards_come_back_to_as_many_ranks_and_as_files_to_others(size, tmp_path):
    def save(rank):
        hvd.Checkpoint(tmp_path).save(7, shard={"residual": torch.full((3,), rank)})

    def restore(rank):
        return hvd.Checkpoint(tmp_path).restore(rng=False)

    run_ranks(2, save)
    for rank, found in enumerate(run_ranks(size, restore)):
        if size == 2:
            assert torch.equal(found.shard["residual"], torch.full((3,), rank))
        else:
            assert found.shard is None
        parts = [torch.load(path, weights_only=True)["shard"] for path in found.shards]
        assert [int(part["residual"][0]) for part in parts] == [0, 1]


def test_a_shard_of_another_save_is_refused_on_every_rank(tmp_path):
    def save(rank):
        hvd.Checkpoint(tmp_path).save(7, shard=torch.full((3,), rank))

    run_ranks(2, save)
    files.write(tmp_path / "step-7.rank-1-of-2.pt", {"shard": torch.full((3,), 9)})
    errors = errors_of_ranks(2, lambda _: hvd.Checkpoint(tmp_path).restore(rng=False))
    [text] = {str(error) for error in errors}
    assert "rank 1: " in text
    assert "step-7.rank-1-of-2.pt: has changed" in text


@pytest.mark.parametrize("damage_to", ["a shard", "a shard and the file before", "a deletion"])
def test_a_checkpoint_with_a_broken_shard_is_skipped_with_a_warning(damage_to, tmp_path, caplog):
    def save(rank):
        for step in (1, 2, 3):
            hvd.Checkpoint(tmp_path).save(step, shard=torch.full((3,), step + rank), x=step)

    run_ranks(2, save)
    broken = tmp_path / "step-3.rank-1-of-2.pt"
    if damage_to == "a deletion":
        broken.unlink()
    else:
        damage(broken, "a bit")
    if damage_to == "a shard and the file before":
        damage(tmp_path / "step-2.pt", "a bit")
    step = 1 if damage_to == "a shard and the file before" else 2
    found = run_ranks(2, lambda _: hvd.Checkpoint(tmp_path).restore(rng=False))
    assert [each.step for each in found] == [step, step]
    assert [each.values["x"] for each in found] == [step, step]
    assert [int(each.shard[0]) for each in found] == [step, step + 1]
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == 3 - step
    assert "rank 1: " in warned[0]
    assert broken.name in warned[0]
    errors = errors_of_ranks(2, lambda _: hvd.Checkpoint(tmp_path).restore(step=3))
    assert all(broken.name in str(error) for error in errors)


def test_a_rank_that_does_not_see_the_folder_of_shards_goes_back_to_none(tmp_path):
    def save(rank):
        checkpoint = hvd.Checkpoint(tmp_path / "seen")
        checkpoint.save(1, x=1)
        checkpoint.save(2, shard=rank)

    run_ranks(2, save)
    folders = [tmp_path / "seen", tmp_path / "empty"]
    errors = errors_of_ranks(2, lambda rank: hvd.Checkpoint(folders[rank]).restore())
    assert all("all ranks must see the folder" in str(error) for error in errors)


@pytest.mark.parametrize("checks_sparse", [False, True])
def test_what_torch_saves_comes_back_of_any_dtype_and_layout(checks_sparse, tmp_path):
    x = torch.arange(6.0)
    saved = {
        "small": x.to(torch.float8_e4m3fn),
        "none": x[:0].to(torch.float8_e5m2),
        "one": x[3].to(torch.float8_e5m2),
        "half": x.to(torch.bfloat16),
        "sparse": x.reshape(2, 3).to_sparse(),
        "turned": x.reshape(2, 3).t(),
        "repeated": x[3].expand(4),
    }

    def body(rank):
        checkpoint = hvd.Checkpoint(tmp_path)
        checkpoint.save(1, saved=saved)
        return checkpoint.restore(rng=False).values["saved"]

    with torch.sparse.check_sparse_tensor_invariants(enable=checks_sparse):
        restored = run_ranks(2, body)
    for found in restored:
        for name, mine in saved.items():
            assert (found[name].dtype, found[name].layout) == (mine.dtype, mine.layout)
            assert torch.equal(found[name].to_dense().float(), mine.to_dense().float()), name


def test_a_lazy_module_takes_the_shapes_of_the_checkpoint(tmp_path):
    model = nn.Linear(4, 3)
    lazy = [nn.Sequential(nn.LazyLinear(3)) for _ in range(2)]

    def body(rank):
        checkpoint = hvd.Checkpoint(tmp_path)
        checkpoint.save(1, model=nn.Sequential(model))
        checkpoint.restore(model=lazy[rank], rng=False)

    run_ranks(2, body)
    assert all(torch.equal(each[0].weight, model.weight) for each in lazy)


RANDOM = """
import random, sys
import numpy as np, torch
import ringcomm as rc, ringcomm.torch as hvd

hvd.init()
def draw():
    return [random.random(), float(np.random.rand()), float(np.random.randn()),
            float(torch.rand(())), random.gauss(0, 1)]

def seed(n):
    random.seed(n), np.random.seed(n), torch.manual_seed(n)

checkpoint = hvd.Checkpoint(sys.argv[1])
if rc.size() == 2:
    seed(5 + rc.rank())
    draw()
    checkpoint.save(1)
    draws = rc.allgather_object(draw())
    assert draws[0] != draws[1]
    seed(0)
    checkpoint.restore()
    assert draw() == draws[rc.rank()]
else:
    seed(0)
    fresh = draw()
    seed(0)
    checkpoint.restore()
    assert draw() == fresh
print("right", flush=True)
"""


@pytest.mark.at_length
def test_random_generators_of_all_ranks_go_on(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(RANDOM)
    for size in (2, 1):
        job = run_job(size, script, tmp_path / "run", cwd=tmp_path)
        assert job.code == 0, job.output
        assert job.output.count("right") == size
        warned = "random generators of 2 ranks, and this job has 1 ranks: their generators stay"
        assert job.output.count(warned) == (size == 1), job.output


# --- whatever ends a job ------------------------------------------------------------------------
KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from ringcomm.torch.training import checkpoint_files as files

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

folder, moment = Path(sys.argv[1]), sys.argv[2]
files.write(files.main_path(folder, 1), {"x": torch.ones(1000)})
if moment == "half-way":
    def torch_save(content, file):
        file.write(b"PK half of it")
        file.flush()
        die()
    torch.save = torch_save
else:
    setattr(os, moment, die)
files.write(files.main_path(folder, int(sys.argv[3])), {"x": torch.zeros(1000)})
"""


@pytest.mark.parametrize("step", at_length([1, 2], [2]))
@pytest.mark.parametrize("moment", at_length(["half-way", "fsync", "replace"], ["replace"]))
def test_a_kill_within_a_save_leaves_the_one_before(moment, step, tmp_path):
    done = subprocess.run(
        [sys.executable, "-P", "-c", KILLED, tmp_path, moment, str(step)],
        timeout=HANG_S,
        check=False,
        capture_output=True,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert files.steps_in(tmp_path) == [1]
    assert torch.equal(files.read(tmp_path / "step-1.pt")["x"], torch.ones(1000))
    assert len(list(tmp_path.iterdir())) == 2  # and a part of the new one
    files.tidy(tmp_path, None)
    assert [path.name for path in tmp_path.iterdir()] == ["step-1.pt"]


def test_content_is_on_the_disk_before_its_name_and_the_name_before_the_end(tmp_path, monkeypatch):
    calls = []

    def recorded(name, real):
        def call(*args):
            at = args[0]
            is_folder = isinstance(at, int) and stat.S_ISDIR(os.fstat(at).st_mode)
            calls.append(f"{name} folder" if is_folder else name)
            return real(*args)

        monkeypatch.setattr(os, name, call)

    recorded("fsync", os.fsync)
    recorded("replace", os.replace)
    files.write(tmp_path / "a.pt", {"x": 1})
    assert calls == ["fsync", "replace", "fsync folder"]


@pytest.mark.parametrize("what", ["cut", "a bit", "no zip", "empty", "of somebody else"])
def test_a_broken_checkpoint_is_skipped_with_a_warning(what, trained, caplog):
    damage(trained / "step-11.pt", what)
    replicas = copies(network(), 2)

    def body(rank):
        job = Job(replicas[rank], rank, 2, trained)
        return job.checkpoint.restore(rng=False, **job.parts).step

    assert run_ranks(2, body) == [8, 8]
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "step-11.pt" in record.getMessage()


def damage(path, what):
    content = bytearray(path.read_bytes())
    if what == "cut":
        content = content[:-100]
    elif what == "a bit":
        content[len(content) // 2] ^= 1
    elif what == "no zip":
        content = b"hello"
    elif what == "empty":
        content = b""
    else:
        torch.save({"model": {}}, path)
        return
    path.write_bytes(content)


@pytest.mark.parametrize("what", WITHOUT_END)
def test_what_is_no_file_is_skipped_and_named(what, tmp_path, caplog):
    for step in (1, 2):
        run_ranks(2, lambda rank, s=step: hvd.Checkpoint(tmp_path).save(s, x=s, shard=[rank]))
    for path in (tmp_path / "step-2.rank-0-of-2.pt", tmp_path / "step-2.pt"):
        plant(path, what)
        with in_time():
            restored = run_ranks(2, lambda _: hvd.Checkpoint(tmp_path).restore())
        assert [each.values["x"] for each in restored] == [1, 1]
        assert path.name in caplog.records[-1].getMessage()


def test_a_file_of_which_a_bit_or_the_end_has_changed_is_named_or_reads_the_same(tmp_path):
    path = tmp_path / "step-1.pt"
    content = {"w": torch.arange(50.0) + 0.125, "n": 7}
    files.write(path, content)
    whole = path.read_bytes()
    n_named = 0
    copies = list(damaged(whole, *at_length([1500, 200], [60, 10])))
    for data in copies:
        path.write_bytes(data)
        try:
            found = files.read(path)
        except BrokenFileError as error:
            n_named += str(path) in str(error)
        else:  # the archive has parts that mean nothing here, such as dates
            n_named += 1
            assert found.keys() == content.keys()
            assert torch.equal(found["w"], content["w"])
            assert found["n"] == 7
    assert n_named == len(copies)


OURS = {
    "format": 1,
    "step": 2,
    "size": 1,
    "sampler": [None],
    "rng": [None],
    "shard": [None],
    "values": ["x"],
}


@pytest.mark.parametrize(
    "other",
    [
        {"step": "2"},
        {"step": -1},
        {"step": 3},
        {"size": 0},
        {"size": 2},
        {"values": [1]},
        {"values": ["y"]},
        {"values": None},
        {"sampler": 5},
        {"rng": []},
        {"shard": {}},
        {"shard": [5]},
        {"shard": [["step-2.rank-0-of-1.pt", 5]]},
        {"shard": [["step-2.rank-0-of-1.pt", "5", 5]]},
        {"shard": [["../secret.pt", 5, 5]]},
        {"shard": [["/dev/zero", 5, 5]]},
        {"shard": [["step-2.pt", 5, 5]]},
    ],
)
def test_a_file_that_others_have_written_is_skipped_and_named(other, tmp_path, caplog):
    run_ranks(1, lambda _: hvd.Checkpoint(tmp_path).save(1, x=1, shard=[5]))
    path = tmp_path / "step-2.pt"
    files.write(path, {"x": 2, "ringcomm": OURS | other})
    [found] = run_ranks(1, lambda _: hvd.Checkpoint(tmp_path).restore())
    assert (found.step, found.values, found.shard) == (1, {"x": 1}, [5])
    assert str(path) in caplog.text
    [error] = errors_of_ranks(1, lambda _: hvd.Checkpoint(tmp_path).restore(step=2))
    assert str(path) in str(error)
    lacking = {key: value for key, value in OURS.items() if key not in other}
    files.write(path, {"x": 2, "ringcomm": lacking})
    assert run_ranks(1, lambda _: hvd.Checkpoint(tmp_path).restore())[0].step == 1
    files.write(path, {"x": 2, "ringcomm": OURS})
    assert run_ranks(1, lambda _: hvd.Checkpoint(tmp_path).restore())[0].step == 2


@pytest.mark.parametrize("way", ["packed", "one part as many"])
def test_a_file_takes_no_more_memory_or_time_than_its_bytes(way, tmp_path, caplog):
    run_ranks(1, lambda _: hvd.Checkpoint(tmp_path).save(1, x=1))
    path = tmp_path / "step-2.pt"
    files.write(path, {"x": torch.zeros(1 << 16), "ringcomm": OURS})
    with zipfile.ZipFile(path) as archive:
        parts = {each.filename: archive.read(each) for each in archive.infolist()}
    kind = zipfile.ZIP_DEFLATED if way == "packed" else zipfile.ZIP_STORED
    with zipfile.ZipFile(path, "w", kind) as archive:
        for name, data in parts.items():
            archive.writestr(name, data)
        if way == "one part as many":
            largest = max(archive.infolist(), key=lambda each: each.file_size)
            archive.filelist += [largest] * 1000
    assert run_ranks(1, lambda _: hvd.Checkpoint(tmp_path).restore())[0].step == 1
    assert f"{path}: has {path.stat().st_size} bytes for " in caplog.text


def same(a, b):
    """Return whether trees of tensors, lists, dicts and numbers are equal."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


@pytest.mark.parametrize("damaged_name", ["step-2.rank-0-of-1.pt", "step-2.pt"])
def test_of_a_checkpoint_with_damage_the_one_before_is_restored(damaged_name, tmp_path, caplog):
    shards = {
        step: {"residual": torch.arange(40.0) * step + 0.125, "n": [step, {"x": 2.5}]}
        for step in (1, 2)
    }
    for step, shard in shards.items():
        run_ranks(1, lambda _, s=step, d=shard: hvd.Checkpoint(tmp_path).save(s, shard=d, x=s))
    path = tmp_path / damaged_name
    whole = path.read_bytes()
    n_back = 0
    for data in damaged(whole, *at_length([2000, 200], [40, 8])):
        path.write_bytes(data)
        caplog.clear()
        with in_time():
            [found] = run_ranks(1, lambda _: hvd.Checkpoint(tmp_path).restore())
        assert found.values["x"] == found.step, data
        assert same(found.shard, shards[found.step]), data
        if found.step == 1:
            n_back += 1
            assert str(path) in caplog.text, data
        else:  # the archive has parts that mean nothing here, such as dates
            assert damaged_name == "step-2.pt"
            assert caplog.text == "", data
    assert n_back > 20
    path.write_bytes(whole[: len(whole) // 2])
    errors = errors_of_ranks(1, lambda _: hvd.Checkpoint(tmp_path).restore(step=2))
    assert [type(error) for error in errors] == [rc.RingcommError]
    assert str(path) in str(errors[0])
    path.write_bytes(whole)
    [found] = run_ranks(1, lambda _: hvd.Checkpoint(tmp_path).restore())
    assert same(found.shard, shards[2])


def test_where_all_are_broken_no_job_begins_anew(trained):
    for path in trained.glob("step-*.pt"):
        damage(path, "cut")
    errors = errors_of_ranks(2, lambda _: hvd.Checkpoint(trained).restore())
    assert all(isinstance(error, rc.RingcommError) for error in errors)
    [text] = {str(error) for error in errors}
    for step in (3, 8, 11):
        assert f"step-{step}.pt" in text


@pytest.mark.parametrize(
    ("step", "parts", "message"),
    [
        (5, {}, "step-5.pt.*No such file"),
        (None, {"modle": nn.Linear(1, 1)}, r"has no modle; it has model, optimizer, schedule"),
        (None, {"model": nn.Linear(1, 1)}, "model does not fit: weight is missing in the checkpo"),
        (
            None,
            {"model": nn.Sequential(nn.Linear(5, 9))},
            r"0.weight is \(16, 5\) in.*\(9, 5\) her",
        ),
    ],
)
def test_what_cannot_be_restored_is_told_on_every_rank_and_loads_nothing(
    step, parts, message, trained
):
    replicas = [copy.deepcopy(parts) for _ in range(2)]
    before = [copy.deepcopy(p) for part in parts.values() for p in part.parameters()]

    def body(rank):
        with pytest.raises(rc.RingcommError, match=message):
            hvd.Checkpoint(trained).restore(step=step, rng=False, **replicas[rank])
        after = [p for part in replicas[rank].values() for p in part.parameters()]
        assert all(torch.equal(p, q) for p, q in zip(before, after, strict=True))
        rc.barrier()

    run_ranks(2, body)


class Refusing:
    """A part that one rank cannot load."""

    def __init__(self, *, refuses):
        self.refuses = refuses

    def state_dict(self):
        return {"x": 1}

    def load_state_dict(self, _):
        if self.refuses:
            raise KeyError("y")


def test_a_part_that_one_rank_cannot_load_is_an_error_on_all(tmp_path):
    """Alone it would end, and in an elastic job the others would go on without what it refuses."""
    run_ranks(3, lambda _: hvd.Checkpoint(tmp_path).save(1, part=Refusing(refuses=False)))

    def body(rank):
        hvd.Checkpoint(tmp_path).restore(part=Refusing(refuses=rank == 1), rng=False)

    errors = errors_of_ranks(3, body)
    assert [type(error) for error in errors] == [rc.RingcommError] * 3
    [text] = {str(error) for error in errors}
    assert f"checkpoint[{tmp_path}]: rank 1: KeyError: 'y'" in text


@pytest.mark.parametrize(("of_rank_0", "mine"), [([], "none"), ([3, 4], "step 4 as the last one")])
def test_no_job_begins_anew_while_another_rank_sees_a_later_checkpoint(of_rank_0, mine, tmp_path):
    """Rank 0 of the job that is started again may run on another host."""
    for name, steps in (("0", of_rank_0), ("1", [4, 5])):
        for step in steps:
            run_ranks(1, lambda _, n=name, s=step: hvd.Checkpoint(tmp_path / n).save(s, x=s))

    errors = errors_of_ranks(2, lambda rank: hvd.Checkpoint(tmp_path / str(rank)).restore())
    for each in errors:
        _, _, text = str(each).partition("]: ")
        assert text.startswith(f"rank 0 sees {mine}, and rank 1 sees step 5: the folder is not the")
    if of_rank_0:
        found = run_ranks(2, lambda rank: hvd.Checkpoint(tmp_path / str(rank)).restore(step=3))
        assert [each.values["x"] for each in found] == [3, 3], "the program has chosen"


@pytest.mark.parametrize("kind", ["file", "link"])
def test_what_is_no_folder_is_not_an_empty_one(kind, tmp_path):
    path = tmp_path / "runs"
    path.touch() if kind == "file" else path.symlink_to("nowhere")  # such as a host's mount
    errors = errors_of_ranks(2, lambda _: hvd.Checkpoint(path).restore())
    assert all("rank 0: " in str(each) and f"'{path}'" in str(each) for each in errors)


# --- samplers of DataLoaders ---------------------------------------------------------------------
def read_ahead(sampler, n):
    """As a DataLoader with workers does: take n batches of 8."""
    batches = iter(sampler.batches(8))
    return [next(batches) for _ in range(n)]


@pytest.mark.parametrize("size", [1, 2])
def test_what_workers_took_ahead_is_seen_after_a_restore(size, tmp_path):
    n = 64 * size

    def save(rank):
        sampler = ShardedSampler(n, seed=3)
        trained = read_ahead(sampler, 5)[:2]
        hvd.Checkpoint(tmp_path).save(2, sampler=sampler, consumed=16, rng=False)
        return [*itertools.chain(*trained)]

    def go_on(rank):
        sampler = ShardedSampler(n, seed=3)
        hvd.Checkpoint(tmp_path).restore(sampler=sampler, rng=False)
        return list(sampler)

    seen = itertools.chain(*run_ranks(size, save), *run_ranks(size, go_on))
    assert sorted(seen) == list(range(n))


@pytest.mark.parametrize("form", ["batch_sampler", "sampler"])
def test_a_dataloader_without_workers_knows_its_place_in_mid_epoch(form, tmp_path):
    n, data = 96, torch.arange(96)

    def loader_of(sampler):
        if form == "sampler":
            return DataLoader(data, 8, sampler=sampler)
        return DataLoader(data, batch_sampler=sampler.batches(8))

    def save(rank):
        sampler, seen = ShardedSampler(n, seed=3), []
        for batch in loader_of(sampler):
            seen += batch.tolist()
            if len(seen) == 16 * (rank + 1):  # unequally far
                break
        hvd.Checkpoint(tmp_path).save(2, sampler=sampler, rng=False)
        return seen

    def go_on(rank):
        sampler = ShardedSampler(n, seed=3)
        hvd.Checkpoint(tmp_path).restore(sampler=sampler, rng=False)
        return [x for batch in loader_of(sampler) for x in batch.tolist()]

    seen = itertools.chain(*run_ranks(2, save), *run_ranks(3, go_on))
    assert sorted(seen) == list(range(n))


def test_a_place_that_a_sampler_cannot_know_is_refused_on_every_rank(tmp_path):
    def body(rank):
        sampler = ShardedSampler(128)
        batches = iter(sampler.batches(8))
        next(batches)
        if rank == 0:
            list(batches)
        text = r"rank 1: ValueError: sampler is in the middle of epoch 0: 8 of 64 .*Pass consumed="
        with pytest.raises(rc.RingcommError, match=text):
            hvd.Checkpoint(tmp_path).save(1, sampler=sampler)
        return hvd.Checkpoint(tmp_path).steps()

    assert run_ranks(2, body) == [[], []]


def test_between_epochs_a_sampler_knows_its_place(tmp_path):
    sampler = ShardedSampler(24, rank=0, size=1)

    def body(rank):
        checkpoint = hvd.Checkpoint(tmp_path)
        checkpoint.save(0, sampler=sampler)
        list(sampler)
        checkpoint.save(1, sampler=sampler)
        sampler.set_epoch(0)
        checkpoint.restore(sampler=sampler)
        return sampler.epoch

    assert run_ranks(1, body) == [1]


@pytest.mark.parametrize("kind", ["Loader", "None"])
def test_consumed_is_for_a_sampler_alone(kind, tmp_path):
    def body(rank):
        sampler = Loader(samples(), 4) if kind == "Loader" else None
        text = rf"consumed=4 is for a ShardedSampler, and sampler is (a )?{kind}"
        with pytest.raises(rc.RingcommError, match=text):
            hvd.Checkpoint(tmp_path).save(1, sampler=sampler, consumed=4)

    run_ranks(1, body)


def test_a_sampler_that_was_not_saved_is_missed(tmp_path):
    def body(rank):
        checkpoint = hvd.Checkpoint(tmp_path)
        checkpoint.save(1, x=1)
        with pytest.raises(rc.RingcommError, match="saved without sampler="):
            checkpoint.restore(sampler=ShardedSampler(8), rng=False)

    run_ranks(2, body)


@pytest.mark.parametrize("rank_of_fault", [0, 1])
def test_a_save_that_fails_on_one_rank_fails_on_all_and_leaves_the_one_before(
    rank_of_fault, tmp_path, monkeypatch
):
    write, is_full = files.write, threading.local()

    def failing(path, content, **how):
        if getattr(is_full, "now", False):
            raise OSError(28, "No space left on device")
        write(path, content, **how)

    monkeypatch.setattr(files, "write", failing)

    def body(rank):
        checkpoint = hvd.Checkpoint(tmp_path)
        checkpoint.save(1, shard=rank, x=1)
        is_full.now = rank == rank_of_fault
        with pytest.raises(rc.RingcommError) as caught:
            checkpoint.save(2, shard=rank, x=2)
        is_full.now = False
        found = checkpoint.restore(rng=False)
        checkpoint.save(3, shard=rank, x=3)
        return str(caught.value), found.step, found.shard

    results = run_ranks(2, body)
    assert [each[1:] for each in results] == [(1, 0), (1, 1)]
    (text,) = {each[0] for each in results}
    assert f"step 2]: rank {rank_of_fault}: OSError: [Errno 28] No space left" in text
    assert "Checkpoints that exist are unchanged" in text
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {
        *(f"step-{step}.rank-{r}-of-2.pt" for step in (1, 3) for r in range(2)),
        "step-1.pt",
        "step-3.pt",
    }


class Odd:
    pass


def test_what_could_not_be_loaded_again_is_refused_when_it_is_saved(tmp_path):
    def body(rank):
        with pytest.raises(TypeError, match=r"rank 0: odd has a .*Odd, which torch\.load"):
            hvd.Checkpoint(tmp_path).save(1, fine=1, odd={"x": Odd()})
        rc.barrier()

    run_ranks(2, body)
    assert list(tmp_path.iterdir()) == []


# --- files --------------------------------------------------------------------------------------
@pytest.mark.parametrize("keep", [1, 2, None])
def test_the_last_so_many_stay_and_the_one_just_saved(keep, tmp_path):
    (tmp_path / "step-notes.pt").write_text("of the user")

    def body(rank):
        checkpoint = hvd.Checkpoint(tmp_path, keep=keep)
        for step in (1, 2, 10, 9):
            checkpoint.save(step, shard=rank, x=step)
        assert checkpoint.latest() == 10
        return checkpoint.steps()

    run_ranks(2, body)
    steps = files.steps_in(tmp_path)
    assert steps == ([1, 2, 9, 10] if keep is None else [9, 10])
    shards = {f"step-{step}.rank-{r}-of-2.pt" for step in steps for r in range(2)}
    mains = {f"step-{step}.pt" for step in steps}
    assert {path.name for path in tmp_path.iterdir()} == shards | mains | {"step-notes.pt"}


def test_a_job_that_went_back_keeps_what_it_saves_and_is_warned_once(tmp_path, caplog):
    def body(rank):
        checkpoint = hvd.Checkpoint(tmp_path, keep=2)
        for step in (1, 10, 11):
            checkpoint.save(step, shard=rank, x=step)
        for step in (3, 4):
            assert checkpoint.save(step, shard=rank, x=step).exists()
            found = checkpoint.restore(step=step, rng=False)
            assert (found.values["x"], found.shard) == (step, rank)

    run_ranks(2, body)
    assert files.steps_in(tmp_path) == [4, 10, 11]
    (record,) = caplog.records
    assert "later steps than 3, which was saved: 10, 11" in record.getMessage()


def test_a_step_saved_again_replaces_the_first(tmp_path):
    def body(rank):
        checkpoint = hvd.Checkpoint(tmp_path)
        for x in (1, 2):
            checkpoint.save(5, shard=[rank, x], x=x)
        found = checkpoint.restore(rng=False)
        return found.values["x"], found.shard

    assert run_ranks(2, body) == [(2, [0, 2]), (2, [1, 2])]


def test_a_step_whose_second_save_fails_is_as_the_first_left_it(tmp_path, monkeypatch):
    write = files.write

    def failing(path, content, **how):
        if "shard" not in content and content["x"] == 2:
            raise OSError(28, "No space left on device")
        write(path, content, **how)

    monkeypatch.setattr(files, "write", failing)

    def body(rank):
        checkpoint = hvd.Checkpoint(tmp_path, keep=1)
        checkpoint.save(5, shard=[rank, 1], x=1)
        with pytest.raises(rc.RingcommError, match="No space left"):
            checkpoint.save(5, shard=[rank, 2], x=2)
        first = checkpoint.restore(rng=False)
        rc.barrier()
        checkpoint.save(5, shard=[rank, 3], x=3)
        then = checkpoint.restore(rng=False)
        return [(each.values["x"], each.shard) for each in (first, then)]

    assert run_ranks(2, body) == [[(1, [0, 1]), (3, [0, 3])], [(1, [1, 1]), (3, [1, 3])]]
    assert len(list(tmp_path.iterdir())) == 3  # the main file, and a shard of each rank


def test_a_file_has_the_permissions_of_any_new_file(tmp_path):
    files.write(tmp_path / "a.pt", {})
    (tmp_path / "b").touch()
    assert (tmp_path / "a.pt").stat().st_mode == (tmp_path / "b").stat().st_mode


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: hvd.Checkpoint("x", keep=0), "keep is at least 1, or None, not 0"),
        (lambda: hvd.Checkpoint("x").save(-1), "a step is at least 0, not -1"),
        (lambda: hvd.Checkpoint("x").save(1, ringcomm=1), "no part can be called 'ringcomm'"),
        (lambda: hvd.Checkpoint("x").restore(ringcomm=1), "no part can be called 'ringcomm'"),
    ],
)
def test_arguments_that_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_ranks_that_save_different_steps_are_told(tmp_path):
    def body(rank):
        with pytest.raises(rc.MismatchError, match="rank 0 saves step 7, rank 1 step 8"):
            hvd.Checkpoint(tmp_path).save(7 + rank, a=1)

    run_ranks(2, body)
    assert not list(tmp_path.glob("step-*"))


def test_a_shard_on_some_ranks_only_is_refused_for_it_would_not_come_back(tmp_path):
    def body(rank):
        checkpoint = hvd.Checkpoint(tmp_path)
        with pytest.raises(rc.MismatchError, match=r"ranks \[0, 2\] pass no shard="):
            checkpoint.save(1, x=1, shard=[1.5] if rank == 1 else None)
        checkpoint.save(2, x=1, shard=[1.5] if rank == 1 else [])
        return checkpoint.restore(rng=False).shard

    assert run_ranks(3, body) == [[], [1.5], []]


def test_save_says_which_ranks_are_in_join(tmp_path):
    def body(rank):
        hvd.barrier()
        if rank == 0:
            with pytest.raises(rc.MismatchError, match=r"ranks \[1\] are in join\(\)"):
                hvd.Checkpoint(tmp_path).save(1, x=1)
        hvd.join()

    run_ranks(2, body)
