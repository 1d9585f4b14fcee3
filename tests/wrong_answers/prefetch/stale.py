"""Wrong answers to prefetch.stale: a right one, and what people change in it."""

from wrong_answers import wrong


class Plan:
    def __init__(self):
        self.last, self.this = [], []

    def at(self, unit, depth=1):
        self.this.append(unit)
        done = len(self.this)
        return self.last[done : done + depth] if self.this == self.last[:done] else []

    def end(self):
        self.last, self.this = self.this, []


class Right:
    def __init__(self):
        self.plan, self.ahead, self.working = Plan(), None, None

    def enter(self, unit):
        if unit is not self.ahead:
            self.drop()
            unit.gather()
        self.ahead, self.working = None, unit
        self.look_ahead(unit)
        unit.wait()

    def look_ahead(self, unit):
        for following in self.plan.at(unit, 1):
            following.gather()
            self.ahead = following

    def leave(self, unit):
        unit.free()
        self.working = None

    def end(self):
        self.drop()
        if self.working is not None:
            self.leave(self.working)
        self.plan.end()

    def drop(self):
        if self.ahead is not None:
            self.ahead.wait()
            self.ahead.free()
            self.ahead = None


@wrong("end() has to wait for it and free it")
class LeavesItUnderWay(Right):
    """Takes what is ahead off when another unit enters, and does not look at the end of a pass."""

    def end(self):
        if self.working is not None:
            self.leave(self.working)
        self.plan.end()


@wrong("end() has to free it")
class ForgetsTheOneThatRaised(Right):
    """Settles what is ahead, and leaves the unit that raised there."""

    def end(self):
        self.drop()
        self.working = None
        self.plan.end()


@wrong("and is not freed")
class OnlyWaits(Right):
    """Waits for what nobody came for, and leaves it there."""

    def drop(self):
        if self.ahead is not None:
            self.ahead.wait()
            self.ahead = None


@wrong("cannot be called back")
class OnlyFrees(Right):
    """Frees what nobody came for, while it arrives."""

    def drop(self):
        if self.ahead is not None:
            self.ahead.free()
            self.ahead = None


@wrong("the next pass's first unit is asked for already")
class BeginsEarly(Right):
    """Asks for the first unit of the next pass at the end of this one."""

    def end(self):
        first = self.plan.this[0]
        super().end()
        first.gather()
        self.ahead = first


@wrong("it is not asked for")
class NeverAhead(Right):
    """Gathers on demand: nothing can be stale, and nothing is hidden."""

    def look_ahead(self, unit):
        pass


@wrong("a guess is gathered in vain")
class Guesses(Right):
    """Asks for what came after the unit, however this pass has gone so far."""

    def look_ahead(self, unit):
        self.plan.at(unit, 1)
        if unit in self.plan.last[:-1]:
            following = self.plan.last[self.plan.last.index(unit) + 1]
            following.gather()
            self.ahead = following


@wrong("does it hear of every unit, and of every end()")
class NeverEnds(Right):
    """Forgets to tell the plan that the pass is over."""

    def end(self):
        self.drop()
        if self.working is not None:
            self.leave(self.working)


@wrong("it is asked for early and waited for at once")
class WaitsAtOnce(Right):
    """Waits for the next unit as well, and so nothing is hidden."""

    def look_ahead(self, unit):
        super().look_ahead(unit)
        if self.ahead is not None:
            self.ahead.wait()
            self.ahead.wait = lambda: None


@wrong("a unit that has left is to be freed at once")
class LeavesItThere(Right):
    """Keeps all units until the end of the pass, for they may be wanted again."""

    def __init__(self):
        super().__init__()
        self.used = []

    def enter(self, unit):
        if unit in self.used:
            self.look_ahead(unit)
            return
        super().enter(unit)

    def leave(self, unit):
        self.used.append(unit)
        self.working = None

    def end(self):
        super().end()
        for unit in self.used:
            unit.free()
        self.used = []


@wrong("the unit whose turn it is comes first")
class AsksForTheNextFirst(Right):
    """Asks for the unit that enters behind the one that comes next."""

    def enter(self, unit):
        there = unit is self.ahead
        if not there:
            self.drop()
        self.ahead, self.working = None, unit
        self.look_ahead(unit)
        if not there:
            unit.gather()
        unit.wait()


@wrong("a guess is gathered in vain")
class KeepsTheOldPlan(Right):
    """Keeps the plan of the pass before when a pass has raised."""

    def end(self):
        raised = self.working is not None
        self.drop()
        if raised:
            self.leave(self.working)
            self.plan.this = []
        else:
            self.plan.end()


@wrong("does it hear of every unit, and of every end()")
class ForgetsAfterAnException(Right):
    """Has no plan when a pass has raised."""

    def end(self):
        raised = self.working is not None
        super().end()
        if raised:
            self.plan.last = []


@wrong("does it hear of every unit, and of every end()")
class NotesWhenItLeaves(Right):
    """Notes a unit when it leaves."""

    def __init__(self):
        super().__init__()
        self.order, self.before = [], []

    def look_ahead(self, unit):
        done = len(self.order) + 1
        if [*self.order, unit] == self.before[:done]:
            for following in self.before[done : done + 1]:
                following.gather()
                self.ahead = following

    def leave(self, unit):
        super().leave(unit)
        self.order.append(unit)

    def end(self):
        self.drop()
        if self.working is not None:
            self.working.free()
            self.working = None
        self.before, self.order = self.order, []
