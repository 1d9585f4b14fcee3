"""Wrong answers to offload.find_the_bug: what one would measure, and the mended function."""

import torch
from wrong_answers import wrong


def mended(wait="above", buffers=2, last=2):
    def staged_step(link, units, staging, update):
        downs, ups = [], []
        for unit in units:
            grad_S = torch.empty(unit.grad_S.shape, dtype=unit.grad_S.dtype)
            downs.append((grad_S, link.copy(grad_S, unit.grad_S)))
        if wait == "all gradients":
            for _, down in downs:
                down.wait()
        for i, unit in enumerate(units):
            grad_S, down = downs[i]
            down.wait()
            if wait == "before the update" and i:
                ups[i - 1].wait()
            update(unit, grad_S)
            rounded_S = staging[i % buffers][: len(unit.master_S)]
            if wait == "new memory":
                rounded_S = torch.empty(rounded_S.shape, dtype=rounded_S.dtype)
            if wait == "above" and i >= 2:
                ups[i - 2].wait()
            if wait == "one earlier" and i:
                ups[i - 1].wait()
            if wait == "one too few" and i >= 3:
                ups[i - 3].wait()
            rounded_S.copy_(unit.master_S)
            ups.append(link.copy(unit.weights_S, rounded_S))
            if wait == "below" and i >= 2:
                ups[i - 2].wait()
            if wait == "at once":
                ups[i].wait()
        for up in ups[-last:] if last else []:
            up.wait()

    return staged_step


wrong("comes down into memory of its own", "a", mended(), mistake="says that gradients are mixed up")
wrong("copy_ rounds when it is filled", "c", mended(), mistake="says that 32 bits go up")
wrong("the last line for these", "d", mended(), mistake="says that copies are left under way")
wrong("all gradients leave before the first update", "e", mended(), mistake="says that nothing overlaps")
wrong("the wait has to stand above the line that fills it", "b", mended("below"), mistake="mends nothing")
wrong("the wait has to stand above the line that fills it", "b", mended("one too few"), mistake="waits for a copy too long ago")
wrong("the wait has to stand above the line that fills it", "b", mended("below", buffers=1), mistake="keeps one buffer")
wrong("that is right and nothing overlaps", "b", mended("at once"), mistake="waits for each copy at once")
wrong("travel while the next is updated", "b", mended("before the update"), mistake="waits for the copy of the unit before")
wrong("needs as much host memory as there are weights", "b", mended("new memory", last=9), mistake="makes memory for each unit")
wrong("its wait() is missing", "b", mended(last=1), mistake="waits for the last copy only")
wrong("gradients travel beside the updates", "b", mended("all gradients"), mistake="waits for all gradients first")
wrong("with one buffer it can be filled only when", "b", mended("one earlier", buffers=1), mistake="uses one buffer of the two")
