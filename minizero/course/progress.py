"""What a learner has done: which checks passed and when, which hints were taken. One file, `.minizero/progress.json`.

It lies in the course's root, or in the folder that MINIZERO_HOME names. Nothing here ever fails a check: where the
file cannot be written (a read-only disk, a grading sandbox), progress is not kept.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from minizero.course.folders import course_root

Entry = dict[str, Any]  # {"passed": "2026-01-31T20:15:00+00:00", "hints": 2}, either may be missing


def read() -> dict[str, Entry]:
    """Exercise name -> what is known of it. Empty where nothing can be read."""
    path = _path()
    try:
        return _parse(path.read_text(encoding="utf-8")) if path else {}
    except (OSError, ValueError):
        return {}


def record_pass(name: str) -> None:
    """Note that `name` has passed. The time of the first pass stays."""
    _update(name, lambda entry: entry.setdefault("passed", datetime.now(timezone.utc).isoformat(timespec="seconds")))


def forget_passes(names: Iterable[str]) -> None:
    """These are to be done again. Hints stay taken."""
    for name in set(names) & read().keys():
        _update(name, lambda entry: entry.pop("passed", None))


def record_hint(name: str, level: int) -> None:
    """Note that the hints of `name` up to `level` have been read."""
    _update(name, lambda entry: entry.update(hints=max(level, hints_taken(entry))))


def hints_taken(entry: Entry) -> int:
    level = entry.get("hints", 0)
    return level if isinstance(level, int) else 0


def _path() -> Path | None:
    home = os.environ.get("MINIZERO_HOME")
    if home:
        return Path(home) / "progress.json"
    root = course_root()
    return root / ".minizero" / "progress.json" if root else None


def _parse(text: str) -> dict[str, Entry]:
    """`ValueError` (which json's and unicode's errors are) if the text is no progress file."""
    content = json.loads(text)
    exercises = content.get("exercises") if isinstance(content, dict) else None
    if not isinstance(exercises, dict) or not all(isinstance(entry, dict) for entry in exercises.values()):
        raise ValueError("not a progress file")
    return exercises


def _update(name: str, change: Callable[[Entry], Any]) -> None:
    path = _path()
    if path is None:
        return
    with contextlib.suppress(OSError, ImportError):  # no fcntl: not a Unix
        path.parent.mkdir(parents=True, exist_ok=True)
        with _lock(path.with_suffix(".lock")):
            exercises = _read_or_put_aside(path)
            change(exercises.setdefault(name, {}))
            _replace(path, json.dumps({"version": 1, "exercises": exercises}, indent=1) + "\n")


def _read_or_put_aside(path: Path) -> dict[str, Entry]:
    """The file's content. One that cannot be understood is kept under another name, and a new one begun."""
    try:
        return _parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError:
        number = 1
        while (aside := path.with_name(f"progress.damaged-{number}.json")).exists():
            number += 1
        os.rename(path, aside)
        return {}


def _replace(path: Path, text: str) -> None:
    """Write beside the file, then rename: a reader sees the old text or the new, never half of it."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".progress-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Two notebooks that pass a check at once write one after the other."""
    import fcntl

    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
