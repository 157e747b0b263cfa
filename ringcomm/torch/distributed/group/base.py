"""Base of ProcessGroup: its name and timeout, and how it starts operations."""

from __future__ import annotations

import functools
import json
import time
import weakref
import zlib
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch

from ringcomm.arrays.torch import TORCH
from ringcomm.elastic.views import begin_in_new_view
from ringcomm.engine.api.begin_next_view import heal, require_all_live
from ringcomm.engine.api.collectives import allgather_object
from ringcomm.engine.api.init_rank_size import engine
from ringcomm.engine.api.world import World, current
from ringcomm.engine.api.world import current as current_world
from ringcomm.engine.core.agreement import gather_bytes
from ringcomm.engine.core.call import Call, explain_mismatch
from ringcomm.engine.core.engine import Engine
from ringcomm.engine.core.group import Group
from ringcomm.engine.core.plan import Plan
from ringcomm.engine.operations.barrier import plan_barrier
from ringcomm.engine.operations.base import int_of
from ringcomm.errors import (
    CommTimeoutError,
    ConfigError,
    MismatchError,
    NotInitializedError,
    PeerFailedError,
    RingcommError,
)
from ringcomm.torch.distributed.compat import (
    DEFAULT_TIMEOUT,
    VERSION,
    CppBackend,
    backends_of,
    c10d,
    divide_by_present_size,
    error_types,
    groups_named,
    name_groups_from,
    renumber_default_group,
)
from ringcomm.torch.distributed.group.arguments import CallOptions, call_options
from ringcomm.torch.distributed.group.callback_names import (
    Path,
    is_in_callback,
    path_here,
)
from ringcomm.torch.distributed.group.device_backends import Devices, carries
from ringcomm.torch.distributed.group.work import CombinedWork, Work
from ringcomm.torch.distributed.rendezvous import make_store
from ringcomm.transport.channel import Channel

# --- reconfiguration ------------------------------------------------------------------------------
_PREFIX = "ringcomm process "


def own_handle() -> str:
    """Return the text that names this process to other ranks, in all views."""
    transport = _world().transport
    return f"{_PREFIX}{transport.view.members[transport.rank]}"


def group_of(handles: Collection[str], uuid: int, timeout_s: float) -> Group:
    """Return a group of these processes, of this view or, if ranks are lost, of the next one.

    Collective among them. All ranks that live make a new view, also those that no handle names.

    Args:
        handles: those of own_handle(); their order numbers the ranks, a set stands for the view's.
        uuid: only calls with the same number meet.
        timeout_s: how long to wait for the others, in seconds.

    Raises:
        ValueError: a handle is none, or names no process of the view, or one is named twice.
        MismatchError: the others pass the handles in another order.
        ConfigError: a rank is lost, and this job does not go on without lost ranks.
        CommTimeoutError: another process of the handles did not call this.
    """
    wanted = [_process_of(handle) for handle in handles]
    end = time.monotonic() + timeout_s
    while True:
        world = _world()
        try:
            if world.heals:
                world.presence.look(at_once=True)
                require_all_live()
            world.engine.state.require_unbroken()
            members = world.transport.view.members
            unknown = sorted(set(wanted) - set(members))
            if unknown:
                raise ValueError(
                    f"reconfigure: the handles name processes {unknown}, and the job has {members} "
                    "now: take the handles of ranks that live"
                )
            if isinstance(handles, set | frozenset):
                wanted.sort(key=members.index)
            if world.transport.view.members[world.transport.rank] not in wanted:
                raise ValueError(
                    f"reconfigure: no handle of this process ({own_handle()!r}) is among those "
                    "that were passed: ranks that are left out do not call it"
                )
            left_s = max(0.0, end - time.monotonic())
            ranks = [members.index(number) for number in wanted]
            return Group.of_job(ranks, key=f"reconfigure {uuid}", timeout_s=left_s)
        except PeerFailedError as error:
            if not world.heals:
                raise ConfigError(world.gap_text("reconfigure")) from error
            world.engine.extensions.require_view("reconfigure")
            heal(error)
            begin_in_new_view()


