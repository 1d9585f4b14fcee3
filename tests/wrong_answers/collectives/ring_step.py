"""Wrong answers to collectives.ring_step."""

from wrong_answers import wrong


@wrong("turns to the right")
def as_in_the_lesson(rank, step, world_size):
    """Copies the lesson's ring, which turns to the right."""
    return (rank - step - 1) % world_size, (rank - step - 2) % world_size


@wrong("the modulo is missing")
def no_modulo(rank, step, world_size):
    """Runs past the last chunk. Turning to the right, negative indices would hide this."""
    return rank + step + 1, rank + step + 2


@wrong("one chunk too early")
def begins_at_home(rank, step, world_size):
    """Begins with the rank's own chunk, as an all-gather does: all sums are right, and end one rank away."""
    return (rank + step) % world_size, (rank + step + 1) % world_size


@wrong("swapped")
def received_first(rank, step, world_size):
    """Gives the two numbers in the wrong order."""
    return (rank + step + 2) % world_size, (rank + step + 1) % world_size


@wrong("the step is not in it")
def same_in_every_step(rank, step, world_size):
    """Right in step 0, and therefore on two ranks."""
    return (rank + 1) % world_size, (rank + 2) % world_size


@wrong("3 ranks are taken for granted")
def always_three(rank, step, world_size):
    """Has the example's three ranks in it."""
    return (rank + step + 1) % 3, (rank + step + 2) % 3
