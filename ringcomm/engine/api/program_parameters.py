"""Params: the parameters of a program, from its command line, the environment or a file."""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ringcomm.config import program_parameters
from ringcomm.engine.control.live_parameters_and_callbacks import PROGRAM
from ringcomm.errors import ConfigError
from ringcomm.foreign_text import is_number
from ringcomm.integers import is_integer
from ringcomm.open_errors import needed_for

_BOOLEANS: Final = {"true": True, "1": True, "yes": True, "on": True} | {
    "false": False, "0": False, "no": False, "off": False,
}  # fmt: skip


@dataclass(frozen=True)
class Live:
    """The default of a parameter that may change while the program runs; see live()."""

    default: int | float | str | bool


def live(default: int | float | str | bool) -> Any:
    """Return a default for Params whose parameter `ringcomm ctl JOB set NAME=VALUE` may change."""
    return Live(_checked("live()", default))


class Params(Mapping[str, Any]):
    """The parameters of a program: P = rc.Params(lr=rc.live(0.1), batch=64), then P.lr, P["lr"].

    The value of a parameter is, if it is there, that of the command line (--lr 0.2 or --lr=0.2),
    else that of the variable RINGCOMM_PARAM_LR, else that of the TOML file named by the variable
    RINGCOMM_PARAMS, else its default. The default decides the type: int, float, bool or str. Values
    are read when the object is made, the same on all ranks if their command lines are; a live one
    changes on all ranks after the same step.

    Args:
        **defaults: the default by name, with live() around it if commands may change it.

    Attributes:
        rest: the arguments of the command line that are no parameters.

    Raises:
        ConfigError: a value has another type, or the file or a variable has a name that is not
            among the parameters.
        OSError: the file cannot be read.
        TypeError: a default has none of the four types.
    """

    def __init__(self, **defaults: Any) -> None:
        self._live = [name for name, value in defaults.items() if isinstance(value, Live)]
        plain = {n: v.default if isinstance(v, Live) else v for n, v in defaults.items()}
        self._values = {name: _checked(name, value) for name, value in plain.items()}
        path, variables = program_parameters()
        self._values |= _of_file(path, self._values)
        self._values |= _of_variables(variables, self._values)
        given, self.rest = _of_command_line(sys.argv[1:], self._values)
        self._values |= given
        PROGRAM.parameters.append(weakref.ref(self))

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_values"][name]
        except KeyError:
            raise AttributeError(f"there is no parameter {name!r}") from None

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"Params({', '.join(f'{name}={value!r}' for name, value in self._values.items())})"

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other

    # --- for commands -----------------------------------------------------------------------------
    @property
    def live_names(self) -> list[str]:
        """The names of the parameters that commands may change."""
        return list(self._live)

    def read(self, name: str, text: str) -> Any:
        """Return the value of a parameter that a text means. Raises ValueError."""
        return _read(name, text, self._values[name])

    def take(self, name: str, value: Any) -> None:
        """Change a parameter."""
        self._values[name] = value


def _checked(name: str, value: Any) -> Any:
    value = int(value) if is_integer(value) else value
    if not isinstance(value, int | float | str | bool):
        raise TypeError(f"Params: {name} is {value!r}; a default is an int, float, bool or str")
    return value


def _read(name: str, text: str, like: Any) -> Any:
    """Return the value of `text`, which has the type of `like`."""
    if isinstance(like, str):
        return text
    try:
        if isinstance(like, bool):
            return _BOOLEANS[text.lower()]
        value = type(like)(text)
    except (KeyError, ValueError) as error:
        kind = type(like).__name__
        raise ValueError(f"{name} must be a {kind}, such as {like!r}, not {text!r}") from error
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, not {text}")
    return value


def _of_file(path: str, known: Mapping[str, Any]) -> dict[str, Any]:
    if not path:
        return {}
    import tomllib  # takes 7 ms

    with needed_for(f"read {path}, which RINGCOMM_PARAMS names"), open(path, "rb") as file:
        try:
            found = tomllib.load(file)
        except (ValueError, RecursionError) as error:  # no TOML, or no UTF-8
            raise ConfigError(f"{path}: {error}") from error
    _refuse_unknown(path, found, known)
    for name, value in found.items():
        wanted = type(known[name])
        fits = type(value) is wanted or (wanted is float and type(value) is int)
        if not fits:
            raise ConfigError(f"{path}: {name} is {value!r}; it must be a {wanted.__name__}")
        if not isinstance(value, str) and not is_number(value) and not isinstance(value, bool):
            raise ConfigError(f"{path}: {name} is {value}; it must be finite, and of 64 bits")
    return {name: type(known[name])(value) for name, value in found.items()}


def _of_variables(variables: Mapping[str, str], known: Mapping[str, Any]) -> dict[str, Any]:
    names = {name.upper(): name for name in known}
    _refuse_unknown("RINGCOMM_PARAM_ variables", variables, names)
    return {names[v]: _given(names[v], text, known) for v, text in variables.items()}


def _of_command_line(
    arguments: Sequence[str], known: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    import argparse

    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    for name in known:  # of "--a" and "--a" an error would name both
        parser.add_argument(*dict.fromkeys((f"--{name.replace('_', '-')}", f"--{name}")), dest=name)
    found, rest = parser.parse_known_args(_with_negative_numbers(arguments, known))
    texts = {name: text for name, text in vars(found).items() if text is not None}
    return {name: _given(name, text, known) for name, text in texts.items()}, rest


def _with_negative_numbers(arguments: Sequence[str], known: Mapping[str, Any]) -> list[str]:
    """Return the arguments with "--lr", "-1e-3" as one: argparse takes the second for an option."""
    options = {f"--{name}" for name in known} | {f"--{name.replace('_', '-')}" for name in known}
    joined: list[str] = []
    for each in arguments:
        if joined and joined[-1] in options and "--" not in joined and _is_negative_number(each):
            joined[-1] += f"={each}"
        else:
            joined.append(each)
    return joined


def _is_negative_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return text.startswith("-")


def _given(name: str, text: str, known: Mapping[str, Any]) -> Any:
    try:
        return _read(name, text, known[name])
    except ValueError as error:
        raise ConfigError(f"Params: {error}") from error


def _refuse_unknown(where: str, found: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    unknown = sorted(found.keys() - known.keys())
    if unknown:
        raise ConfigError(
            f"{where}: {', '.join(unknown)}: no such parameter; there are {', '.join(known)}"
        )