def _process_of(handle: str) -> int:
    number = handle.removeprefix(_PREFIX)
    if number == handle or not number.isdecimal():
        raise ValueError(
            f"reconfigure: {handle!r} is no handle of dist._get_reconfigure_handle() of ringcomm"
        )
    return int(number)


def _world() -> World:
    world = current()
    if world is None:
        raise ConfigError("reconfigure: call torch.distributed.init_process_group() first")
    return world


# --- calls from C++ -------------------------------------------------------------------------------
# C++, such as the operators of torch.ops.c10d, calls the backend that a group has for a device.
# From torch 2.14 on a class in Python can be that backend. torch.distributed still calls the group
# itself: a Work of such a backend loses is_completed(), result() and the source of a message.
_PASSED_ON = (
    "_end_coalescing", "_get_sequence_number_for_group", "_set_sequence_number_for_group",
    "_start_coalescing", "all_gather_single", "all_gather_single_coalesced", "all_to_all_single",
    "allgather", "allgather_coalesced", "allreduce", "allreduce_coalesced", "allreduce_sparse",
    "alltoall", "barrier", "broadcast", "gather", "getBackendName", "monitored_barrier", "name",
    "recv", "recv_anysource", "reduce", "reduce_scatter", "reduce_scatter_single",
    "reduce_scatter_single_coalesced", "scatter", "send", "set_timeout", "shutdown",
)  # fmt: skip


def add_backend_for_cpp(group: Any) -> None:
    """Give a process group a backend for CPU and GPU, if this torch accepts backends in Python."""
    if CppBackend is not None:
        inner = _inner_class()(group)
        custom = c10d.ProcessGroup.BackendType.CUSTOM
        for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
            group._register_backend(torch.device(device), custom, inner)
        if VERSION >= (2, 15):  # torch's flight recorder reads names of the default backend
            group._set_default_backend(custom)


@functools.cache
def _inner_class() -> Any:
    base: Any = CppBackend

    class Inner(base):  # type: ignore[misc] # it is there from torch 2.14 on
        supports_splitting = supports_coalescing = supports_time_estimate = False

        def __init__(self, group: Any) -> None:
            super().__init__(group.rank(), group.size())
            self.find_group = weakref.ref(group)  # weak: the group holds this backend

    for name in _PASSED_ON:
        setattr(Inner, name, _passing_on(name))
    return Inner


def _passing_on(name: str) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **named: Any) -> Any:
        return getattr(self.find_group(), name)(*args, **named)

    call.__name__ = name
    return call


# --- new groups, compared -------------------------------------------------------------------------
_SHOWN = 16  # ranks that an error text lists


def compare(mine: Sequence[int], callers: Sequence[int], number: int) -> Plan[None]:
    """Plan to check that all members of each new group pass the same list of ranks.

    `mine` is the list that this rank passes. The `callers` may pass lists of several groups, as in
    new_subgroups(group=...). `number` is the operation's number, for the error text.
    """

    async def run(t: Channel) -> None:
        passed = [tuple(json.loads(each)) for each in await gather_bytes(packed, t)]
        if not are_consistent(dict(zip(callers, passed, strict=True))):
            calls = [Call(f"new_group({_listed(each)})") for each in passed]
            raise MismatchError(explain_mismatch(calls, number, callers))

    packed = json.dumps([int_of("new_group: a rank", rank) for rank in mine]).encode()
    return Plan(Call("new_group"), len(packed), run)


def are_consistent(passed: dict[int, tuple[int, ...]]) -> bool:
    """Return True if all ranks in a list have passed this list; `passed` has the lists by rank."""
    return all(passed.get(rank, each) == each for each in set(passed.values()) for rank in each)


def _listed(ranks: Sequence[int]) -> str:
    if len(ranks) <= _SHOWN:
        return str(list(ranks))
    digest = zlib.crc32(repr(list(ranks)).encode())
    return f"[{', '.join(map(str, ranks[:_SHOWN]))}, ...: {len(ranks)} ranks, crc {digest:08x}]"


Tensors = Sequence[torch.Tensor]

# Number of process groups that each engine has made. A callback of one group may start operations
# on another group. In a mesh, each row has its own such group, with the same number in all rows.
_n_made: WeakKeyDictionary[Engine, int] = WeakKeyDictionary()


