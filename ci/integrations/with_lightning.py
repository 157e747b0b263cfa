"""Lightning over ringcomm: DDP and FSDP2, validation, a checkpoint and going on from it.

    mpirun -np 2 python ci/integrations/with_lightning.py

Ranks print a line each if they equal one process; ci/matrix --frameworks runs it.
"""

import contextlib
import io
import tempfile
import warnings
from pathlib import Path

import lightning
import torch
from lightning.pytorch.plugins.environments import MPIEnvironment
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from oracle import (
    BATCH,
    digits,
    judged_alone,
    network,
    require_ringcomm,
    require_same_weights,
    sgd,
    trained_alone,
)
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

import ringcomm.torch


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = network()

    def training_step(self, batch):
        x, y = batch
        return nn.functional.cross_entropy(self.network(x), y)

    def validation_step(self, batch):
        x, y = batch
        scores = self.network(x)
        self.log("loss", nn.functional.cross_entropy(scores, y), sync_dist=True)
        self.log("accuracy", (scores.argmax(1) == y).double().mean(), sync_dist=True)

    def configure_optimizers(self):
        return sgd(self.parameters())


class ShardedClassifier(Classifier):
    def configure_model(self):
        for layer in (self.network[0], self.network[2]):
            if not isinstance(layer, torch.distributed.fsdp.FSDPModule):
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])


def trainer(strategy, epochs):
    return lightning.Trainer(
        accelerator="cpu",
        devices=ringcomm.torch.size(),
        strategy=strategy,
        max_epochs=epochs,
        use_distributed_sampler=False,  # Lightning's own shuffles
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def shared_out(dataset):
    """Return this rank's batches: all ranks' together are consecutive samples."""
    return DataLoader(dataset, BATCH, sampler=DistributedSampler(dataset, shuffle=False))


def ddp():
    return DDPStrategy(process_group_backend="ringcomm")


def fsdp2():
    return ModelParallelStrategy(
        data_parallel_size=ringcomm.torch.size(),
        tensor_parallel_size=1,
        process_group_backend="ringcomm",
    )


def train(make_model, make_strategy, folder):
    """Train an epoch, save, load into a new model and train another; return that one's trainer."""
    dataset, _ = digits()
    size = ringcomm.torch.size()
    loader = shared_out(dataset)
    first = trainer(make_strategy(), 1)
    first.fit(make_model(), loader)
    if size > 1:  # which Lightning finds by itself
        assert isinstance(first.strategy.cluster_environment, MPIEnvironment)
    assert (first.world_size, first.global_rank) == (size, ringcomm.torch.rank())
    assert first.global_step == len(dataset) // (BATCH * size)
    first.save_checkpoint(folder / "after-1")
    second = trainer(make_strategy(), 2)
    second.fit(make_model(), loader, ckpt_path=folder / "after-1")
    assert second.global_step == 2 * first.global_step
    return second


def whole(module):
    """Return a network with all weights of a trained module, sharded or not."""
    full = network()
    tensors = {
        name: each.full_tensor() if hasattr(each, "full_tensor") else each
        for name, each in module.network.state_dict().items()
    }
    full.load_state_dict(tensors)
    return full


def main():
    ringcomm.torch.init_process_group()  # else Lightning starts MPI, without our settings
    size = ringcomm.torch.size()
    folder = ringcomm.broadcast_object(tempfile.mkdtemp() if ringcomm.rank() == 0 else None)
    dataset, tests = digits()
    expected = trained_alone(network(), dataset, batch=BATCH * size, epochs=2)
    for make_model, strategy in ((Classifier, ddp), (ShardedClassifier, fsdp2)):
        path = Path(folder) / strategy.__name__
        done = train(make_model, strategy, path)
        require_ringcomm(size)
        require_same_weights(whole(done.lightning_module), expected)
        with contextlib.redirect_stdout(io.StringIO()):  # a table
            [metrics] = done.validate(done.lightning_module, shared_out(tests))
        loss, accuracy = judged_alone(expected, tests)
        assert abs(metrics["loss"] - loss) < 1e-6, (metrics, loss)
        assert abs(metrics["accuracy"] - accuracy) < 1e-6, (metrics, accuracy)
        print(f"lightning {lightning.__version__}, {strategy.__name__}: equal", flush=True)


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    main()
