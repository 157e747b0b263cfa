"""Faults with arrays on GPUs."""

from mutations.mutation import Mutation

GPU = [
    Mutation(
        "gpu-values-of-servers-are-not-awaited",
        "gpu",
        "torch/backward/gpu_staging.py",
        "device.await_event(self._adapter.stream(self._index), self._copied.handle)",
        "device.is_reached(self._copied.handle)",
        "forward() reads parameters that the servers' values have not reached",
        ("gpu/test_ps_training.py",),
    ),
    Mutation(
        "gpu-gradients-for-servers-are-not-awaited",
        "gpu",
        "torch/backward/gpu_staging.py",
        "while not self.is_idle:",
        "while self.is_idle and self._copied is not None:",
        "a gradient is pushed before the GPU has copied it to host memory",
        ("gpu/test_ps_training.py",),
    ),
    Mutation(
        "gpu-a-result-is-not-awaited",
        "gpu",
        "gpu/executor/streams.py",
        "device.await_event(self._issue.adapter.stream(device.index), self._done.handle)",
        "device.is_reached(self._done.handle)",
        "a caller's stream reads a result that is not there yet",
        (
            "gpu/test_streams.py",
            "gpu/test_collectives.py",
        ),
    ),
    Mutation(
        "gpu-arrays-are-not-awaited",
        "gpu",
        "gpu/executor/streams.py",
        "for event in self.ready:",
        "for event in self.ready[1:]:",
        "a collective reads an array before the caller's stream has written it",
        (
            "gpu/test_streams.py",
            "gpu/test_collectives.py",
        ),
    ),
    Mutation(
        "gpu-launches-are-in-any-order",
        "gpu",
        "gpu/executor/team.py",
        "if self._turn != place:",
        "if self._turn > place:",
        "two ranks launch in different orders, and their streams wait for each other",
        (
            "gpu/test_collectives.py",
            "gpu/test_streams.py",
        ),
    ),
    Mutation(
        "gpu-streams-are-not-freed",
        "gpu",
        "gpu/executor/team.py",
        """\
                if not is_reached:
                    self._end_waits(done, kept)""",
        """\
                if is_reached:
                    self._end_waits(done, kept)""",
        "torch.cuda.synchronize() never returns once a rank has died",
        ("gpu/test_dead_or_stopped_gpu.py",),
    ),
    Mutation(
        "gpu-what-breaks-off-is-left",
        "gpu",
        "gpu/executor/team.py",
        "self._end_waits(Event(self._gpu.device, self._own_transport.stream), keeps)",
        "Event(self._gpu.device, self._own_transport.stream)",
        "a stream stands for ever behind half an operation",
        ("gpu/test_dead_or_stopped_gpu.py",),
    ),
    Mutation(
        "gpu-a-stream-is-filled",
        "gpu",
        "gpu/executor/team.py",
        "if not transport.meets_on_stream or number % _PHASES_AHEAD == 0:",
        "if not transport.meets_on_stream:",
        "a stream that stands still blocks who would free it",
        ("gpu/test_dead_or_stopped_gpu.py",),
    ),
    Mutation(
        "gpu-each-rank-sets-up-what-it-can",
        "gpu",
        "gpu/executor/transport_setup.py",
        """\
        if not found:
""",
        """\
        if not mine.problem:
""",
        "ranks of a group move data in different ways",
        ("gpu/test_transport_setup.py",),
    ),
    Mutation(
        "gpu-a-group-leaves-its-streams",
        "gpu",
        "engine/peers/groups.py",
        "        self.when_over(group_id)\n",
        "",
        "each group costs a stream, mapped memory and a communicator until the job ends",
        ("gpu/test_collectives.py",),
    ),
    Mutation(
        "gpu-a-group-is-over-before-its-streams",
        "gpu",
        "gpu/executor/team.py",
        "kept = [keeps, result, group]",
        "kept = [keeps, result]",
        "memory is unmapped while another rank's kernel writes to it",
        ("gpu/test_collectives.py",),
    ),
    Mutation(
        "gpu-the-late-rank-is-another",
        "gpu",
        "gpu/transports/ipc.py",
        "behind = np.flatnonzero((flags - own).view(np.int32) < 0)",
        "behind = np.flatnonzero((flags - own).view(np.int32) > 0)",
        "the timeout names a rank that is not late",
        ("gpu/test_dead_or_stopped_gpu.py",),
    ),
    Mutation(
        "gpu-a-fused-step-overwrites-weights",
        "gpu",
        "torch/zero/fused_update_across_gpus.py",
        """\
        self._take_changed_weights()
""",
        "",
        "what somebody writes to 16-bit weights is undone by the next step",
        ("gpu/test_shard_state_fused_update.py",),
    ),
    Mutation(
        "gpu-a-replaced-gradient-is-not-read",
        "gpu",
        "torch/zero/fused_update_across_gpus.py",
        "            place.copy_(gradient)",
        "            pass",
        "a gradient that the user has replaced does not count",
        ("gpu/test_shard_state_fused_update.py",),
    ),
    Mutation(
        "gpu-a-shared-gpu-gets-nccl",
        "gpu",
        "gpu/transports/transport_choice.py",
        "if shared and not may_share:",
        "if shared and may_share:",
        "NCCL is asked for what it refuses",
        ("gpu/test_transport_choice.py",),
    ),
]