class BaseGroup(c10d.ProcessGroup):  # type: ignore[misc] # its signatures are not those of its callers
    """A process group that has no operations; see ProcessGroup."""

    def __init__(self, store: Any, group: Group, timeout_s: float | None) -> None:
        super().__init__(group.index, group.size)  # c10d takes no store from subclasses
        self._timeout_s = timeout_s
        self._coalesced: list[Work] | None = None
        self._is_shut_down = False
        self._uuids: set[int] = set()  # of reconfigure()
        self._name, self._desc = "", "undefined"
        self._set_up(store, group)
        add_backend_for_cpp(self)

    def _set_up(self, store: Any, group: Group) -> None:
        self.group = group
        self._store = store
        self._devices = Devices(store, group.index, group.size, self._timeout_s)
        self._view = _view_number()
        current = engine()
        self._engine = ref(current)  # the calling thread may have another engine, or none
        self._number = _n_made[current] = _n_made.get(current, 0) + 1

    # --- starting an operation ------------------------------------------------------------------
    def start(
        self,
        call: CallOptions,
        kind: str,
        results: Tensors,
        plan: Callable[..., Plan[Any]],
        *args: Any,
    ) -> Work:
        """Carry out the operation that plan(group, *args) plans; only start it if `call` is async.

        `results` are the tensors that the operation writes.
        """
        self._require_open()

        def checked(g: Group) -> Plan[Any]:
            for each in results:  # checked here, so that other ranks see the error
                if each.layout is torch.strided and not each.is_contiguous():
                    TORCH.require_writable(each)
            return plan(g, *args)

        timeout_s = self._timeout_s if call.timeout_s is None else call.timeout_s
        current = self._engine() or engine()
        path = path_here(self._number)
        name = None if path is None else path.name_in(self._number)
        options: Any = {"timeout_s": timeout_s, "is_once": path is not None}
        if call.is_async or self._coalesced is not None:
            handle = current.start(kind, name, checked, self.group, **options)
            if path is None:
                path = Path(self._number, f"#{handle.number}")
            return self._collected(Work(handle, results, path))
        current.execute(kind, name, checked, self.group, **options)
        return Work(None, results, path)

    def compare_members(self, ranks: Sequence[int]) -> None:
        """Compare the lists of ranks that the ranks pass to new_group(). Collective.

        Raises:
            MismatchError: members of one new group pass different ranks.
        """
        callers = c10d.get_process_group_ranks(self)
        number = self.group.ledger_for(self.group.engine).next_place
        options = call_options(None)
        self.start(options, "new_group", [], lambda _: compare(ranks, callers, number)).wait()

    @property
    def _needs_engine(self) -> bool:
        """True if a blocking operation cannot take its fast path."""
        is_over = self._is_shut_down or self._view != _view_number()
        return is_over or self._coalesced is not None or is_in_callback()

    def _collected(self, work: Work) -> Work:
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _require_open(self) -> None:
        if self._view != _view_number():
            raise RingcommError(
                f"process group {self.group!r} is of an earlier view of this elastic job, which "
                "has lost ranks since. In a listener of rc.elastic.on_new_view(), call "
                "torch.distributed.destroy_process_group() and init_process_group(), and make what "
                "uses groups anew, such as DistributedDataParallel: docs/elastic.md"
            )
        if self._is_shut_down:
            raise NotInitializedError(
                f"process group {self.group!r} was destroyed or aborted: make a new one with "
                "new_group(), or call torch.distributed._reconfigure() of the default group"
            )

    # --- with other ranks: reconfigure, which torch has from 2.14.1 on -----------------------
    @property
    def supports_reconfigure(self) -> bool:
        """True; RingcommError if tensors of some devices go to another backend."""
        backends = backends_of(self)
        if len(set(backends.values())) > 1:
            pairs = ",".join(f"{kind}:{name}" for kind, name in backends.items())
            raise RingcommError(
                f"reconfigure: this process group has multiple backends ({pairs}), and only one "
                'whose tensors all go through ringcomm can be: init_process_group("ringcomm")'
            )
        return True

    def get_reconfigure_handle(self) -> str:
        """Return the text that names this process, in all views of the job."""
        assert self.supports_reconfigure
        return own_handle()

    def reconfigure(self, opts: Any) -> Any:
        """Go on with the processes of the handles; see group_of(). Collective among them.

        rank() and size() change. Only the default group can be reconfigured; make others anew.

        Args:
            opts: c10d's ReconfigureOptions. `uuid` is a number that no earlier call had that ended
                well, `hints` are ignored.
        """
        assert self.supports_reconfigure
        if self is not c10d.group.WORLD:
            raise ValueError("reconfigure: only the default group goes on; make this one anew")
        if opts.uuid in self._uuids:
            raise ConfigError(f"reconfigure: uuid {opts.uuid} is already used: pass another")
        limit_s = self._timeout_s or engine().settings.timeout_or_inf
        group = group_of(
            opts.handles, opts.uuid, opts.timeout.total_seconds() if opts.timeout else limit_s
        )
        self._uuids.add(opts.uuid)
        devices = self._devices
        # Members may have made unequally many groups; from now on they count, and name, alike.
        counts = allgather_object((_n_made.get(engine(), 0), groups_named()), group=group)
        _n_made[engine()] = max(n for n, _ in counts)
        name_groups_from(max(n for _, n in counts))
        self._set_up(make_store(DEFAULT_TIMEOUT, group), group)
        self._is_shut_down = False
        devices.shutdown()
        add_backend_for_cpp(self)
        renumber_default_group(self, group.size, self._store)
        divide_by_present_size(self)
        return self.start(call_options(None), "barrier", [], plan_barrier, None)

    def abort(self) -> None:
        """Refuse further operations until reconfigure(); those under way go on."""
        self.shutdown()

    def get_error(self) -> Any:
        """Return what has ended this rank's operations: an ErrorType of torch."""
        kinds, error = error_types(), engine().state.error
        if error is None:
            return kinds.SUCCESS
        return kinds.TIMEOUT if isinstance(error, CommTimeoutError) else kinds.COMM_ERROR

    # C++ calls getRank() and getSize().
    def rank(self) -> int:
        """Return the number of this rank in the group."""
        return self.group.index

    def size(self) -> int:
        """Return the number of ranks."""
        return self.group.size

    getRank, getSize = rank, size

    # --- several calls as one -------------------------------------------------------------------
    def _start_coalescing(self, device: Any) -> None:
        del device
        self._coalesced = []

    def _end_coalescing(self, device: Any) -> Work:
        del device
        works, self._coalesced = self._coalesced or [], None
        return CombinedWork(works)

    # --- properties that torch reads ------------------------------------------------------------
    def get_group_store(self) -> Any:
        """Return the store that the group was made with."""
        return self._store

    # C++ calls these five methods; those of the base class need a backend in C++.
    def getBackendName(self) -> str:
        """Return "ringcomm"."""
        return "ringcomm"

    def getGroupName(self) -> str:
        """Return the name by which torch's operators find the group."""
        return self._name

    def setGroupName(self, name: str) -> None:
        """Set the name by which torch's operators find the group."""
        self._name = name

    def getGroupDesc(self) -> str:
        """Return the description of the group."""
        return self._desc

    def setGroupDesc(self, desc: str) -> None:
        """Set the description of the group."""
        self._desc = desc

    name = _get_backend_name = getBackendName
    _set_group_name = setGroupName
    _set_group_desc = setGroupDesc

    def _get_backend(self, device: torch.device) -> Any:
        is_own = carries(self, torch.device(device).type)
        return self if is_own else self._devices.by_type(device)

    @property
    def _device_types(self) -> list[torch.device]:
        has_gpus = torch.cuda.is_available() and carries(self, "cuda")
        own = ["cpu", "cuda"] if has_gpus else ["cpu"]
        return [*map(torch.device, own), *self._devices.types]

    supports_splitting = True
    supports_coalescing = False  # callers need not batch messages between ranks

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the deadline of each later operation."""
        self._timeout_s = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: the engine numbers operations by itself."""

    def _get_sequence_number_for_group(self) -> int:
        return self.group.ledger_for(engine()).next_place - 1

    def shutdown(self) -> None:
        """Refuse further operations; those under way go on."""
        self._is_shut_down = True
        self._devices.shutdown()


def _view_number() -> int:
    world = current_world()
    return 0 if world is None else world.transport.view.number
