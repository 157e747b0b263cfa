"""Faults in how a job goes on after it has lost ranks."""

from mutations.mutation import Mutation

_MACHINE = "transport/membership/machine.py"
_TESTS = ("unit/test_membership.py",)

ELASTIC = [
    Mutation(
        "the-old-view-is-agreed-on",
        "fault",
        _MACHINE,
        "if not (state.has_new_loss and _all_have(state._lost_of, state)):",
        "if not _all_have(state._lost_of, state):",
        "ranks agree on the view that they have, whose communicators hold old messages",
        _TESTS,
    ),
    Mutation(
        "a-view-before-all-have-cleared",
        "fault",
        _MACHINE,
        "if state._cleared != state.lost or not _all_have(state._cleared_of, state):",
        "if state._cleared != state.lost:",
        "a rank works in the next view while another clears the memory of the old one",
        _TESTS,
    ),
    Mutation(
        "the-end-of-a-run-is-not-announced",
        "fault",
        _MACHINE,
        "return over, [Send(state.others, message), EndRun()]",
        "return over, [EndRun()]",
        "a rank that missed a DONE of a dead rank waits for others that are through",
        _TESTS,
    ),
    Mutation(
        "who-leaves-keeps-others-waiting",
        "fault",
        _MACHINE,
        "return _refuse_others(replace(state, phase=Phase.LEAVING))",
        "return replace(state, phase=Phase.LEAVING), []",
        "ranks that heal wait for one that has called shutdown()",
        _TESTS,
    ),
    Mutation(
        "all-have-saved-alike",
        "fault",
        "elastic/state.py",
        "best = max(all_ranks)",
        "best = all_ranks[0]",
        "all ranks go back to the commit of rank 0, though another has made more",
        ("unit/test_elastic_states.py",),
    ),
    Mutation(
        "dealt-is-trained-on",
        "fault",
        "data/loader.py",
        "return self.sampler.elastic_position(self._n_batches)",
        "return self.sampler.elastic_position()",
        "samples that a Loader has read ahead are lost with a rank",
        ("unit/test_elastic_samples.py",),
    ),
    Mutation(
        "a-step-shrinks-with-the-ranks",
        "fault",
        "data/sampler.py",
        "return self.batch_size * (sampler.first_size if is_global else sampler.size)",
        "return self.batch_size * sampler.size",
        "after a loss a step has fewer samples, though its number should stay the same",
        ("unit/test_elastic_samples.py",),
    ),
    Mutation(
        "the-first-size-is-todays",
        "fault",
        "data/sampler.py",
        'self.first_size = position["first_size"]',
        "self.first_size = self.size",
        "after a loss a step has fewer samples, though its number should stay the same",
        ("unit/test_elastic_samples.py",),
    ),
    Mutation(
        "a-rate-stays-as-it-was",
        "fault",
        "torch/training/learning_rates.py",
        'group["lr"] = group["lr"] * factor',
        'group["lr"] = group["lr"] * 1',
        "with scale_lr the rate is that of the ranks that there were before a loss",
        ("with_torch/test_elastic_training.py",),
    ),
]
