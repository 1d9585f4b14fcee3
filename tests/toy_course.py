"""A course of two tiny lessons: three exercises of the three kinds, their checks and their notebooks' sources."""

from pathlib import Path

import torch
import torch.distributed as dist

from minizero.course import Question, bug, exercise, number

HINTS = [
    "What does every rank hold in the end?",
    "dist.all_reduce, then divide.",
    "All-reduce the tensor and divide it by N.",
]


@exercise("toy.mean", call="mean(tensor)", points=2, hints=HINTS)
def check_mean(answer, expect):
    """the mean on 2 ranks, and the collectives issued"""
    expect.case(world_size=2)
    for outcome in expect.run(_mean_of_twos, 2, answer, causes={"deadlock": "one rank leaves before the others"}):
        expect.equal(
            outcome.value,
            torch.tensor([3.0, 6.0, 9.0]),
            of=f"rank {outcome.rank}'s mean",
            rule="every rank holds the mean over the ranks",
            mistakes={"the sum is not divided by world_size": torch.tensor([6.0, 12.0, 18.0])},
        )
        expect.equal(outcome.count, {"all_reduce": 1}, of="its traffic", rule="one all-reduce is enough")


def _mean_of_twos(rank, answer):
    return answer(torch.tensor([1.0, 2.0, 3.0]) * (2 + 2 * rank))


@number("toy.number", hints=HINTS)
def states(rng):
    """bytes of model states"""
    billions = rng.choice([1, 2, 3])
    return Question(
        text=f"{billions} B parameters, DDP, mixed-precision Adam: GB of model states?",
        answer=16 * billions,
        unit="GB",
        working=[f"2 + 2 + 12 bytes × {billions} B"],
        mistakes={"the fp32 master weights are missing": 12 * billions},
    )


@bug(
    "toy.find_the_bug",
    call="average(tensor)",
    hints=HINTS,
    options={"a": "the ranks differ", "b": "all ranks hold the sum"},
    observed="b",
    why={"a": "all ranks do the same with the same sum"},
)
def check_mended(mended, expect):
    """what one would measure, and the mended function on 2 ranks"""
    for outcome in expect.run(_mean_of_twos, 2, mended):
        expect.equal(outcome.value, torch.tensor([3.0, 6.0, 9.0]), rule="the sum is divided by world_size")


def mean(tensor):
    """A right answer."""
    dist.all_reduce(tensor)
    return tensor / dist.get_world_size()


LESSON = """\
# %% [markdown]
# # 00 A toy lesson
#
# Text.

# %%
print(2 + 2)

# %% tags=["nbval-ignore-output"]
import time
print(time.time_ns())

# %% tags=["raises-exception"]
raise ValueError("on purpose")

# %%
6 * 7
"""

EXERCISES = '''\
# %% [markdown]
# # Toy exercises

# %%
import torch.distributed as dist

import toy_course
from minizero.course import ask, check, hint

# %%
def mean(tensor):
    """The mean over the ranks."""
    ### BEGIN SOLUTION
    # Why so: sum first, then divide.
    dist.all_reduce(tensor)
    return tensor / dist.get_world_size()
    ### END SOLUTION

# %%
check("toy.mean", mean)

# %%
ask("toy.number", seed=0)

# %%
### BEGIN SOLUTION
answer = 16 * 2
### END SOLUTION

# %%
check("toy.number", answer)

# %%
ask("toy.find_the_bug")

# %%
### BEGIN SOLUTION
observed = "b"
### END SOLUTION

# %%
def average(tensor):
    dist.all_reduce(tensor)
    ### BEGIN SOLUTION
    tensor /= dist.get_world_size()
    ### STUB
    # for _ in range(1):
    #     tensor /= 1
    ### END SOLUTION
    return tensor

# %%
check("toy.find_the_bug", observed, average)
'''


def write(root: Path, lesson: str = LESSON, exercises: str = EXERCISES) -> Path:
    """Lay the course's sources at `root`; returns it."""
    authoring = root / "authoring"
    authoring.mkdir(parents=True, exist_ok=True)
    (authoring / "00_toy_lesson.py").write_text(lesson, encoding="utf-8")
    (authoring / "00_toy_exercises.py").write_text(exercises, encoding="utf-8")
    return root
