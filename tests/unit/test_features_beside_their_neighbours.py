"""A feature beside its neighbour: rules that either of the two keeps while it is alone."""

from types import SimpleNamespace

import numpy as np
import pytest
from ps_ranks_as_threads import run_workers

from ringcomm import ps
from ringcomm.codec import TopK
from ringcomm.ps.client.dense.compress_pushes import Packer
from ringcomm.ps.compression import spec_of
from ringcomm.ps.protocol.frames import Status
from ringcomm.ps.table_spec import Spec
from ringcomm.ps.update_modes import Mode


# --- error feedback beside rounds that do without a push ----------------------------------------
class PushedBlock:
    """The only block of a table with rounds and error feedback, as its worker pushes it."""

    def __init__(self):
        compression = spec_of("table", TopK(0.25), None, error_feedback=True)
        updater, mode = ps.optim.SGD(1.0).to_json(), Mode("first_of", 1)
        spec = Spec("w", "dense", "float32", (8,), updater, mode, 8, 0.0, 1, {}, compression)
        self.packer = Packer.of(spec, sender=0)

    def push(self, gradient):
        """Push it; return the function that takes the status of the server's reply."""
        memory = {0: np.empty(1000, np.uint8)}
        _, on_reply = self.packer.packing(1.0, memory, lambda _: ())(0, gradient, lambda _: None)
        return lambda status: on_reply(SimpleNamespace(header=SimpleNamespace(status=status)))

    @property
    def kept(self):
        out = np.zeros(8, np.float32)
        self.packer.write_residual(out, [0, 8], 1.0)
        return out


@pytest.mark.parametrize("order", ["late skipped", "skipped late"])
def test_a_push_that_is_late_in_a_round_that_is_skipped_is_kept_once(order):
    block = PushedBlock()
    gradient = np.arange(1, 9, dtype=np.float32)
    answer = block.push(gradient)
    for each in order.split():
        if each == "late":
            answer(Status.LATE)
        else:
            block.packer.take_all_back()
    np.testing.assert_array_equal(block.kept, gradient)


@pytest.mark.parametrize("nothing", ["None", "weight 0"])
def test_a_skipped_round_without_a_gradient_of_this_worker_keeps_no_earlier_one(nothing):
    steps = np.arange(48, dtype=np.float32).reshape(3, 2, 8) + 1

    def body(rank):
        t = ps.table("w", 8, updater=ps.optim.SGD(1.0), mode="sync", compression=TopK(0.25))
        for k, x in enumerate(steps[:, rank]):
            is_left_out = (k, rank) == (1, 1)
            if is_left_out and nothing == "None":
                t.push(None, hold=True)
            else:
                t.push(x, weight=0 if is_left_out else 1, hold=True)
            t.release(None if k == 1 else 1.0).wait()
        return t.pull().wait(), t.residual

    (values, first), (_, second) = run_workers(2, body)
    counted = steps.sum(axis=(0, 1)) - steps[1, 1]
    np.testing.assert_array_equal(-2 * values + first + second, counted)
