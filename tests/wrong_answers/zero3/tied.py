"""Wrong answers to zero3.tied."""

from wrong_answers import wrong


def paths(model):
    uses = {}
    for path, param in model.named_parameters(remove_duplicate=False):
        uses.setdefault(param, []).append(path)
    return uses


def contains(unit, path):
    return unit == "" or path.startswith(unit + ".")


@wrong("only a parameter's first path is seen")
def first_path(model, units):
    """Takes named_parameters() as it is: a shared parameter has one name there."""
    return {
        param: max((unit for unit in units if contains(unit, path)), key=len) for path, param in model.named_parameters()
    }


@wrong("of a parameter's paths the last one wins")
def last_path(model, units):
    """Sees all paths, and lets each overwrite the one before."""
    return {
        param: max((unit for unit in units if contains(unit, path)), key=len)
        for path, param in model.named_parameters(remove_duplicate=False)
    }


@wrong("layers.1 does not contain layers.10")
def without_the_dot(model, units):
    """Compares the beginnings of names, without the dot."""
    return {
        param: max((unit for unit in units if all(path.startswith(unit) for path in of_param)), key=len)
        for param, of_param in paths(model).items()
    }


@wrong("whatever is shared goes to the root")
def shared_to_the_root(model, units):
    """Gives every shared parameter to the root: right, and longer in memory than it has to be."""
    return {
        param: "" if len(of_param) > 1 else max((unit for unit in units if contains(unit, of_param[0])), key=len)
        for param, of_param in paths(model).items()
    }


@wrong("a lower unit that encloses both")
def across_units_to_the_root(model, units):
    """Gives what two units share to the root, although a lower unit contains all its uses."""
    lowest = {
        param: {max((unit for unit in units if contains(unit, path)), key=len) for path in of_param}
        for param, of_param in paths(model).items()
    }
    return {param: owners.pop() if len(owners) == 1 else "" for param, owners in lowest.items()}


@wrong("contains all uses as well")
def shared_or_frozen_to_the_root(model, units):
    """Gives every shared parameter to the root, and every frozen one, too."""
    return {
        param: max((unit for unit in units if contains(unit, of_param[0])), key=len)
        if len(of_param) == 1 and param.requires_grad
        else ""
        for param, of_param in paths(model).items()
    }


@wrong("the root always does")
def all_to_the_root(model, units):
    """Takes the first unit that contains all uses: the root, mostly."""
    return {
        param: next(unit for unit in sorted(units) if all(contains(unit, path) for path in of_param))
        for param, of_param in paths(model).items()
    }


@wrong("a list may come in any order")
def last_of_the_list(model, units):
    """Takes the last unit of the list that contains all uses, whatever its order."""
    return {
        param: next(unit for unit in reversed(units) if all(contains(unit, path) for path in of_param))
        for param, of_param in paths(model).items()
    }


@wrong("it has to contain all")
def any_use(model, units):
    """A unit that contains any of the uses is good enough."""
    return {
        param: max((unit for unit in units if any(contains(unit, path) for path in of_param)), key=len)
        for param, of_param in paths(model).items()
    }


@wrong("a key is the parameter itself")
def by_path(model, units):
    """Returns paths for keys."""
    return {
        path: max((unit for unit in units if contains(unit, path)), key=len) for path, _ in model.named_parameters()
    }


@wrong("some parameters are left out")
def only_trained(model, units):
    """Leaves frozen parameters out: their weights are never gathered."""
    return {
        param: max((unit for unit in units if all(contains(unit, path) for path in of_param)), key=len)
        for param, of_param in paths(model).items()
        if param.requires_grad
    }
