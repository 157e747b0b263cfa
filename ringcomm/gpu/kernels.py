"""The kernels of kernels.cu: which there are, what they take, and how they are launched. Pure.

A kernel is compiled from source() with OPTIONS and its defines, by ringcomm.gpu.compiling; its
name is ENTRY. To launch one:

    kernel = ReduceKernel(DTYPES["float32"], SUM, n_sources=4, n_targets=4)
    arguments = kernel.pack_arguments(sources, targets, hi=count)
    grid = kernel.grid(count, n_processors)
    module.get_function(ENTRY)((grid,), (BLOCK,), arguments)

Every argument is an array of one element, which CuPy passes by value, whatever its dtype is: a
number, or a struct. Addresses are those of the GPU, as int.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from ringcomm.arrays.dtypes import DTYPES, DType
from ringcomm.collectives.op import AVERAGE, BAND, BOR, BXOR, MAX, MIN, PRODUCT, SUM, Op

# No product is fused with a sum, and quotients and roots are rounded as IEEE 754 says. The NVRTC of
# CUDA 12 takes the lambdas of a kernel for host functions without the option on execution spaces.
OPTIONS: Final = (
    *("--std=c++17", "--device-as-default-execution-space"),
    *("--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true"),
)
ENTRY: Final = "rc_entry"
BLOCK: Final = 256  # threads per block of a grid

Argument = NDArray[Any]
Arguments = tuple[Argument, ...]
Rule = Literal["Sgd", "Momentum", "Adam"]
Code = Literal["Int8", "E4M3"]

# Kernel parameters take 4 KiB with every driver and GPU; 32 KiB need CUDA 12.1 and sm_70.
_MOST_PARAMETER_NBYTES = 4096
TENSORS_PER_LAUNCH: Final = 480
CHUNK: Final = np.dtype([("tensor", "u4"), ("count", "u4"), ("start", "u8"), ("place", "u8")])
CHUNK_COUNT: Final = 8192  # of elements: 25 MiB of float32 are 800 chunks, more than a GPU's blocks
CODEC_BLOCKS: Final = (32, 64, 128, 256, 512, 1024)

_TYPES = {
    "float16": "f16",
    "bfloat16": "bf16",
    "float32": "f32",
    "float64": "f64",
    "int8": "i8",
    "int16": "i16",
    "int32": "i32",
    "int64": "i64",
    "uint8": "u8",
    "uint16": "u16",
    "uint32": "u32",
    "uint64": "u64",
    "bool": "b1",
    "complex64": "c64",
    "complex128": "c128",
}
_PACKED = ("float16", "bfloat16", "float32", "float64")
_COMPUTED = ("float16", "bfloat16", "float32")  # in float32
_OPERATORS = {
    SUM: "Sum",
    AVERAGE: "Sum",
    PRODUCT: "Product",
    MIN: "Min",
    MAX: "Max",
    BAND: "BitAnd",
    BOR: "BitOr",
    BXOR: "BitXor",
}
_OF_BOOL = {
    SUM: "Either",
    MAX: "Either",
    PRODUCT: "Both",
    MIN: "Both",
    BAND: "Both",
    BOR: "Either",
    BXOR: "One",
}

_IN_FLIGHT = 8  # kInFlight in kernels.cu
_BLOCKS_PER_PROCESSOR = 4  # 1024 threads, each with 64 to 128 bytes in flight


def source() -> str:
    """Return the text of kernels.cu."""
    from importlib.resources import files

    return (files("ringcomm.gpu") / "kernels.cu").read_text(encoding="utf-8")


class Kernel(ABC):
    """One kernel, as it is compiled."""

    @property
    @abstractmethod
    def defines(self) -> tuple[str, ...]:
        """Options of the compiler that select this kernel; kernels with the same are the same."""

    @property
    @abstractmethod
    def per_block(self) -> int:
        """Elements (PackKernel: chunks) that one block handles at a time."""

    def grid(self, n_elements: int, n_processors: int) -> int:
        """Return how many blocks to launch, 1 or more.

        Args:
            n_elements: to be handled; by PackKernel: chunks.
            n_processors: of the GPU.
        """
        needed = -(-n_elements // self.per_block)
        return max(1, min(needed, n_processors * _BLOCKS_PER_PROCESSOR))


@dataclass(frozen=True)
class ReduceKernel(Kernel):
    """Combines elements of some arrays in their order, and stores the result in others.

    The arithmetic is that of csrc/kernels, bit for bit. With one source it copies; but a NaN of 16
    bits becomes the canonical one, as on the CPU.

    Attributes:
        dtype: of all arrays.
        op: AVERAGE is SUM here, with a divisor.
        n_sources: 1 or more.
        n_targets: 1 or more; together at most 496.
    """

    dtype: DType
    op: Op
    n_sources: int
    n_targets: int

    def __post_init__(self) -> None:
        self.op.require(self.dtype)
        _require_counts(self.n_sources, self.n_targets)

    @property
    def defines(self) -> tuple[str, ...]:
        """Options of the compiler that select this kernel."""
        operators = _OF_BOOL if self.dtype.name == "bool" else _OPERATORS
        return _defines(
            KERNEL="REDUCE",
            TYPE=_TYPES[self.dtype.name],
            OP=operators[self.op],
            SOURCES=self.n_sources,
            TARGETS=self.n_targets,
        )

    @property
    def per_block(self) -> int:
        """Elements that one block handles at a time."""
        positions = min(4, _IN_FLIGHT // min(_IN_FLIGHT, self.n_sources))
        return BLOCK * positions * 16 // self.dtype.itemsize

    def pack_arguments(
        self,
        sources: Sequence[int],
        targets: Sequence[int],
        *,
        hi: int,
        lo: int = 0,
        divisor: int = 1,
    ) -> Arguments:
        """Return what to launch the kernel with, for elements [lo, hi).

        Args:
            sources: addresses of element 0 of each, in the order in which they are combined.
            targets: likewise. One may be a source; else they do not overlap.
            hi: where to end.
            lo: where to begin.
            divisor: what the combination is divided by; 1 where op gives bits, and for bool.
        """
        if divisor < 1 or (divisor != 1 and not self._gives_numbers):
            raise ValueError(f"{self.op} of {self.dtype} cannot be divided by {divisor}")
        addresses = (_table(sources, self.n_sources), _table(targets, self.n_targets))
        return (*addresses, _one("u8", lo), _one("u8", hi), _one("i8", divisor))

    @property
    def _gives_numbers(self) -> bool:
        return self.dtype.name != "bool" and self.op not in (BAND, BOR, BXOR)


@dataclass(frozen=True)
class PackKernel(Kernel):
    """Copies many tensors into one buffer, or out of it; scaled and cast on the way.

    Where a scale or a cast is asked for, elements are computed in float32, or in float64 if either
    dtype is float64, and rounded once; a NaN becomes the canonical one. Else the bits are copied.

    The addresses of the tensors are parameters of the kernel, at most TENSORS_PER_LAUNCH: other
    gradients at every step cost no copy to the GPU. What stays, chunk_table(), lies there.

    Attributes:
        source: float16, bfloat16, float32 or float64; of what is read.
        target: likewise; of what is written.
        unpacks: from the buffer to the tensors.
    """

    source: DType
    target: DType
    unpacks: bool = False

    def __post_init__(self) -> None:
        _require_dtype(self.source, _PACKED)
        _require_dtype(self.target, _PACKED)

    @property
    def defines(self) -> tuple[str, ...]:
        """Options of the compiler that select this kernel."""
        return _defines(
            KERNEL="UNPACK" if self.unpacks else "PACK",
            SOURCE=_TYPES[self.source.name],
            TARGET=_TYPES[self.target.name],
            TENSORS=TENSORS_PER_LAUNCH,
        )

    @property
    def per_block(self) -> int:
        """Chunks that one block handles at a time."""
        return 1

    def pack_arguments(
        self,
        tensors: Sequence[int],
        buffer: int,
        *,
        chunks: int,
        n_chunks: int,
        scale: float = 1.0,
    ) -> Arguments:
        """Return what to launch the kernel with.

        Args:
            tensors: addresses, as many as chunk_table() was told of, at any multiple of the
                itemsize.
            buffer: address of its element 0; apart from the tensors.
            chunks: address of the table on the GPU.
            n_chunks: its length.
            scale: rounded to float32.
        """
        if len(tensors) > TENSORS_PER_LAUNCH:
            raise ValueError(f"{len(tensors)} tensors; one launch takes {TENSORS_PER_LAUNCH}")
        padded = [*tensors, *[0] * (TENSORS_PER_LAUNCH - len(tensors))]
        table = _table(padded, TENSORS_PER_LAUNCH)
        numbers = (_one("u8", chunks), _one("u4", n_chunks), _one("u8", buffer))
        return (table, *numbers, _one("f4", scale))


def chunk_table(counts: Sequence[int], places: Sequence[int]) -> NDArray[Any]:
    """Return what the blocks of a PackKernel move, of dtype CHUNK; the GPU needs a copy of it.

    Args:
        counts: elements of each tensor.
        places: of the buffer: where each tensor begins. Moved fastest from multiples of 8 on.
    """
    rows = [
        (tensor, min(CHUNK_COUNT, count - start), start, place + start)
        for tensor, (count, place) in enumerate(zip(counts, places, strict=True))
        for start in range(0, count, CHUNK_COUNT)
    ]
    return np.array(rows, CHUNK)


@dataclass(frozen=True)
class UpdateKernel(Kernel):
    """Sums gradients in float32, takes a step of an optimizer, and pushes the new weights.

    Formulas and order of operations are those of torch.optim's loops over single tensors, fused
    products included, in float32.

    Attributes:
        gradient: float16, bfloat16 or float32; of the sources.
        weight: likewise; of the targets.
        rule: what numbers it takes, sgd_numbers() and adam_numbers() say.
        n_sources: 1 or more.
        n_targets: 1 or more; together at most 496.
    """

    gradient: DType
    weight: DType
    rule: Rule
    n_sources: int
    n_targets: int

    def __post_init__(self) -> None:
        _require_dtype(self.gradient, _COMPUTED)
        _require_dtype(self.weight, _COMPUTED)
        _require_counts(self.n_sources, self.n_targets)

    @property
    def defines(self) -> tuple[str, ...]:
        """Options of the compiler that select this kernel."""
        return _defines(
            KERNEL="UPDATE",
            TYPE=_TYPES[self.gradient.name],
            TARGET=_TYPES[self.weight.name],
            RULE=self.rule,
            SOURCES=self.n_sources,
            TARGETS=self.n_targets,
        )

    @property
    def per_block(self) -> int:
        """Elements that one block handles at a time."""
        return BLOCK * 16 // min(self.gradient.itemsize, self.weight.itemsize)

    def pack_arguments(
        self,
        gradients: Sequence[int],
        weights: Sequence[int],
        owned: Sequence[int],
        numbers: Argument,
        *,
        hi: int,
        lo: int = 0,
        scale: float = 1.0,
    ) -> Arguments:
        """Return what to launch the kernel with, for elements [lo, hi).

        Args:
            gradients: addresses of element 0 of each, in the order in which they are summed.
            weights: likewise; where the new weights go.
            owned: addresses of float32 arrays of hi - lo elements, updated in place: the weights,
                then the rule's states, none for "Sgd", the momentum buffer, or exp_avg and
                exp_avg_sq. Apart from all others, but for float32 weights, which may be owned.
            numbers: of the rule, for this step.
            hi: where to end.
            lo: where to begin.
            scale: the sum of the gradients is multiplied by it, rounded to float32.
        """
        n_owned = 1 + ("Sgd", "Momentum", "Adam").index(self.rule)
        if len(owned) != n_owned:
            raise ValueError(f"{self.rule} owns {n_owned} arrays, not {len(owned)}")
        tables = (_table(gradients, self.n_sources), _table(weights, self.n_targets))
        padded = _table([*owned, *[0] * (3 - n_owned)], 3)
        return (*tables, padded, _one("u8", lo), _one("u8", hi), _one("f4", scale), numbers)


# Flags of kernels.cu.
_MAXIMIZES, _DECAYS, _IS_NESTEROV, _IS_FIRST = 1, 2, 4, 8


def sgd_numbers(
    step: int,
    *,
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
) -> Argument:
    """Return the numbers of the rule "Sgd", or, where momentum is not 0, "Momentum".

    Args but the first are those of torch.optim.SGD.

    Args:
        step: 1 for the first, in which the momentum buffer becomes the gradient.
    """
    flags = _flags(maximize, weight_decay) | _IS_NESTEROV * nesterov | _IS_FIRST * (step == 1)
    if momentum == 0:
        return _numbers(decay=weight_decay, step=-lr, flags=flags)
    fresh = 1 - dampening
    return _numbers(decay=weight_decay, momentum=momentum, fresh=fresh, step=-lr, flags=flags)


def adam_numbers(
    step: int,
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    maximize: bool = False,
    decoupled: bool = False,
) -> Argument:
    """Return the numbers of the rule "Adam".

    Args but the first and the last are those of torch.optim.Adam.

    Args:
        step: 1 for the first.
        decoupled: weight decay is that of torch.optim.AdamW.
    """
    beta1, beta2 = betas
    return _numbers(
        decay=weight_decay,
        shrink=1 - lr * weight_decay if decoupled else 1.0,
        weight=1 - beta1,
        keep=beta2,
        fresh=1 - beta2,
        step=-(lr / (1 - beta1**step)),
        root=(1 - beta2**step) ** 0.5,
        eps=eps,
        flags=_flags(maximize, 0.0 if decoupled else weight_decay),
    )


@dataclass(frozen=True)
class QuantiseKernel(Kernel):
    """Encodes floats as a byte each and a scale per block; see ringcomm.gpu.reference.

    Attributes:
        dtype: float16, bfloat16 or float32; of what is encoded.
        code: of a byte.
        block: elements that share a scale, one of CODEC_BLOCKS.
    """

    dtype: DType
    code: Code
    block: int = 256

    def __post_init__(self) -> None:
        _require_dtype(self.dtype, _COMPUTED)
        _require_block(self.block)

    @property
    def defines(self) -> tuple[str, ...]:
        """Options of the compiler that select this kernel."""
        dtype = _TYPES[self.dtype.name]
        return _defines(KERNEL="QUANTISE", TYPE=dtype, CODE=self.code, BLOCK=self.block)

    @property
    def per_block(self) -> int:
        """Elements that one block handles at a time."""
        return BLOCK // 32 * max(256, self.block)

    def pack_arguments(
        self,
        x: int,
        *,
        residual: int,
        scales: int,
        codes: int,
        count: int,
        seed: int = 0,
        draw: int = 0,
    ) -> Arguments:
        """Return what to launch the kernel with.

        Args:
            x: address of what is encoded. Only read.
            residual: address of `count` float32, which are added to x, and get what was dropped;
                0: there are none, and what is dropped is lost.
            scales: address where a float32 per block goes; a multiple of 4.
            codes: address where a byte per element goes.
            count: elements.
            seed: of the random numbers of "Int8", 0 to 2**64 - 1.
            draw: which of them, as for ringcomm.codec.Int8.
        """
        numbers = (x, residual, scales, codes, count, seed, draw)
        return tuple(_one("u8", number) for number in numbers)


@dataclass(frozen=True)
class DequantiseKernel(Kernel):
    """Decodes what a QuantiseKernel wrote.

    Attributes:
        dtype: float16, bfloat16 or float32; of the result.
        code: as it was encoded.
        block: as it was encoded.
        accumulates: adds to what is there, in float32, rounded once.
    """

    dtype: DType
    code: Code
    block: int = 256
    accumulates: bool = False

    def __post_init__(self) -> None:
        _require_dtype(self.dtype, _COMPUTED)
        _require_block(self.block)

    @property
    def defines(self) -> tuple[str, ...]:
        """Options of the compiler that select this kernel."""
        return _defines(
            KERNEL="DEQUANTISE",
            TYPE=_TYPES[self.dtype.name],
            CODE=self.code,
            BLOCK=self.block,
            ACCUMULATE=int(self.accumulates),
        )

    @property
    def per_block(self) -> int:
        """Elements that one block handles at a time."""
        return BLOCK * 4

    def pack_arguments(self, *, scales: int, codes: int, out: int, count: int) -> Arguments:
        """Return what to launch the kernel with; addresses and count as for QuantiseKernel."""
        return tuple(_one("u8", number) for number in (scales, codes, out, count))


def all_variants() -> Iterator[Kernel]:
    """Return every kind of kernel, each for some numbers of ranks."""
    for dtype, op, n in product(DTYPES.values(), _OF_BOOL, (1, 2, 4, 8, 12, 24)):
        if _is_defined(op, dtype):
            yield ReduceKernel(dtype, op, n, n)
    packed = [DTYPES[name] for name in _PACKED]
    for source_dtype, target, unpacks in product(packed, packed, (False, True)):
        yield PackKernel(source_dtype, target, unpacks)
    computed = [DTYPES[name] for name in _COMPUTED]
    for gradient, weight, n in product(computed, computed, (1, 4, 8, 24)):
        for rule in ("Sgd", "Momentum", "Adam"):
            yield UpdateKernel(gradient, weight, rule, n, n)
    for dtype, block in product(computed, CODEC_BLOCKS):
        for code in ("Int8", "E4M3"):
            yield QuantiseKernel(dtype, code, block)
            yield DequantiseKernel(dtype, code, block)
            yield DequantiseKernel(dtype, code, block, accumulates=True)


def representative_variants() -> Iterator[Kernel]:
    """Return one or a few of each kind, those that need the most registers among them."""
    f32, bf16, f16 = DTYPES["float32"], DTYPES["bfloat16"], DTYPES["float16"]
    yield ReduceKernel(f32, SUM, 4, 4)
    yield ReduceKernel(f16, SUM, 2, 2)
    yield ReduceKernel(bf16, SUM, 8, 8)
    yield ReduceKernel(bf16, SUM, 24, 24)
    yield ReduceKernel(DTYPES["int8"], MAX, 2, 2)
    yield ReduceKernel(DTYPES["complex128"], PRODUCT, 4, 4)
    yield PackKernel(f32, bf16)
    yield PackKernel(f16, DTYPES["float64"], unpacks=True)
    yield UpdateKernel(bf16, bf16, "Adam", 8, 8)
    yield QuantiseKernel(f32, "Int8")
    yield QuantiseKernel(f32, "E4M3", block=1024)
    yield DequantiseKernel(bf16, "Int8", accumulates=True)


def _defines(**values: object) -> tuple[str, ...]:
    return tuple(f"-DRC_{name}={value}" for name, value in values.items())


def _one(dtype: str, value: float) -> Argument:
    return np.array([value], dtype)


def _table(addresses: Sequence[int], n: int) -> Argument:
    """Return addresses as one struct."""
    if len(addresses) != n:
        raise ValueError(f"{len(addresses)} addresses for a kernel of {n}")
    return np.array([(tuple(addresses),)], np.dtype([("at", "u8", (n,))]))


def _numbers(*, flags: int, **floats: float) -> Argument:
    """Return the numbers of a rule as one struct."""
    fields = [(name, "f4") for name in floats]
    return np.array([(*floats.values(), flags)], np.dtype([*fields, ("flags", "u4")]))


def _flags(maximize: bool, weight_decay: float) -> int:
    return _MAXIMIZES * maximize | _DECAYS * (weight_decay != 0)


def _is_defined(op: Op, dtype: DType) -> bool:
    try:
        op.require(dtype)
    except TypeError:
        return False
    return True


def _require_counts(n_sources: int, n_targets: int) -> None:
    nbytes = 8 * (n_sources + n_targets) + 128  # what else the kernels take
    if min(n_sources, n_targets) < 1 or nbytes > _MOST_PARAMETER_NBYTES:
        raise ValueError(f"no kernel has {n_sources} sources and {n_targets} targets")


def _require_dtype(dtype: DType, known: Sequence[str]) -> None:
    if dtype.name not in known:
        raise TypeError(f"this kernel takes {', '.join(known)}, not {dtype}")


def _require_block(block: int) -> None:
    if block not in CODEC_BLOCKS:
        raise ValueError(f"a GPU encodes blocks of {CODEC_BLOCKS} elements, not {block}")
