"""Wrong answers to prefetch.backward: a right one with switches, and what people change in it."""

from wrong_answers import wrong


def run(units, grad, early_reduce=False, late=False, land="before the next", wait_at_once=False, gather="ahead", rest=True, free="at once"):
    order = units[::-1]

    def gather_it(k):
        if k < len(order):
            order[k].gather()
            if wait_at_once:
                order[k].wait()

    def reduce(k):
        if k and land == "before the next":
            order[k - 1].land()
        order[k].reduce()
        if land == "at once":
            order[k].land()

    if gather == "ahead":
        gather_it(0)
    for k, unit in enumerate(order):
        gather_it(k + 1 if gather == "ahead" else k)
        if k and not early_reduce and not late:
            reduce(k - 1)
        if not wait_at_once:
            unit.wait()
        grad = unit.backward(grad)
        if free == "at once":
            unit.free()
        if early_reduce:
            reduce(k)
    if late:
        for k in range(len(order)):
            reduce(k)
    elif not early_reduce and rest:
        reduce(len(order) - 1)
    if land == "at the end":
        for unit in order:
            unit.land()
    elif land == "before the next" and rest:
        order[-1].land()
    if free == "at the end":
        for unit in order:
            unit.free()
    return grad


@wrong("ask for it before")
def on_demand(units, grad):
    """Gathers each unit when its turn comes."""
    return run(units, grad, gather="on demand")


@wrong("waited for at once")
def waits_at_once(units, grad):
    """Asks early, and waits at once."""
    return run(units, grad, wait_at_once=True)


@wrong("keep it until the next gather has been asked for")
def reduces_first(units, grad):
    """Reduces a unit as soon as its gradients are there: the next gather queues up behind it."""
    return run(units, grad, early_reduce=True)


@wrong("as soon as it was asked for")
def lands_at_once(units, grad):
    """Waits for each reduction at once."""
    return run(units, grad, land="at once")


@wrong("land() is left for the end")
def lands_at_the_end(units, grad):
    """Leaves all reductions under way until the end: all full gradients take memory."""
    return run(units, grad, land="at the end")


@wrong("the reduction is left for later")
def reduces_at_the_end(units, grad):
    """Reduces when backward is over."""
    return run(units, grad, late=True)


@wrong("the last units have nobody after them")
def forgets_the_last(units, grad):
    """Reduces the unit before, and so never the last one."""
    return run(units, grad, rest=False)


@wrong("before anything more is asked for")
def frees_at_the_end(units, grad):
    """Frees all units in the end."""
    return run(units, grad, free="at the end")


@wrong("whose turn is first")
def forwards(units, grad):
    """Goes through the units from the first to the last."""
    return run(units[::-1], grad)


@wrong("what the backward of the unit behind it has returned")
def the_same_for_all(units, grad):
    """Hands every unit the gradient that came in."""
    order = units[::-1]
    order[0].gather()
    for k, unit in enumerate(order):
        if k + 1 < len(order):
            order[k + 1].gather()
        if k > 1:
            order[k - 2].land()
        if k:
            order[k - 1].reduce()
        unit.wait()
        out = unit.backward(grad)
        unit.free()
    return out


@wrong("it has to be gathered again for backward")
def gathers_nothing(units, grad):
    """Believes that the weights are still there."""
    for unit in units[::-1]:
        grad = unit.backward(grad)
        unit.reduce()
        unit.land()
    return grad


@wrong("a return is missing")
def returns_nothing(units, grad):
    """Returns nothing."""
    run(units, grad)


@wrong("the gradient of the output")
def returns_what_came(units, grad):
    """Returns what it was given."""
    run(units, grad)
    return grad
