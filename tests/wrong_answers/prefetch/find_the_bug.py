"""Wrong answers to prefetch.find_the_bug: what one would measure, and the mended function."""

from wrong_answers import wrong


def mended(take="first", ahead=None):
    def forward_ahead(units, x, depth=1):
        asked, coming = [], iter(units)

        def ask_for(count):
            for _, unit in zip(range(count), coming, strict=False):
                unit.gather()
                asked.append(unit)

        ask_for(depth if ahead is None else ahead)
        for unit in units:
            ask_for(1)
            if take == "all":
                while asked:
                    asked.pop(0).wait()
            elif take == "all, in order":
                for each in asked:
                    if each not in waited:
                        each.wait()
                        waited.append(each)
            else:
                asked.pop(0 if take == "first" else -1).wait()
            x = unit(x)
            unit.free()
        return x

    waited = []
    return forward_ahead


def on_demand(units, x, depth=1):
    """Asks for nothing ahead."""
    for unit in units:
        unit.gather()
        unit.wait()
        x = unit(x)
        unit.free()
    return x


def depth_one(units, x, depth=1):
    """Knows one ahead only."""
    units[0].gather()
    for i, unit in enumerate(units):
        if i + 1 < len(units):
            units[i + 1].gather()
        unit.wait()
        x = unit(x)
        unit.free()
    return x


wrong("gathered once", "a", mended(), mistake="says that more is sent")
wrong("one is freed in each", "b", mended(), mistake="says that more is there")
wrong("keeps nothing from the last one", "d", mended(), mistake="says that weights are stale")
wrong("equal on all ranks", "e", mended(), mistake="says that the ranks disagree")
wrong("and not for another one", "c", mended(take="last"), mistake="mends nothing")
wrong("wait for this one alone", "c", mended(take="all"), mistake="waits for all that were asked for")
wrong("less is asked for ahead than before", "c", on_demand, mistake="takes prefetch away")
wrong("less is asked for ahead than before", "c", depth_one, mistake="loses depth")
wrong("less is asked for ahead than before", "c", mended(ahead=0), mistake="asks for the first units too late")
