"""The exceptions: their tree, and that they survive pickling and copying."""

import copy
import pickle

import ringcomm as rc


def test_errors_survive_pickling_and_copying():
    failed = rc.PeerFailedError("text", rank=3, reason="died")
    late = rc.CommTimeoutError("text", missing=[1, 2])
    for again in (pickle.loads(pickle.dumps(failed)), copy.copy(failed)):
        assert (str(again), again.rank, again.reason) == ("text", 3, "died")
    assert pickle.loads(pickle.dumps(late)).missing == (1, 2)


def test_the_exception_tree():
    for kind in (
        rc.MismatchError,
        rc.PeerFailedError,
        rc.CommTimeoutError,
        rc.ConfigError,
        rc.NotInitializedError,
    ):
        assert issubclass(kind, rc.RingcommError)
    assert issubclass(rc.ServerLostError, rc.PeerFailedError)
    assert issubclass(rc.RingcommError, RuntimeError)
