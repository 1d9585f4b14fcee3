"""Wrong answers to prefetch.order: a right one, and what people change in it."""

from wrong_answers import wrong


class Right:
    def __init__(self):
        self.last, self.this = [], []

    def at(self, unit, depth=1):
        self.this.append(unit)
        done = len(self.this)
        return self.last[done : done + depth] if self.this == self.last[:done] else []

    def end(self):
        self.last, self.this = self.this, []


@wrong("nobody looks whether this time is like the last")
class OnlyCounts(Right):
    """Counts, and compares nothing."""

    def at(self, unit, depth=1):
        self.this.append(unit)
        return self.last[len(self.this) :][:depth]


@wrong("only this unit is compared")
class ComparesOne(Right):
    """Compares the unit at this place, not those before it."""

    def at(self, unit, depth=1):
        place = len(self.this)
        self.this.append(unit)
        return self.last[place + 1 : place + 1 + depth] if self.last[place : place + 1] == [unit] else []


@wrong("a dict has one successor for each unit")
class Successors(Right):
    """Keeps the next unit of each unit."""

    def __init__(self):
        super().__init__()
        self.following = {}

    def at(self, unit, depth=1):
        self.this.append(unit)
        found = []
        while len(found) < depth and unit in self.following:
            unit = self.following[unit]
            found.append(unit)
        return found

    def end(self):
        self.following = dict(zip(self.this, self.this[1:], strict=False))
        self.this = []


@wrong("which finds its first place")
class Index(Right):
    """Looks the unit up in the last order."""

    def at(self, unit, depth=1):
        self.this.append(unit)
        if self.this != self.last[: len(self.this)]:
            return []
        place = self.last.index(unit)
        return self.last[place + 1 : place + 1 + depth]


@wrong("the order of the first time is kept for ever")
class FirstOrder(Right):
    """Takes the first time for the order of the model."""

    def end(self):
        self.last, self.this = self.last or self.this, []


@wrong("end() does not begin a new time")
class GoesOn(Right):
    """Copies the order and never empties it."""

    def end(self):
        self.last = list(self.this)


@wrong("this time takes the place of the last")
class AllTimes(Right):
    """Extends one list for ever."""

    def end(self):
        self.last, self.this = [*self.last, *self.this], []


@wrong("after the last unit nothing comes")
class Around(Right):
    """Goes on with the first unit after the last one."""

    def at(self, unit, depth=1):
        self.this.append(unit)
        done = len(self.this)
        return (self.last * 4)[done : done + depth] if self.this == self.last[:done] else []


@wrong("at most `depth` are asked for")
class Everything(Right):
    """Returns all that come."""

    def at(self, unit, depth=1):
        return super().at(unit, 10**6)


@wrong("depth is not looked at")
class One(Right):
    """Returns one, whatever depth is."""

    def at(self, unit, depth=1):
        return super().at(unit, 1)


@wrong("the unit itself is in it")
class Itself(Right):
    """Begins with the unit that is executed now."""

    def at(self, unit, depth=1):
        self.this.append(unit)
        done = len(self.this)
        return self.last[done - 1 : done - 1 + depth] if self.this == self.last[:done] else []


@wrong("it returns a list")
class NotAList(Right):
    """Returns the unit, or None."""

    def at(self, unit, depth=1):
        return (super().at(unit, 1) or [None])[0]


@wrong("an order that was another one is not taken over")
class KeepsThePlan(Right):
    """Throws an order away that was not like the last."""

    def end(self):
        if not self.last or self.this == self.last[: len(self.this)]:
            self.last = self.this
        self.this = []
