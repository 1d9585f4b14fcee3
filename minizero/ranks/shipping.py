"""Sends functions and values between processes: cloudpickle, plus the source lines that a traceback needs."""

from __future__ import annotations

import importlib
import importlib.util
import io
import linecache
import os
import pickle
import sys
import types
from typing import Any

import cloudpickle


class _Pickler(cloudpickle.Pickler):
    """cloudpickle renames every file to `<dynamic-code>`; here code keeps its file name, and its source travels along."""

    def __init__(self, file: io.BytesIO):
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.sources: dict[str, list[str]] = {}

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, types.ModuleType) and sys.modules.get(value.__name__) is value:
            return importlib.import_module, (value.__name__,)  # torch.ops and its like are modules of a class of their own
        if not isinstance(value, types.CodeType):
            return super().reducer_override(value)
        name = value.co_filename
        if name not in self.sources and not os.path.exists(name):  # a notebook cell: its lines live in this process only
            self.sources[name] = linecache.getlines(name)
        return _code_in_file, (self.dispatch_table[types.CodeType](value), name)


def _code_in_file(reduced: tuple, filename: str) -> types.CodeType:
    make, arguments = reduced[:2]
    return make(*arguments).replace(co_filename=filename)


def pack(value: Any) -> bytes:
    """Pickle `value`. Raises what pickle raises."""
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump(value)
    return pickle.dumps((buffer.getvalue(), pickler.sources), protocol=pickle.HIGHEST_PROTOCOL)


def unpack(packed: bytes) -> Any:
    body, sources = pickle.loads(packed)
    for name, lines in sources.items():
        if lines:
            linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
    return pickle.loads(body)


def by_value_if_not_importable(function: Any) -> None:
    """A function of a module that the ranks cannot import (loaded from a path, say) travels with its code."""
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    if module is None or module.__name__ in ("__main__", "builtins") or module.__name__ in cloudpickle.list_registry_pickle_by_value():
        return
    try:
        found = importlib.util.find_spec(module.__name__)
    except (ImportError, ValueError):
        found = None
    file = getattr(module, "__file__", None)
    if found is None or (file and found.origin and not os.path.samefile(found.origin, file)):
        cloudpickle.register_pickle_by_value(module)
