import html
import re

import pytest

import minizero as mz
from minizero.course import changes

OLD = '''"""The old step."""

import os


class Old(Base):
    """What the arguments mean."""

    def __init__(self, model):
        self.model = model

    # --- a heading ---

    def forward(self):
        """As it was."""
        return 1

    def gone(self):
        pass


class Aside:
    pass
'''
NEW = '''"""The new step."""

import sys


class Helper:
    def help(self):
        return 2


class New(Base):
    """What other arguments mean."""

    flag = True

    def __init__(self, model):
        self.model = Helper(model)

    # --- another heading ---

    def forward(self):
        """As it was."""
        return 1

    @property
    def come(self):
        pass


class Other:
    pass
'''
DIFF = """\
--- old_step.py
+++ new_step.py

@@ Helper @@
+class Helper:

@@ Helper.help @@
+    def help(self):
+        return 2

@@ New @@
 class New(Base):
+    flag = True

@@ New.__init__ @@
     def __init__(self, model):
-        self.model = model
+        self.model = Helper(model)

@@ Old.gone @@
-    def gone(self):
-        pass

@@ New.come @@
+    @property
+    def come(self):
+        pass"""


@pytest.fixture
def steps(tmp_path, monkeypatch):
    (tmp_path / "old_step.py").write_text("Base = object\n" + OLD)
    (tmp_path / "new_step.py").write_text("Base = object\n" + NEW)
    monkeypatch.syspath_prepend(tmp_path)
    return __import__("old_step").Old, __import__("new_step").New


def test_every_function_that_differs_is_shown_whole_and_no_other(steps):
    assert changes(*steps) == DIFF


def test_a_step_that_derives_from_the_old_one_loses_nothing():
    lines = changes(mz.Zero3, mz.Zero3Prefetch).splitlines()[2:]
    assert not [line for line in lines if line.startswith("-")] and "+class Zero3Prefetch(Zero3):" in lines
    assert "+        return super().forward(*args, **kwargs)" in lines or "+            return super().forward(*args, **kwargs)" in lines


def test_from_a_step_to_itself_nothing_changes():
    assert changes(mz.DDP, mz.DDP).splitlines() == ["--- minizero/ddp.py", "+++ minizero/ddp.py"]


def test_the_diff_of_ddp_and_zero1_is_that_of_their_files():
    diff = changes(mz.DDP, mz.Zero1)
    assert diff.startswith("--- minizero/ddp.py\n+++ minizero/zero1.py\n")
    assert "@@ ShardedUpdate.step @@" in diff and "@@ DDP._gather_launched @@" in diff
    assert "ShardedOptimizer" not in diff  # it stands below the step


def test_a_notebook_shows_the_diff_in_colours_and_a_terminal_as_text(steps):
    diff = changes(*steps)
    assert repr(diff) == DIFF
    shown = diff._repr_html_()
    assert html.unescape(re.sub("<[^>]*>", "", shown)) == DIFF
    gone, come = re.findall('<span style="color: (.*?)">[-+] *self.model', shown)
    assert gone != come


def test_what_html_would_swallow_is_kept():
    assert "-&gt; None" in changes(mz.DDP, mz.Zero1)._repr_html_()


def test_a_class_inside_another_is_no_step():
    class Inside:
        pass

    with pytest.raises(
        ValueError, match="Inside is not defined in .*test_course_changes.py: give a step of the course"
    ):
        changes(mz.DDP, Inside)
