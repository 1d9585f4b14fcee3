"""The command line of the course: `minizero doctor | lab | start | check | hint | status | reset`."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from minizero.course import doctor as doctors
from minizero.course import folders, hints, notebooks, progress, registry
from minizero.course.folders import Lesson
from minizero.course.notebooks import State, Verdict
from minizero.course.registry import CourseError

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
    help="ZeRO from scratch: a course in notebooks. Begin with `minizero doctor` and `minizero lab`.",
)  # fmt: skip
console = Console(highlight=False, soft_wrap=True)  # a name that is broken over two lines cannot be copied

LessonName = Annotated[str, typer.Argument(metavar="LESSON", help='a lesson: "1", "01", "01_ddp" or "ddp"')]
_MARKS = {State.PASSED: "[green]✓ passed[/]", State.FAILED: "[red]✗ failed[/]", State.NOT_DONE: "[dim]· not done[/]"}


def main() -> None:
    """The entry point: a CourseError is one line and exit code 1."""
    try:
        app()
    except CourseError as error:
        Console(stderr=True, highlight=False).print(f"[red]minizero:[/] {escape(str(error))}", soft_wrap=True)
        sys.exit(1)


@app.callback(invoke_without_command=True)
def _options(
    show_version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False,
) -> None:
    if show_version:
        console.print(f"minizero {version('minizero')}")
        raise typer.Exit


@app.command()
def doctor() -> None:
    """Say whether this machine can run the course, and what to do where it cannot."""
    if not _examined():
        raise typer.Exit(1)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def lab(context: typer.Context) -> None:
    """Open the course in JupyterLab. What follows is handed to it: `minizero lab --port 9000 --no-browser`."""
    root = folders.need_course_root()
    if running := _running_labs(root):
        console.print(f"The course is open already, at {running[0]}", markup=False, soft_wrap=True)
        return
    if not _examined(only_failures=True):
        raise CourseError("this machine cannot run the course yet: see the lines above, then `minizero doctor`")
    for lesson in folders.lessons(root):
        if lesson.path("exercises").exists() and not lesson.path("work").exists():
            folders.start(lesson)
    console.print("Your exercises are in work/. The address of the course follows; Ctrl-C twice ends it.")
    _open_lab(root, context.args)


@app.command()
def start(lesson: LessonName) -> None:
    """Copy a lesson's exercises to work/, where they are yours."""
    path = folders.start(_lesson(lesson))
    console.print(
        f"[green]✓[/] work/{path.name} is yours: open it in `minizero lab`, save it, then `minizero check {path.name[:2]}`"
    )


@app.command()
def check(
    lesson: LessonName,
    exercises_from: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="take NN_topic.ipynb from here, not from work/")
    ] = None,
) -> None:
    """Run a lesson's exercises in a fresh kernel, and say which have passed."""
    which = _lesson(lesson)
    path = (exercises_from or which.root / "work") / f"{which.name}.ipynb"
    if not path.exists() and exercises_from is None:
        raise CourseError(f"work/{path.name} is not there yet: `minizero start {which.number}` makes it")
    with tempfile.TemporaryDirectory() as elsewhere, console.status(f"running {path.name}"):
        env = (
            {"MINIZERO_HOME": elsewhere} if exercises_from else {}
        )  # someone else's answers are not the learner's progress
        verdicts, broken = _run(which, path, env)
    for place, error in broken:
        console.print(f"[red]code cell {place} fails[/]  {escape(error)}\n")
    for verdict in verdicts:
        if verdict.state is State.FAILED:
            console.print(Text(verdict.text))
            console.print()
    table = Table("exercise", "points", "", box=None, pad_edge=False)
    for verdict in verdicts:
        table.add_row(verdict.name, str(registry.find(verdict.name).points), _MARKS[verdict.state])
    console.print(table, soft_wrap=False)
    passed = [verdict for verdict in verdicts if verdict.state is State.PASSED]
    saved = datetime.fromtimestamp(path.stat().st_mtime).strftime("%H:%M")
    console.print(f"\n{len(passed)} of {len(verdicts)} exercises of {which.name} passed (as saved at {saved})")
    if not exercises_from:  # what passed once and no longer does is to be done again
        progress.forget_passes({verdict.name for verdict in verdicts} - {verdict.name for verdict in passed})
    if len(passed) < len(verdicts):
        raise typer.Exit(1)


@app.command()
def hint(
    name: Annotated[str, typer.Argument(metavar="NAME", help='an exercise: "ddp.broadcast"')],
    level: Annotated[int | None, typer.Option(help="1, 2 or 3; by default the next one")] = None,
    solution: Annotated[bool, typer.Option("--solution", help="show the solution")] = False,
) -> None:
    """Give the next hint for an exercise: the idea, then the functions, then the code in words."""
    if solution:
        code = Syntax(hints.solution(name), "python", theme="ansi_light", background_color="default")
        console.print(code.highlight(code.code), end="")  # as text: a Syntax cuts or breaks long lines
    else:
        console.print(hints.take_hint(name, level), markup=False)


