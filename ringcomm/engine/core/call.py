"""Calls of collectives, which ranks compare, and the texts of their mismatches. Pure."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ringcomm.arrays.base import AnyAdapter, Array
from ringcomm.arrays.dtypes import DTYPES
from ringcomm.collectives.operators import Op, ReductionOptions
from ringcomm.ranks_as_text import ranks_text as listed

_MAX_TEXT = 400


@dataclass(frozen=True)
class Call:
    """The facts of one call of a collective on which all ranks must agree."""

    kind: str  # "allreduce_"
    name: str | None = None  # given by the user
    reduction: ReductionOptions | None = None
    dtype: str | None = None
    shape: tuple[int | None, ...] | None = None  # None: ranks may differ
    root: int | None = None
    members: tuple[tuple[str, tuple[int | None, ...]], ...] | None = None  # arrays' (dtype, shape)
    settings: tuple[str, ...] | None = None  # of init(): "RINGCOMM_ALGORITHM=auto"
    error: str | None = None  # why this rank cannot take part, so that all ranks raise
    is_once: bool = False  # no rank will use the name again
    place: str | None = None  # "cuda" for arrays in a GPU's memory
    at: str | None = None  # "train.py:12", where the program is; set for the text of a mismatch

    @functools.cached_property  # packing and hashing take 15 us
    def fingerprint(self) -> int:
        return int.from_bytes(_digest(self.pack(), 8), "little")

    def pack(self, *, whole: bool = False) -> bytes:
        """Return the wire form; names and errors are cut at 400 characters unless `whole`."""
        fields = vars(self).copy()  # asdict() copies deeply: 21 us against 0.2
        fields.pop("fingerprint", None)
        for key in ("name", "error"):
            if not whole and fields[key] is not None and len(fields[key]) > _MAX_TEXT:
                digest = _digest(fields[key].encode(errors="surrogatepass"), 6).hex()
                fields[key] = f"{fields[key][:_MAX_TEXT]}...{digest}"
        if self.reduction is not None:
            fields["reduction"] = (self.reduction.op.name, *self.reduction[1:])
        return json.dumps(fields).encode()

    @classmethod
    def unpack(cls, packed: bytes) -> Call:
        fields = json.loads(packed)
        for key in ("shape", "settings"):
            if fields[key] is not None:
                fields[key] = tuple(fields[key])
        if fields["members"] is not None:
            fields["members"] = tuple((dtype, tuple(shape)) for dtype, shape in fields["members"])
        if fields["reduction"] is not None:
            op, *others = fields["reduction"]
            fields["reduction"] = ReductionOptions(Op[op], *others)
        return cls(**fields)

    @property
    def arrays(self) -> str:
        """What it is about, as "float32[6, 2]"; "" if that is no array."""
        if self.members is not None:
            return f"{len(self.members)} arrays"
        if self.shape is None:
            return self.dtype or ""
        counts = ", ".join("?" if n is None else str(n) for n in self.shape)
        return f"{self.dtype or ''}[{counts}]"

    def label(self, sequence: int) -> str:
        return f"{self.kind} #{sequence}" if self.name is None else f"{self.kind}[{self.name}]"


def reduction_call(  # noqa: PLR0917 - every reduction calls this, and keywords take longer
    kind: str,
    name: str | None,
    options: ReductionOptions,
    x: Array,
    adapter: AnyAdapter,
    root: int | None = None,
) -> Call:
    """Return the call of a reduction of x. Raises TypeError for an option that does not fit x."""
    options = checked_options(options)
    dtype, shape = adapter.dtype(x), adapter.shape(x)
    return _call_of_reduction(kind, name, options, dtype.name, shape, root, adapter.place)


@functools.lru_cache(maxsize=8192)
def _call_of_reduction(  # noqa: PLR0917
    kind: str,
    name: str | None,
    options: ReductionOptions,
    dtype: str,
    shape: tuple[int, ...],
    root: int | None,
    place: str | None,
) -> Call:
    """Return one Call for equal arguments: it is checked, and its fingerprint computed, once."""
    options.require(DTYPES[dtype])
    return Call(kind, name, options, dtype, shape, root, place=place)


def checked_options(options: ReductionOptions) -> ReductionOptions:
    """Return options that can be compared. Raises TypeError for an option of a wrong type."""
    if not isinstance(options.op, Op):
        raise TypeError(f"op must be one of ringcomm.{', '.join(map(str, Op))}, not {options.op!r}")
    if options.deterministic is False:
        return options
    require_flag("deterministic", options.deterministic)
    return options._replace(deterministic=bool(options.deterministic))


def require_flag(what: str, flag: object) -> None:
    """Raise TypeError unless flag is True or False; bool() could fail on it later."""
    if not isinstance(flag, bool | np.bool_):
        raise TypeError(f"{what} must be True or False, not {flag!r}")


def _digest(data: bytes, nbytes: int) -> bytes:
    import hashlib  # loads OpenSSL, 5 ms: not a cost of `import ringcomm`

    return hashlib.blake2b(data, digest_size=nbytes).digest()


def are_wrong_alike(calls: Sequence[Call]) -> bool:
    if any(call.error is None for call in calls):
        return False
    kinds = {(call.kind, call.name, (call.error or "").partition(":")[0]) for call in calls}
    return len(kinds) == 1


def explain_mismatch(
    calls: Sequence[Call], sequence: int, ranks: Sequence[int], *, has_moved: bool = False
) -> str:
    """Return the text of a mismatch: the values, the ranks that have each, and what to do.

    `sequence` is the operation's number, for the label of an unnamed one. has_moved: ranks may have
    sent data already, because they had agreed on this name before.
    """
    text, places = _explain(calls, sequence, ranks), _places(calls, ranks)
    if not has_moved:
        return f"{text} Nothing was sent.{places}"
    if not any(call.kind.endswith("_") for call in calls):
        return text + places
    is_undefined = "What the call overwrites is undefined now: the name was agreed on before."
    return f"{text} {is_undefined}{places}"


def _explain(calls: Sequence[Call], sequence: int, ranks: Sequence[int]) -> str:
    if any(call.error is not None for call in calls):
        return _explain_errors(calls, sequence, ranks)
    if all(call.settings for call in calls):
        return _explain_settings(calls, ranks)
    if len({call.members for call in calls}) > 1 and len({call.kind for call in calls}) == 1:
        return _explain_members(calls, sequence, ranks)
    for field, advice in _ADVICE.items():
        if len({getattr(call, field) for call in calls}) > 1:
            sides = _sides(calls, field, sequence, ranks)
            is_named = field == "kind" and calls[0].name is not None
            what_next = _ONE_NAME if is_named else advice
            if field in _OF_ONE_CALL and _are_different_calls(calls):
                what_next = (
                    f"{_ONE_MORE} If these lines mean one call: {advice[0].lower()}{advice[1:]}"
                )
            starts = {call.kind.partition("allreduce")[0] for call in calls}
            if field == "kind" and starts >= {"", "sparse_"}:
                what_next = _ONE_LAYOUT
            return f"{_subject(calls, sequence, field)}: {sides}. {what_next}"
    return f"{calls[0].label(sequence)}: ranks disagree, but their calls are equal. Report a bug."


_ONE_LAYOUT = (
    "One has a sparse tensor, the other a dense one. Use one layout on all ranks, by .to_dense() "
    "or by sparse= of the layer."
)
_ONE_MORE = (
    "One rank calls an operation more than another, or they call them in another order: look for a "
    "call under an if, or in a loop that has more steps on some ranks."
)
_OF_ONE_CALL = ("reduction", "root", "dtype", "shape")
_ONE_NAME = "Every rank must call the same operation under one name."
_ADVICE = {
    "kind": _ONE_MORE,
    "name": "Every rank must call the same operations in the same order.",
    "reduction": "Pass the same op= on every rank.",
    "root": "Pass the same root on every rank.",
    "dtype": "Cast before the call.",
    "shape": "Pad, slice or drop the tensor so that all ranks pass one shape.",
    "place": "Move the array so that all ranks pass one on a GPU, or all one in host memory.",
}


def _are_different_calls(calls: Sequence[Call]) -> bool:
    """Return True if the ranks stand at different lines, and no name says that they mean one."""
    return calls[0].name is None and len({call.at for call in calls}) > 1


def _places(calls: Sequence[Call], ranks: Sequence[int]) -> str:
    places = [call.at for call in calls]
    if None in places:
        return ""
    if len(set(places)) == 1:
        return f" All are at {places[0]}."
    sides = _by_value([f"at {place}" for place in places], ranks)
    return f" {sides[0].upper()}{sides[1:]}."


def _subject(calls: Sequence[Call], sequence: int, field: str) -> str:
    if field not in ("kind", "name"):
        return calls[0].label(sequence)
    return f"operation #{sequence}" if calls[0].name is None else f"operation [{calls[0].name}]"


def _sides(calls: Sequence[Call], field: str, sequence: int, ranks: Sequence[int]) -> str:
    """Return "rank 0 sent float32 (2,), ranks 1, 2 sent float16 (2,)", at most four sides."""
    values = [_value(call, field, sequence) for call in calls]
    if field in (*_TENSOR, "place"):
        return _by_value(_deeds(calls, values), ranks)
    verb = "called" if field in ("kind", "name") else "passed"
    return _by_value([f"{verb} {value}" for value in values], ranks)


def _deeds(calls: Sequence[Call], values: Sequence[str]) -> list[str]:
    has_root = calls[0].kind.startswith(("broadcast", "scatter"))
    root = calls[0].root if has_root else None
    return [
        f"{'sent' if root in (None, index) else 'would receive'} {value}"
        for index, value in enumerate(values)
    ]


def _by_value(deeds: Sequence[str], ranks: Sequence[int]) -> str:
    groups: dict[str, list[int]] = {}
    for rank, deed in zip(ranks, deeds, strict=True):
        groups.setdefault(deed, []).append(rank)
    sides = [f"{ranks_text(ranks)} {deed}" for deed, ranks in groups.items()]
    return ", ".join(sides[:4]) + (f" and {len(sides) - 4} more variants" if len(sides) > 4 else "")


_TENSOR = ("dtype", "shape")


def _value(call: Call, field: str, sequence: int) -> str:
    if field in ("kind", "name"):
        return call.label(sequence)
    if field in _TENSOR:
        return f"{call.dtype} {shape_text(call.shape)}"
    if field == "place":
        what = "arrays" if call.members is not None else f"{call.dtype} {shape_text(call.shape)}"
        return f"{what} {'in host memory' if call.place is None else 'on a GPU'}"
    if field == "reduction":
        is_adasum = call.kind.startswith("adasum")
        return f"op={'ADA' if is_adasum else ''}{call.reduction}"
    return f"{field}={getattr(call, field)}"


def _explain_members(calls: Sequence[Call], sequence: int, ranks: Sequence[int]) -> str:
    members = [call.members or () for call in calls]
    label = calls[0].label(sequence)
    if len(set(map(len, members))) > 1:
        counts = _by_value(_deeds(calls, [f"{len(each)} arrays" for each in members]), ranks)
        return f"{label}: {counts}. Pass equally many arrays on every rank."
    for index, each in enumerate(zip(*members, strict=True)):
        if len(set(each)) > 1:
            values = [f"{dtype} {shape_text(shape)}" for dtype, shape in each]
            sides = _by_value(_deeds(calls, values), ranks)
            return f"{label}: array {index}: {sides}. Pass the same arrays on every rank."
    raise AssertionError("the members agree")


def _explain_settings(calls: Sequence[Call], ranks: Sequence[int]) -> str:
    settings = [call.settings or () for call in calls]
    for each in zip(*settings, strict=False):
        if len(set(each)) > 1:
            is_version = each[0].startswith("ringcomm ")
            advice = "Install one version on all hosts." if is_version else _SET_ALIKE
            sides = _by_value([f"started with {value}" for value in each], ranks)
            return f"{calls[0].kind}: {sides}. {advice}"
    raise AssertionError("the settings agree")


_SET_ALIKE = (
    "Set it to the same value on every rank (Open MPI: mpirun -x NAME=VALUE, "
    "MPICH: mpirun -genv NAME VALUE)."
)


def _explain_errors(calls: Sequence[Call], sequence: int, ranks: Sequence[int]) -> str:
    failed = [(r, c) for r, c in zip(ranks, calls, strict=True) if c.error is not None]
    rank, call = failed[0]
    bad = [r for r, _ in failed]
    return (
        f"{call.label(sequence)}: {ranks_text(bad)} could not take part: {call.error}"
        + (f" (the text is of rank {rank})" if len(bad) > 1 else "")
        + f". Fix the call on {ranks_text(bad)}."
    )


def shape_text(shape: tuple[int | None, ...] | None) -> str:
    """Return a shape as numpy prints it, * where ranks may differ."""
    if shape is None:
        return ""
    text = ", ".join("*" if n is None else str(n) for n in shape)
    return f"({text},)" if len(shape) == 1 else f"({text})"


def ranks_text(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {listed(ranks)}"
