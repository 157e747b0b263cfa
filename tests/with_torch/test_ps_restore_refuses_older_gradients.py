"""After a restore the gradients of the weights before it are refused, and training goes on."""

import threading

import pytest
import torch
from ps_optimizer_wrap import on_workers
from training_models import weights

import ringcomm as rc
from ringcomm.torch import ps


def backward(model):
    model(torch.ones(4, 5, dtype=torch.float64)).square().mean().backward()


@pytest.mark.parametrize("load", [ps.restore, ps.load])
def test_after_a_restore_training_goes_on_only_with_the_restored_weights(tmp_path, load):
    def body(rank, model, optimizer):
        backward(model)
        optimizer.step()
        trained = weights(model)
        rc.barrier()
        if rank == 0:
            ps.save(tmp_path, background=False)
        with torch.no_grad():
            model[0].weight.zero_()
        optimizer.push_parameters()
        if rank == 0:
            load(tmp_path)
        rc.barrier()
        with pytest.raises(rc.RingcommError, match=r"loaded a checkpoint.*pull_parameters"):
            backward(model)
        optimizer.zero_grad()
        optimizer.pull_parameters()
        assert all(map(torch.equal, weights(model), trained))
        backward(model)
        optimizer.step()

    on_workers(3, body)


def test_a_gradient_of_weights_before_a_restore_is_refused_in_step_too(tmp_path):
    def body(rank, model, optimizer):
        if rank == 0:
            ps.save(tmp_path, background=False)
        backward(model)
        rc.barrier()
        if rank == 0:
            ps.restore(tmp_path)
        rc.barrier()
        with pytest.raises(rc.RingcommError, match="loaded a checkpoint"):
            optimizer.step()

    on_workers(2, body, overlap=False)


def test_a_worker_that_computes_meanwhile_hears_of_a_restore_later(tmp_path):
    has_ended = threading.Event()

    def body(rank, model, optimizer):
        if rank == 0:
            ps.save(tmp_path, background=False)
            ps.restore(tmp_path)  # does not wait for ever
            has_ended.set()
        else:
            assert has_ended.wait(30)
        with pytest.raises(rc.RingcommError, match="loaded a checkpoint"):
            backward(model)

    on_workers(2, body)
