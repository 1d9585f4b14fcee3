"""Wrong answers to zero3.hooks."""

import torch
from wrong_answers import wrong


@wrong("always_call=True")
def not_always(module, gather, free):
    """Frees in a forward hook that is skipped when forward raises."""
    module.register_forward_pre_hook(lambda module, args: gather())
    module.register_forward_hook(lambda module, args, output: free())


@wrong("gather() belongs in a forward pre-hook")
def gathers_after(module, gather, free):
    """Registers both as forward hooks."""

    def after(module, args, output):
        gather()
        free()

    module.register_forward_hook(after, always_call=True)


@wrong("a backward hook is not")
def frees_in_backward(module, gather, free):
    """Frees after backward only."""
    module.register_forward_pre_hook(lambda module, args: gather())
    module.register_full_backward_hook(lambda module, grad_in, grad_out: free())


@wrong("both belong to forward alone")
def in_backward_too(module, gather, free):
    """Calls both around each backward as well."""
    module.register_forward_pre_hook(lambda module, args: gather())
    module.register_forward_hook(lambda module, args, output: free(), always_call=True)
    module.register_full_backward_pre_hook(lambda module, grad_out: gather())
    module.register_full_backward_hook(lambda module, grad_in, grad_out: free())


@wrong("both belong to forward alone")
def frees_twice(module, gather, free):
    """Frees after forward, and once more after backward."""
    module.register_forward_pre_hook(lambda module, args: gather())
    module.register_forward_hook(lambda module, args, output: free(), always_call=True)
    module.register_full_backward_hook(lambda module, grad_in, grad_out: free())


@wrong("an evaluation gathers as well")
def only_with_gradients(module, gather, free):
    """Frees when the output needs a gradient: not in an evaluation."""
    module.register_forward_pre_hook(lambda module, args: gather())
    module.register_forward_hook(
        lambda module, args, output: free() if output is None or torch.is_grad_enabled() else None, always_call=True
    )


@wrong("an evaluation needs the weights as well")
def gathers_in_training(module, gather, free):
    """Gathers when gradients are wanted."""
    module.register_forward_pre_hook(lambda module, args: gather() if torch.is_grad_enabled() else None)
    module.register_forward_hook(lambda module, args, output: free(), always_call=True)


@wrong("a hook is handed over, not called")
def calls_at_once(module, gather, free):
    """Calls gather when it registers."""
    gather()
    module.register_forward_pre_hook(lambda module, args: gather())
    module.register_forward_hook(lambda module, args, output: free(), always_call=True)


@wrong("hand over a function")
def registers_the_result(module, gather, free):
    """Registers what gather() returns."""
    module.register_forward_pre_hook(gather())
    module.register_forward_hook(free(), always_call=True)


@wrong("call them in a function that takes these")
def hands_them_over(module, gather, free):
    """Registers gather and free themselves, which take no arguments."""
    module.register_forward_pre_hook(gather)
    module.register_forward_hook(free, always_call=True)


@wrong("those inside it have their own")
def everywhere(module, gather, free):
    """Registers on every module inside, too."""
    for part in module.modules():
        part.register_forward_pre_hook(lambda module, args: gather())
        part.register_forward_hook(lambda module, args, output: free(), always_call=True)


@wrong("return nothing")
def replaces_the_output(module, gather, free):
    """Returns something from a hook."""
    module.register_forward_pre_hook(lambda module, args: gather())
    module.register_forward_hook(lambda module, args, output: (output, free()), always_call=True)


@wrong("the exception is caught")
def swallows(module, gather, free):
    """Wraps forward, and keeps its exception to itself."""
    forward = module.forward

    def wrapped(*args, **kwargs):
        gather()
        try:
            return forward(*args, **kwargs)
        except ValueError:
            return args[0]
        finally:
            free()

    module.forward = wrapped


@wrong("so each call needs them again")
def gathers_once(module, gather, free):
    """Gathers at the first call only."""
    done = []
    module.register_forward_pre_hook(lambda module, args: (None if done else gather(), done.append(1))[0])
    module.register_forward_hook(lambda module, args, output: free(), always_call=True)


@wrong("after forward")
def frees_too_early(module, gather, free):
    """Frees before forward runs."""

    def before(module, args):
        gather()
        free()

    module.register_forward_pre_hook(before)


@wrong("gather and free whatever the mode")
def in_training(module, gather, free):
    """Gathers and frees in training mode only."""
    module.register_forward_pre_hook(lambda module, args: gather() if module.training else None)
    module.register_forward_hook(lambda module, args, output: free() if module.training else None, always_call=True)


@wrong("it is called as place_hooks(module, gather, free)")
def takes_the_module(module):
    """Takes other arguments than those that it is called with."""
    module.register_forward_pre_hook(lambda module, args: module.gather())
