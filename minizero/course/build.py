"""Builds the notebooks from authoring/: `python -m minizero.course.build [NN …] [--check] [--force]`.

    authoring/NN_topic_lesson.py     ->  notebooks/NN_topic.ipynb     executed, outputs kept
    authoring/NN_topic_exercises.py  ->  exercises/NN_topic.ipynb     with holes, no outputs
                                         solutions/NN_topic.ipynb     filled, no outputs: nbgrader's source version

The sources are percent-format Python (jupytext). In exercises a cell with a region between `### BEGIN SOLUTION` and
`### END SOLUTION` belongs to the next `check("topic.name", …)` cell. nbgrader's own preprocessors empty the regions; what
the learner finds in their place is `raise NotImplementedError("topic.name")` in a function, `name = None` at top level, or the
commented lines after a `### STUB` line inside the region.

The same sources give the same files, to the byte. A lesson is executed only when its source has changed.
"""

from __future__ import annotations

import argparse
import ast
import copy
import hashlib
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from minizero.course import registry
from minizero.course.hints import grade_id
from minizero.course.notebooks import checked_in, execute
from minizero.course.registry import CourseError

BEGIN, STUB, END = "### BEGIN SOLUTION", "### STUB", "### END SOLUTION"
IGNORED, RAISES = "nbval-ignore-output", "raises-exception"

_METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {
        "name": "python",
        "file_extension": ".py",
        "mimetype": "text/x-python",
        "pygments_lexer": "ipython3",
    },
}
_SOURCE = re.compile(r"(\d\d_\w+)_(lesson|exercises)\.py")
_REGION = re.compile(rf"^( *){BEGIN}\n(.*?)^ *{END}\n?", re.MULTILINE | re.DOTALL)
_HOLE = "@hole@"  # what nbgrader puts in a region's place, until the author's stub replaces it


@dataclass
class Source:
    """One file of authoring/."""

    path: Path

    @property
    def name(self) -> str:
        return _SOURCE.fullmatch(self.path.name)[1]

    @property
    def is_lesson(self) -> bool:
        return self.path.name.endswith("_lesson.py")

    @property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    def target(self, folder: str) -> Path:
        return self.path.parents[1] / folder / f"{self.name}.ipynb"

    def error(self, text: str) -> CourseError:
        return CourseError(f"authoring/{self.path.name}: {text}")


def sources(root: Path, only: list[str] | None = None) -> list[Source]:
    """The sources in authoring/, all or those of the numbers (or names) in `only`."""
    found = [Source(path) for path in sorted((root / "authoring").glob("*.py")) if _SOURCE.fullmatch(path.name)]
    for each in only or ():
        if not any(source.path.name.startswith(each) for source in found):
            raise CourseError(f"authoring/ has no source of {each!r}")
    return [source for source in found if not only or any(source.path.name.startswith(each) for each in only)]


def build(root: Path, only: list[str] | None = None, force: bool = False) -> list[Path]:
    """Build what is stale. Returns the files that were written.

    force: execute lessons again although their sources are unchanged. Cells tagged nbval-ignore-output then keep
    their old outputs, so that what differs is what matters; delete the notebook to draw its pictures anew.
    """
    written = []
    for source in sources(root, only):
        if source.is_lesson:
            target = source.target("notebooks")
            if not force and not lesson_is_stale(source):
                continue
            outputs = {target: build_lesson(source, _read(target))}
        else:
            exercises, solutions = build_exercises(source)
            outputs = {source.target("exercises"): exercises, source.target("solutions"): solutions}
        for path, notebook in outputs.items():
            text = _text(notebook)
            if not path.exists() or path.read_text(encoding="utf-8") != text:
                path.parent.mkdir(exist_ok=True)
                path.write_text(text, encoding="utf-8")
                written.append(path)
    return written


def stale(root: Path) -> list[str]:
    """The notebooks that a build would change, and those that have no source, as paths within the course."""
    expected: dict[Path, bool] = {}
    for source in sources(root):
        if source.is_lesson:
            expected[source.target("notebooks")] = lesson_is_stale(source)
        else:
            for folder, notebook in zip(("exercises", "solutions"), build_exercises(source), strict=True):
                path = source.target(folder)
                expected[path] = not path.exists() or path.read_text(encoding="utf-8") != _text(notebook)
    there = {path for folder in ("notebooks", "exercises", "solutions") for path in (root / folder).glob("*.ipynb")}
    orphans = dict.fromkeys(there - expected.keys(), True)
    return [str(path.relative_to(root)) for path, is_stale in sorted({**expected, **orphans}.items()) if is_stale]


# --- lessons ---------------------------------------------------------------------------------------


