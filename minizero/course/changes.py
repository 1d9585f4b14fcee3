"""What changed from one step of the course to the next, as the diff of their modules."""

from __future__ import annotations

import ast
import difflib
import html
import inspect

COLOURS = {"-": "#C94F1D", "+": "#2E7EBB", "@": "#7F7F7F"}  # readable on white and on black


class Diff(str):
    """A diff as text. A notebook shows it in colours, as the value of a cell."""

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        lines = []
        for line in html.escape(self, quote=False).splitlines():
            colour = COLOURS.get(line[:1])
            lines.append(f'<span style="color: {colour}">{line}</span>' if colour else line)
        return '<pre style="font-family: monospace; white-space: pre">' + "\n".join(lines) + "</pre>"


def changes(old: type, new: type) -> Diff:
    """From one step to another, `changes(mz.DDP, mz.Zero1)`: every function that differs, whole, with its lines marked
    - where they go and + where they come.

    Compared are the classes of the two modules, down to the steps themselves. What stands below is no part of the step.
    A class that the new module imports from the old one has not changed; of a step that derives from the old one, what it says
    itself is what comes.
    Docstrings of classes (they explain arguments), imports and comments between functions are left out.
    """
    before, after = _parts(old), _parts(new)
    kept = {part for part in before if part not in after and hasattr(inspect.getmodule(new), part.partition(".")[0])}
    if issubclass(new, old) and new is not old:  # it has all of the old step, and calls what it goes beyond
        kept = set(before)
    before = {part: lines for part, lines in before.items() if part not in kept}
    lines = [f"--- {_path(old)}", f"+++ {_path(new)}"]
    in_order = (line[2:] for line in difflib.ndiff(list(before), list(after)) if line[0] != "?")
    for part in dict.fromkeys(in_order):
        gone, come = before.get(part, []), after.get(part, [])
        if part == "":  # the names of the two steps differ, and that is no change
            gone = [line.replace(old.__name__, new.__name__) for line in gone]
        hunk = list(difflib.unified_diff(gone, come, n=len(gone), lineterm=""))[3:]
        if hunk:
            lines += ["", f"@@ {_title(part, new if come else old)} @@", *hunk]
    return Diff("\n".join(lines))


def _parts(step: type) -> dict[str, list[str]]:
    """Name -> source lines of each class's head and each method, in the order of the module. The step's own name is empty."""
    source = inspect.getsource(inspect.getmodule(step))
    lines = source.splitlines()
    parts: dict[str, list[str]] = {}
    for node in ast.parse(source).body:
        if not isinstance(node, ast.ClassDef):
            continue
        name = "" if node.name == step.__name__ else node.name
        head = parts[name] = lines[_first(node) - 1 : _first(node.body[0]) - 1]
        for member in node.body:
            own = lines[_first(member) - 1 : member.end_lineno]
            if isinstance(member, ast.FunctionDef):
                parts[f"{name}.{member.name}"] = own
            elif not _is_docstring(member):
                head += own
        if name == "":
            return parts
    raise ValueError(f"{step.__name__} is not defined in {_path(step)}: give a step of the course, such as mz.DDP")


def _first(node: ast.stmt) -> int:
    """The number of its first line: that of a decorator, where it has one."""
    return min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _title(part: str, step: type) -> str:
    return step.__name__ + part if part[:1] in ("", ".") else part


def _path(step: type) -> str:
    return inspect.getmodule(step).__name__.replace(".", "/") + ".py"
