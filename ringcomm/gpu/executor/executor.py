"""The executor that the engine loads for arrays on GPUs; see engine/operations/base.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from ringcomm.arrays.base import Array, DeviceAdapter, Span
from ringcomm.arrays.dtypes import DType
from ringcomm.engine.core.plan import Plan
from ringcomm.engine.operations.base import DeviceExecutor, Operation
from ringcomm.gpu.executor import host_staging, plans
from ringcomm.gpu.executor.engine_gpus import Gpus, issue_of
from ringcomm.gpu.transports.transport_choice import GpuChoice

if TYPE_CHECKING:
    from ringcomm.engine.core.context import EngineContext
    from ringcomm.engine.core.group import Group


class _GpuExecutor:
    """The DeviceExecutor of CUDA; Gpus holds its state, one per engine."""

    def plan(self, operation: Operation) -> Plan[Any]:
        return plans.plan(operation)

    def stage(self, group: Group, adapter: DeviceAdapter, x: Array) -> host_staging.Staging:
        return host_staging.Staging(group, issue_of(group, adapter, x))

    def make(
        self, group: Group, kind: str, dtype: DType, shape: tuple[int, ...]
    ) -> tuple[Array, host_staging.Staging]:
        return host_staging.make(group, kind, dtype, shape)

    def copied(self, group: Group, x: Array) -> Array:
        return host_staging.copied(group, x)

    def note_current(self, engine: EngineContext, index: int) -> None:
        Gpus.of(engine).current = index

    def require(self, engine: EngineContext) -> None:
        Gpus.of(engine).require()

    def allocate(
        self, engine: EngineContext, adapter: DeviceAdapter, index: int, nbytes: int
    ) -> Span:
        regions = Gpus.of(engine).memory(index).device.regions
        return regions.take(nbytes, adapter.stream(index), adapter.stream_owner(index))

    def choice(self, engine: EngineContext, group: Group) -> GpuChoice | None:
        return None if group.rank is None else Gpus.of(engine).choice(group)


EXECUTOR: Final[DeviceExecutor] = _GpuExecutor()