def lesson_is_stale(source: Source) -> bool:
    """True unless the notebook has the cells of its source, each code cell executed, from this very text."""
    old = _read(source.target("notebooks"))
    if old is None:
        return True
    new = _lesson(source)
    executed = all(cell.execution_count is not None for cell in old.cells if cell.cell_type == "code")
    return (
        not executed
        or old.metadata != new.metadata
        or list(map(_identity, old.cells)) != list(map(_identity, new.cells))
    )


def build_lesson(source: Source, old: NotebookNode | None = None) -> NotebookNode:
    """The lesson, executed. `CourseError` names the cell that fails or whose output cannot be kept."""
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    notebook = _lesson(source)
    folder = source.target("notebooks").parent
    folder.mkdir(exist_ok=True)
    try:
        execute(notebook, folder)
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        raise source.error(f"a cell fails\n{error}") from error
    same_source = old is not None and old.metadata == notebook.metadata
    for place, cell in enumerate(notebook.cells):
        if cell.cell_type != "code":
            continue
        _keep_what_can_be_kept(cell, source)
        if same_source and IGNORED in cell.metadata.get("tags", ()):
            cell.outputs = old.cells[place].outputs
    return notebook


def _lesson(source: Source) -> NotebookNode:
    notebook = _cells(source)
    digest = hashlib.sha256(source.text.encode()).hexdigest()
    notebook.metadata["minizero"] = {"source": digest[:16]}
    return notebook


def _keep_what_can_be_kept(cell: NotebookNode, source: Source) -> None:
    if cell.execution_count is None:
        raise source.error(f"a code cell was not executed:\n{cell.source}")
    if RAISES in cell.metadata.get("tags", ()) and not any(output.output_type == "error" for output in cell.outputs):
        raise source.error(f"a cell tagged {RAISES} raises nothing:\n{cell.source}")
    machine = [str(source.path.parents[1]), str(Path.home()) + "/", sys.prefix, tempfile.gettempdir() + "/"]
    for output in cell.outputs:
        if output.output_type == "error":  # a traceback is full of paths, and nbval does not compare it
            output.traceback = [f"{output.ename}: {output.evalue}"]
        if output.get("name") == "stderr":
            raise source.error(f"a cell writes to stderr:\n{cell.source}\n{output.text}")
        told = next((path for path in machine if path in str(output)), None)
        if told:
            raise source.error(f"the output of a cell names {told}, a folder of this machine:\n{cell.source}")


# --- exercises -------------------------------------------------------------------------------------


def build_exercises(source: Source) -> tuple[NotebookNode, NotebookNode]:
    """The notebook with holes and the one without."""
    from nbgrader.preprocessors import CheckCellMetadata, ClearOutput, ClearSolutions, ComputeChecksums, LockCells

    solutions = _cells(source)
    _mark(solutions, source)
    exercises = copy.deepcopy(solutions)
    for cell in solutions.cells:
        cell.source = _REGION.sub(lambda region: _without_stub(region[0]), cell.source)
    _apply(solutions, ClearOutput(), CheckCellMetadata())

    holes = [_stubs(cell, source) for cell in exercises.cells]
    _apply(exercises, LockCells(), ClearSolutions(code_stub={"python": _HOLE}), ClearOutput())
    for cell, stubs in zip(exercises.cells, holes, strict=True):
        for stub in stubs:
            cell.source = re.sub(
                rf"^( *){_HOLE}$", lambda hole, stub=stub: _indent(stub, hole[1]), cell.source, count=1, flags=re.M
            )
    _apply(exercises, CheckCellMetadata(), ComputeChecksums(), CheckCellMetadata())
    return exercises, solutions


def _apply(notebook: NotebookNode, *preprocessors) -> None:
    resources: dict = {}
    for preprocessor in preprocessors:
        preprocessor.preprocess(notebook, resources)


def _mark(notebook: NotebookNode, source: Source) -> None:
    """nbgrader's metadata, version 3: which cells are to be solved, which are graded, and for how many points."""
    waiting: list[NotebookNode] = []
    checked: set[str] = set()
    for cell in notebook.cells:
        if BEGIN in cell.source or END in cell.source:
            waiting.append(cell)
            if not cell.source.count(BEGIN) == cell.source.count(END) == len(_REGION.findall(cell.source)):
                raise source.error(f"{BEGIN} and {END} do not pair up:\n{cell.source}")
        name = checked_in(cell)
        if name is None:
            continue
        if "\n" in cell.source or name in checked or not waiting:
            raise source.error(
                f"a check cell is one line, one for each exercise, after the cells it judges: {cell.source}"
            )
        exercise = registry.find(name)
        checked.add(name)
        for number, solved in enumerate(waiting, start=1):
            suffix = f"-{number}" if number > 1 else ""
            _grade(solved, grade_id(name) + suffix, solution=True)
        _grade(cell, grade_id(name) + "-check", grade=True, locked=True, points=exercise.points)
        waiting.clear()
    if waiting:
        raise source.error(f"no check cell follows this solution:\n{waiting[0].source}")


