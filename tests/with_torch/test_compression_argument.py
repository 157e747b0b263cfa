"""What an argument `compression` means, and which compressors are equal."""

import pytest
import torch
from harness import errors_of_ranks, outcomes
from training_models import data, fit, models, share, wrap

import ringcomm as rc
import ringcomm.torch as hvd
from ringcomm import codec
from ringcomm.torch.compression import compressor_of, name_of


class Scaled:
    """Sends tensors multiplied by a factor."""

    def __init__(self, factor):
        self.factor, self.seen = factor, []

    def compress(self, x):
        self.seen.append(x)
        return x * self.factor, None

    def decompress(self, x, _ctx):
        return x / self.factor


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (None, hvd.Compression.none),
        ("fp16", hvd.Compression.fp16),
        ("bf16", hvd.Compression.bf16),
        (codec.Identity(), hvd.Compression.none),
        (codec.BF16(), hvd.Compression.bf16),
        (hvd.Compression.fp16, hvd.Compression.fp16),
        (Scaled, Scaled),
    ],
)
def test_words_codecs_and_compressors_mean_one_thing(given, meant):
    assert compressor_of("x", given) is meant


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("given", ["int8", codec.TopK(0.1), "fp61", 16])
def test_others_are_refused_before_the_first_step_and_on_every_rank(given, size):
    def body(rank):
        with pytest.raises(ValueError, match=r"^DistributedOptimizer: compression is "):
            wrap(models(1)[0], compression=given)
        with pytest.raises(ValueError, match="compression is "):
            hvd.allreduce(torch.ones(2), compression=given)
        return hvd.allreduce(torch.tensor(rank), op=hvd.Sum).item()

    assert outcomes(size, body) == [sum(range(size))] * size


@pytest.mark.parametrize("each", [hvd.Compression.none, hvd.Compression.fp16, Scaled, Scaled(2.0)])
def test_equal_compressors_have_one_name_and_no_other_has_it(each):
    others = [hvd.Compression.bf16, type("Scaled", (), {"__module__": "elsewhere"}), Scaled(3.0)]
    assert name_of(each) == name_of(Scaled(2.0) if isinstance(each, Scaled) else each)
    assert name_of(each) not in map(name_of, others)


def test_ranks_whose_compressors_have_other_settings_all_hear_of_it():
    def body(rank):
        model = models(1)[0]
        fit(model, wrap(model, compression=Scaled(2.0 + rank)), share(data(1, 2), rank, 2))

    for error in errors_of_ranks(2, body):
        assert isinstance(error, rc.MismatchError)
        assert "Scaled(factor=2.0)" in str(error)
        assert "Scaled(factor=3.0)" in str(error)


def test_a_bucket_keeps_its_reduction_from_step_to_step():
    """Values that a compressed reduction drops can be sent with the next step."""

    def body(rank):
        (model,) = models(1)
        optimizer = wrap(model, compression=Scaled(2.0))
        batches = share(data(4, 2), rank, 2)
        fit(model, optimizer, batches[:2])  # after the first step, buckets are made anew
        before = [bucket.reduction for bucket in optimizer._reducer.plan.buckets]
        fit(model, optimizer, batches[2:])
        assert [bucket.reduction for bucket in optimizer._reducer.plan.buckets] == before

    assert outcomes(2, body) == [None, None]