@app.command()
def status() -> None:
    """Show which exercises have passed, and what comes next."""
    known, upcoming = progress.read(), None
    table = Table("lesson", "", "passed", "hints", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for lesson in folders.lessons(folders.need_course_root()):
        names = _exercises(lesson)
        passed = [name for name in names if "passed" in known.get(name, {})]
        taken = sum(progress.hints_taken(known.get(name, {})) for name in names)
        bar = "".join("[green]■[/]" if name in passed else "[dim]□[/]" for name in names)
        table.add_row(lesson.name, _title(lesson), f"{bar} {len(passed)} of {len(names)}", str(taken or ""))
        if upcoming is None and len(passed) < len(names):
            upcoming = lesson, next(name for name in names if name not in passed)
    console.print(table, soft_wrap=False)
    if upcoming is None:
        console.print("\n[green]✓[/] all exercises have passed")
        return
    lesson, name = upcoming
    begun = lesson.path("work").exists()
    console.print(
        f"\nnext: {name} in work/{lesson.name}.ipynb"
        + ("" if begun else f"  (`minizero start {lesson.number}` makes it)")
    )


@app.command()
def reset(lesson: LessonName) -> None:
    """Begin a lesson's exercises anew: none has passed. Your old copy is kept beside the new one."""
    which = _lesson(lesson)
    backup, path = folders.reset(which)
    progress.forget_passes(_exercises(which))
    kept = f"; the old one is now work/{backup.name}" if backup else ""
    console.print(f"[green]✓[/] work/{path.name} is a fresh copy{kept}")


def _lesson(name: str) -> Lesson:
    return folders.find_lesson(folders.need_course_root(), name)


def _exercises(lesson: Lesson) -> list[str]:
    """The names of a lesson's exercises, in the order of its notebook."""
    if not lesson.path("exercises").exists():
        return []
    cells = notebooks.read(lesson.path("exercises")).cells
    return [name for cell in cells if (name := notebooks.checked_in(cell))]


def _title(lesson: Lesson) -> str:
    """The lesson's own heading."""
    if not lesson.path("notebooks").exists():
        return ""
    lines = (line for cell in notebooks.read(lesson.path("notebooks")).cells for line in cell.source.splitlines())
    return next((line.removeprefix("# ").strip() for line in lines if line.startswith("# ")), "")


def _run(lesson: Lesson, path: Path, env: dict[str, str]) -> tuple[list[Verdict], list[tuple[int, str]]]:
    from nbclient.exceptions import DeadKernelError

    notebook = notebooks.read(path)
    try:
        notebooks.execute(notebook, path.parent, allow_errors=True, env=env)
    except (asyncio.CancelledError, AssertionError):  # an interrupt: nbclient ends the kernel and trips over its absence
        raise KeyboardInterrupt from None
    except DeadKernelError:
        raise CourseError(
            f"{path.name} ends its own kernel: look for os._exit or sys.exit outside a function"
        ) from None
    return notebooks.verdicts(notebook, _exercises(lesson)), notebooks.broken_cells(notebook)


def _examined(only_failures: bool = False) -> bool:
    """Print the doctor's lines. False if something essential is missing."""
    well = True
    for line in doctors.examine():
        well = well and (line.ok or not line.essential)
        mark = "[green]✓[/]" if line.ok else "[red]✗[/]" if line.essential else "[yellow]![/]"
        if not (line.ok and only_failures):
            console.print(
                f"{mark} {escape(line.text)}" + (f"\n    → {escape(line.cure)}" if not line.ok else "")
            )
    return well


def _running_labs(root: Path) -> list[str]:
    """The addresses of this user's servers whose folder is the course: two would save over each other."""
    from jupyter_server.serverapp import list_running_servers

    return [
        f"{server['url']}lab?token={server['token']}"
        for server in list_running_servers()
        if Path(server["root_dir"]).resolve() == root.resolve()
    ]


def _open_lab(root: Path, arguments: list[str]) -> NoReturn:
    """Become JupyterLab, with the course as its folder and the first lesson open."""
    lessons = folders.lessons(root)
    first = next(
        (f"/lab/tree/notebooks/{lesson.name}.ipynb" for lesson in lessons if lesson.path("notebooks").exists()), "/lab"
    )
    command = [
        sys.executable,
        "-m",
        "jupyterlab",
        f"--ServerApp.root_dir={root}",
        f"--LabApp.default_url={first}",
        "--log-level=WARN",
    ]
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        command.append("--allow-root")
    if sys.platform.startswith("linux") and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        command.append("--no-browser")
    sys.stdout.flush()
    os.execv(sys.executable, [*command, *arguments])