def _grade(
    cell: NotebookNode, name: str, *, grade: bool = False, solution: bool = False, locked: bool = False, **points: int
) -> None:
    flags = {"grade": grade, "solution": solution, "locked": locked, "task": False}
    cell.metadata["nbgrader"] = {"schema_version": 3, "grade_id": name, **flags, **points}
    cell.id = name


def _stubs(cell: NotebookNode, source: Source) -> list[str]:
    """What the learner finds in place of each region of a cell."""
    return [_stub(region[1], region[2], cell, source) for region in _REGION.finditer(cell.source)]


def _stub(indent: str, body: str, cell: NotebookNode, source: Source) -> str:
    _, marker, own = body.partition(f"{indent}{STUB}\n")
    if marker:
        lines = [line.removeprefix(indent) for line in own.splitlines()]
        if not all(line.startswith("#") for line in lines):
            raise source.error(f"the lines after {STUB} are comments:\n{cell.source}")
        return "\n".join(line.removeprefix("#").removeprefix(" ") for line in lines)
    if indent:
        name = cell.metadata["nbgrader"]["grade_id"].replace("-", ".", 1).partition("-")[0]
        return f'raise NotImplementedError("{name}")'
    statements = ast.parse(body).body
    if not all(isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name) for each in statements):
        raise source.error(f"a region outside a function holds assignments only (or has a {STUB} part):\n{cell.source}")
    names = dict.fromkeys(each.targets[0].id for each in statements)
    return "\n".join(f"{name} = None" for name in names)


def _without_stub(region: str) -> str:
    return re.sub(rf"^ *{STUB}\n.*?(?=^ *{END})", "", region, flags=re.MULTILINE | re.DOTALL)


def _indent(text: str, by: str) -> str:
    return "\n".join(by + line if line else line for line in text.splitlines())


# --- both ------------------------------------------------------------------------------------------


def _cells(source: Source) -> NotebookNode:
    """The cells of a source, with ids that depend on nothing but their text."""
    import jupytext

    notebook = jupytext.reads(source.text, fmt="py:percent")
    made = nbformat.v4.new_notebook(metadata=copy.deepcopy(_METADATA))
    seen: dict[str, int] = {}
    for cell in notebook.cells:
        if cell.cell_type not in ("code", "markdown") or not cell.source.strip():
            raise source.error(f"cells are code or markdown, and not empty: {cell.cell_type} {cell.source!r}")
        digest = hashlib.sha256(f"{cell.cell_type} {cell.source}".encode()).hexdigest()[:8]
        seen[digest] = seen.get(digest, 0) + 1
        new = nbformat.v4.new_code_cell if cell.cell_type == "code" else nbformat.v4.new_markdown_cell
        metadata = {"tags": cell.metadata["tags"]} if "tags" in cell.metadata else {}
        made.cells.append(new(cell.source, id=f"{digest}-{seen[digest]}", metadata=metadata))
    return made


def _identity(cell: NotebookNode) -> tuple:
    return cell.id, cell.cell_type, cell.source, cell.metadata


def _read(path: Path) -> NotebookNode | None:
    try:
        return nbformat.read(path, as_version=4)
    except FileNotFoundError:
        return None


def _text(notebook: NotebookNode) -> str:
    nbformat.validate(notebook)
    return nbformat.writes(notebook, version=4) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m minizero.course.build", description="Build the notebooks from authoring/."
    )
    parser.add_argument("only", nargs="*", metavar="NN", help="numbers or names of lessons; all by default")
    parser.add_argument(
        "--check", action="store_true", help="build nothing; fail and name the notebooks that are stale"
    )
    parser.add_argument(
        "--force", action="store_true", help="execute lessons again although their sources are unchanged"
    )
    parser.add_argument(
        "--root", type=Path, default=Path(), help="the folder that holds authoring/; by default the current one"
    )
    given = parser.parse_args(arguments)
    root = given.root.resolve()
    try:
        if not (root / "authoring").is_dir():
            raise CourseError(f"there is no authoring/ in {root}: run the build in the course's root")
        if given.check:
            names = stale(root)
            for name in names:
                print(f"{name} is stale: run `make notebooks`", file=sys.stderr)
            return 1 if names else 0
        for path in build(root, given.only, given.force):
            print(f"built {path.relative_to(root)}")
    except CourseError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
