"""Sends functions and values between processes: cloudpickle, plus the source lines that a traceback needs."""

from __future__ import annotations

import importlib
import io
import linecache
import os
import pickle
import sys
import types
from typing import Any

import cloudpickle

from minizero.parts import calls


class _Pickler(cloudpickle.Pickler):
    """cloudpickle renames every file to `<dynamic-code>`; here code keeps its file name, and its source travels along.

    What belongs to a module that the ranks cannot import (loaded from a path, say) travels with its code.
    """

    def __init__(self, file: io.BytesIO):
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.sources: dict[str, list[str]] = {}
        self.by_value: dict[str, bool] = {"__main__": False}  # cloudpickle does so by itself

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, types.CodeType):
            name = value.co_filename
            if name not in self.sources and not os.path.exists(name):  # a notebook's cell: only we have its lines
                self.sources[name] = linecache.getlines(name)
            return _code_in_file, (self.dispatch_table[types.CodeType](value), name)
        if isinstance(value, types.ModuleType) and sys.modules.get(value.__name__) is value:
            if not self._travels(value.__name__):
                return importlib.import_module, (value.__name__,)  # torch.ops and its like are of a class of their own
        elif isinstance(value, (type, types.FunctionType)):
            self._travels(value.__module__)
        return super().reducer_override(value)

    def _travels(self, name: str | None) -> bool:
        if name not in self.by_value:
            module = sys.modules.get(name or "")
            self.by_value[name] = travels = module is not None and not _importable(name)
            if travels:
                cloudpickle.register_pickle_by_value(module)
        return self.by_value[name]

    def forget(self) -> None:
        for name, travels in self.by_value.items():
            if travels:
                cloudpickle.unregister_pickle_by_value(sys.modules[name])


def _importable(name: str) -> bool:
    """Would a fresh process with this sys.path import the same module?"""
    top = sys.modules.get(name.partition(".")[0])
    if (getattr(top, "__file__", None) or "").startswith(calls.LIBRARIES):
        return True
    parent, _, _ = name.rpartition(".")
    if parent and not _importable(parent):
        return False
    path = getattr(sys.modules.get(parent), "__path__", ()) if parent else None
    finders = [finder.find_spec for finder in sys.meta_path if hasattr(finder, "find_spec")]
    spec = next(filter(None, (find(name, path) for find in finders)), None)
    file = getattr(sys.modules[name], "__file__", None)
    return spec is not None and (not file or (spec.origin is not None and os.path.samefile(spec.origin, file)))


def _code_in_file(reduced: tuple, filename: str) -> types.CodeType:
    make, arguments = reduced[:2]
    return make(*arguments).replace(co_filename=filename)


def pack(value: Any) -> bytes:
    """Pickle `value`. Raises what pickle raises."""
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    try:
        pickler.dump(value)
    finally:
        pickler.forget()
    pickle.dump(pickler.sources, buffer)
    return buffer.getvalue()


def unpack(packed: bytes) -> Any:
    stream = io.BytesIO(packed)
    value = pickle.load(stream)
    for name, lines in pickle.load(stream).items():
        if lines:
            linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
    return value
