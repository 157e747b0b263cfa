"""Types of options, for argparse. ringcomm.launch.option_types has more."""

from argparse import ArgumentTypeError


def names_of(known):
    """Return a type for "A,B,C" of the known names, or "all"."""

    def parse(text):
        names = known if text == "all" else tuple(dict.fromkeys(text.split(",")))
        unknown = [name for name in names if name not in known]
        if unknown:
            raise ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(known)}")
        return names

    return parse


def above_zero(kind):
    def parse(text):
        value = kind(text)
        if not 0 < value < float("inf"):
            raise ArgumentTypeError(f"{text} is not a number above 0")
        return value

    return parse
