"""Runs a notebook in a fresh kernel, and reads the verdicts of its check cells."""

from __future__ import annotations

import copy
import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from minizero.course.registry import CourseError

CELL_TIMEOUT = 180  # seconds; a check's own deadline is shorter

_CHECK = re.compile(r"""^check\(\s*["']([^"']*)["']""", re.MULTILINE)


class State(Enum):
    PASSED = "passed"
    FAILED = "failed"
    NOT_DONE = "not done"


@dataclass
class Verdict:
    """What became of one exercise in a notebook. `text`: the block that the check printed or raised."""

    name: str
    state: State
    text: str


def checked_in(cell: NotebookNode) -> str | None:
    """The exercise that a cell checks; None if it is not a check cell."""
    match = _CHECK.search(cell.source) if cell.cell_type == "code" else None
    return match[1] if match else None


def read(path: Path) -> NotebookNode:
    """A notebook file. `CourseError` if it is missing or damaged."""
    try:
        return nbformat.read(path, as_version=4)
    except FileNotFoundError:
        raise CourseError(f"there is no {path}") from None
    except Exception as error:  # nbformat raises errors of many kinds
        raise CourseError(f"{path} is not a notebook that can be read: {error}") from error


def execute(
    notebook: NotebookNode, folder: Path, *, allow_errors: bool = False, env: Mapping[str, str] | None = None
) -> NotebookNode:
    """Run all cells in a fresh kernel of this Python, from `folder`; returns `notebook` with its outputs.

    With allow_errors a cell that fails, or takes longer than CELL_TIMEOUT, does not stop the others.
    """
    from ipykernel.kernelspec import get_kernel_dict
    from jupyter_client import AsyncKernelManager
    from jupyter_client.kernelspec import KernelSpec
    from nbclient import NotebookClient

    class ThisPython(AsyncKernelManager):
        """Whatever kernels are installed on the machine, the one that is meant has minizero in it."""

        @property
        def kernel_spec(self) -> KernelSpec:
            return KernelSpec(**get_kernel_dict())

    client = NotebookClient(
        notebook,
        kernel_manager_class=ThisPython,
        resources={"metadata": {"path": str(folder)}},
        timeout=CELL_TIMEOUT,
        interrupt_on_timeout=allow_errors,
        allow_errors=allow_errors,
        record_timing=False,
        coalesce_streams=True,
    )
    metadata = copy.deepcopy(notebook.metadata)  # nbclient adds the version of this Python
    client.execute(env={**os.environ, **(env or {})}, stderr=subprocess.DEVNULL)
    notebook.metadata = metadata
    return notebook


def verdicts(notebook: NotebookNode, names: list[str]) -> list[Verdict]:
    """What an executed notebook says about the exercises `names`."""
    cells = {checked_in(cell): cell for cell in notebook.cells}
    return [_verdict(name, cells.get(name)) for name in names]


def broken_cells(notebook: NotebookNode) -> list[tuple[int, str]]:
    """The cells that failed and are not check cells: their place among the code cells, from 1, and the error."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    errors = [(place, _error(cell)) for place, cell in enumerate(code, start=1) if not checked_in(cell)]
    return [(place, f"{error.ename}: {error.evalue}") for place, error in errors if error]


def _verdict(name: str, cell: NotebookNode | None) -> Verdict:
    if cell is None:
        return Verdict(name, State.NOT_DONE, f"✗ {name}: its check cell is not in the notebook")
    error = _error(cell)
    if error is not None and error.ename in ("CheckFailed", "NotDone"):
        return Verdict(name, State.NOT_DONE if error.ename == "NotDone" else State.FAILED, error.evalue)
    if error is not None:
        return Verdict(name, State.FAILED, f"✗ {name}   {error.ename}: {error.evalue}")
    text = "".join(output.text for output in cell.outputs if output.output_type == "stream")
    if f"✓ {name} " in text:
        return Verdict(name, State.PASSED, text.strip())
    return Verdict(name, State.NOT_DONE, f"✗ {name}: its check cell was not run")


def _error(cell: NotebookNode) -> NotebookNode | None:
    return next((output for output in cell.get("outputs", ()) if output.output_type == "error"), None)
