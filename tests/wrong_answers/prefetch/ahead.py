"""Wrong answers to prefetch.ahead."""

import torch.distributed as dist
from wrong_answers import wrong


@wrong("ask for it before")
def on_demand(units, x):
    """Gathers each unit when its turn comes: ZeRO-3."""
    for unit in units:
        unit.gather()
        unit.wait()
        x = unit(x)
        unit.free()
    return x


@wrong("ask for it before")
def too_late(units, x):
    """Asks for the next unit when this one has computed."""
    units[0].gather()
    for i, unit in enumerate(units):
        unit.wait()
        x = unit(x)
        unit.free()
        if i + 1 < len(units):
            units[i + 1].gather()
    return x


@wrong("waited for at once")
def waits_at_once(units, x):
    """Asks early, and waits at once: the gathers are early, and nothing is hidden."""
    units[0].gather()
    units[0].wait()
    for i, unit in enumerate(units):
        if i + 1 < len(units):
            units[i + 1].gather()
            units[i + 1].wait()
        x = unit(x)
        unit.free()
    return x


@wrong("wait() for the unit that is about to compute")
def waits_for_the_next(units, x):
    """Waits for the unit that was asked for last."""
    units[0].gather()
    for i, unit in enumerate(units):
        last = unit
        if i + 1 < len(units):
            units[i + 1].gather()
            last = units[i + 1]
        last.wait()
        x = unit(x)
        unit.free()
    return x


@wrong("more is asked for than may be ahead")
def all_at_once(units, x):
    """Asks for the whole model at the start: everything overlaps, and everything is there."""
    for unit in units:
        unit.gather()
    for unit in units:
        unit.wait()
        x = unit(x)
        unit.free()
    return x


@wrong("before anything more is asked for")
def frees_at_the_end(units, x):
    """Frees all units when the forward is over."""
    units[0].gather()
    for i, unit in enumerate(units):
        if i + 1 < len(units):
            units[i + 1].gather()
        unit.wait()
        x = unit(x)
    for unit in units:
        unit.free()
    return x


@wrong("comes before the free() of the unit that has just computed")
def frees_late(units, x):
    """Frees a unit only when the next one but one was asked for: three take memory for a moment."""
    units[0].gather()
    if len(units) > 1:
        units[1].gather()
    for i, unit in enumerate(units):
        unit.wait()
        x = unit(x)
        if i + 2 < len(units):
            units[i + 2].gather()
        unit.free()
    return x


@wrong("wait() for the unit that is about to compute")
def never_waits(units, x):
    """Leaves wait() out: on a fast machine the numbers may be right."""
    units[0].gather()
    for i, unit in enumerate(units):
        if i + 1 < len(units):
            units[i + 1].gather()
        x = unit(x)
        unit.wait()
        unit.free()
    return x


@wrong("nothing comes after the last unit")
def past_the_end(units, x):
    """Asks for a unit behind the last one."""
    units[0].gather()
    for i, unit in enumerate(units):
        units[i + 1].gather()
        unit.wait()
        x = unit(x)
        unit.free()
    return x


@wrong("each unit's output is the input of the next")
def loses_the_output(units, x):
    """Hands the first input to every unit, if it fits; here it returns what came in."""
    units[0].gather()
    y = x
    for i, unit in enumerate(units):
        if i + 1 < len(units):
            units[i + 1].gather()
        unit.wait()
        y = unit(y)
        unit.free()
    return x


@wrong("a barrier is a collective too")
def with_barriers(units, x):
    """Has all ranks meet before each unit."""
    units[0].gather()
    for i, unit in enumerate(units):
        if i + 1 < len(units):
            units[i + 1].gather()
        dist.barrier()
        unit.wait()
        x = unit(x)
        unit.free()
    return x


@wrong("free() is missing")
def never_frees_the_last(units, x):
    """Frees the unit before, and so never the last one."""
    units[0].gather()
    for i, unit in enumerate(units):
        if i:
            units[i - 1].free()
        if i + 1 < len(units):
            units[i + 1].gather()
        unit.wait()
        x = unit(x)
    return x


@wrong("copies of weights")
def keeps_copies(units, x):
    """Keeps a copy of each unit's weights, which free() does not reach."""
    kept = []
    units[0].gather()
    for i, unit in enumerate(units):
        if i + 1 < len(units):
            units[i + 1].gather()
        unit.wait()
        kept.append([param.detach().clone() for param in unit.layer.parameters()])
        x = unit(x)
        unit.free()
    return x
