"""Finds public names without a docstring."""

import inspect


def undocumented(face):
    """Return what of `__all__`, and which attributes of its classes, do not say what they are."""
    found = []
    for name in face.__all__:
        thing = getattr(face, name)
        if not (inspect.isclass(thing) or inspect.isroutine(thing)):
            continue
        parts = [(name, thing)]
        if inspect.isclass(thing):
            parts += [(f"{name}.{each}", getattr(thing, each)) for each in _own_attributes(thing)]
        found += [each for each, part in parts if not inspect.getdoc(part)]
    return found


def _own_attributes(cls):
    """Yield the public methods and properties that ringcomm has written."""
    for name in dir(cls):
        raw = inspect.getattr_static(cls, name)
        function = getattr(raw, "fget", None) or getattr(raw, "__func__", raw)
        is_own = getattr(function, "__module__", None) or ""
        if not name.startswith("_") and is_own.startswith("ringcomm"):
            yield name
