"""Wrong answers to prefetch.limit: a right one with switches, and what people change in it."""

from wrong_answers import wrong


def run(units, x, depth, max_live, fits=None, stop=True, forget=True, own=False):
    fits = fits or (lambda live, unit: live + unit.P <= max_live)
    asked, live = set(), 0
    for i, unit in enumerate(units):
        if i not in asked:
            unit.gather()
            asked.add(i)
            if own:
                live += unit.P
        elif forget and not own:
            live -= unit.P
        for j in range(i + 1, min(i + 1 + depth, len(units))):
            if j in asked:
                continue
            if not fits(live, units[j]):
                if stop:
                    break
                continue
            units[j].gather()
            asked.add(j)
            live += units[j].P
        unit.wait()
        x = unit(x)
        unit.free()
        if own:
            live -= unit.P
    return x


@wrong("max_live is not looked at")
def no_limit(units, x, depth, max_live):
    """Looks at depth alone."""
    return run(units, x, depth, max_live, fits=lambda live, unit: True)


@wrong("ask before the gather whether the unit fits")
def until_it_is_over(units, x, depth, max_live):
    """Stops when the limit is passed, not before."""
    return run(units, x, depth, max_live, fits=lambda live, unit: live < max_live)


@wrong("`at most` max_live")
def below(units, x, depth, max_live):
    """Wants to stay below the limit."""
    return run(units, x, depth, max_live, fits=lambda live, unit: live + unit.P < max_live)


@wrong("the first that does not fit ends it")
def goes_past(units, x, depth, max_live):
    """Leaves out what does not fit, and asks for a smaller one behind it."""
    return run(units, x, depth, max_live, stop=False)


@wrong("a unit whose turn has come does not count any more")
def never_forgets(units, x, depth, max_live):
    """Counts everything that was ever asked for."""
    return run(units, x, depth, max_live, forget=False)


@wrong("the unit whose turn it is does not count")
def counts_its_own(units, x, depth, max_live):
    """Counts the unit that computes, too."""
    return run(units, x, depth, max_live, own=True)


@wrong("nothing is ever ahead")
def on_demand(units, x, depth, max_live):
    """Gathers each unit when its turn comes."""
    return run(units, x, 0, max_live)


@wrong("what is ahead already, from earlier turns, counts as well")
def each_turn_anew(units, x, depth, max_live):
    """Holds each turn's gathers against the limit, and forgets those of the turn before."""
    asked = set()
    for i, unit in enumerate(units):
        if i not in asked:
            unit.gather()
            asked.add(i)
        live = 0
        for j in range(i + 1, min(i + 1 + depth, len(units))):
            if j in asked:
                continue
            if live + units[j].P > max_live:
                break
            units[j].gather()
            asked.add(j)
            live += units[j].P
        unit.wait()
        x = unit(x)
        unit.free()
    return x


@wrong("more than `depth` units are ahead")
def one_too_many(units, x, depth, max_live):
    """Goes one further than depth."""
    return run(units, x, depth + 1, max_live)


@wrong("the sum of those ahead")
def each_by_itself(units, x, depth, max_live):
    """Holds each unit against the limit, and not their sum."""
    return run(units, x, depth, max_live, fits=lambda live, unit: unit.P <= max_live)


@wrong("depth is not looked at")
def no_depth(units, x, depth, max_live):
    """Looks at max_live alone."""
    return run(units, x, len(units), max_live)


@wrong("only if it is not on its way already")
def asks_twice(units, x, depth, max_live):
    """Asks for a unit that is on its way."""
    units[0].gather()
    for i, unit in enumerate(units):
        for following in units[i + 1 : i + 1 + depth]:
            if following.P > max_live:
                break
            following.gather()
        unit.wait()
        x = unit(x)
        unit.free()
    return x


@wrong("the unit whose turn it is comes first")
def behind(units, x, depth, max_live):
    """Asks for the unit whose turn it is after those that come next: it waits for them all."""
    ahead = []
    for i, unit in enumerate(units):
        late = unit not in ahead
        ahead = [each for each in ahead if each is not unit]
        for following in units[i + 1 + len(ahead) : i + 1 + depth]:
            if sum(each.P for each in ahead) + following.P > max_live:
                break
            following.gather()
            ahead.append(following)
        if late:
            unit.gather()
        unit.wait()
        x = unit(x)
        unit.free()
    return x


@wrong("comes before the free() of the unit that has just computed")
def fills_up_before_the_free(units, x, depth, max_live):
    """Asks for more when a unit has computed, and frees it then."""
    asked = 0

    def fill(i):
        nonlocal asked
        while asked < len(units) and asked - i <= depth and sum(unit.P for unit in units[i + 1 : asked + 1]) <= max_live:
            units[asked].gather()
            asked += 1

    for i, unit in enumerate(units):
        if asked <= i:
            unit.gather()
            asked = i + 1
        fill(i)
        unit.wait()
        x = unit(x)
        if i + 1 < asked:
            fill(i + 1)
        unit.free()
    return x


@wrong("unit.P counts it")
def without_padding(units, x, depth, max_live):
    """Counts the layer's own parameters."""
    numel = lambda unit: sum(param.numel() for param in unit.layer.parameters())  # noqa: E731
    return run(units, x, depth, max_live, fits=lambda live, unit: live + numel(unit) <= max_live)
