"""Wrong answers to offload.copy_and_wait."""

import torch
from wrong_answers import wrong


def host(tensor):
    return torch.empty(tensor.shape, dtype=tensor.dtype)


@wrong("wait() stands before update()")
def reads_early(link, weights_S, grad_S, master_S, update):
    """Updates before the gradient has arrived."""
    host_S = host(grad_S)
    down = link.copy(host_S, grad_S)
    update(master_S, host_S)
    down.wait()
    grad_S.zero_()
    link.copy(weights_S, master_S.to(weights_S.dtype)).wait()


@wrong("clear it after wait()")
def clears_early(link, weights_S, grad_S, master_S, update):
    """Clears the gradient when copy() has returned."""
    host_S = host(grad_S)
    down = link.copy(host_S, grad_S)
    grad_S.zero_()
    down.wait()
    update(master_S, host_S)
    link.copy(weights_S, master_S.to(weights_S.dtype)).wait()


@wrong("its wait() is missing")
def leaves_early(link, weights_S, grad_S, master_S, update):
    """Does not wait for the weights."""
    host_S = host(grad_S)
    link.copy(host_S, grad_S).wait()
    grad_S.zero_()
    update(master_S, host_S)
    link.copy(weights_S, master_S.to(weights_S.dtype))


@wrong("its gradient has to come down first")
def without_link(link, weights_S, grad_S, master_S, update):
    """Offloads nothing: the numbers are right."""
    update(master_S, grad_S)
    weights_S.copy_(master_S)
    grad_S.zero_()


@wrong("goes over the link")
def half_without_link(link, weights_S, grad_S, master_S, update):
    """Writes the weights from the host into the device's memory."""
    host_S = host(grad_S)
    link.copy(host_S, grad_S).wait()
    grad_S.zero_()
    update(master_S, host_S)
    weights_S.copy_(master_S)


@wrong("goes over the link")
def copies_by_hand(link, weights_S, grad_S, master_S, update):
    """Fetches the gradient without the link."""
    host_S = host(grad_S).copy_(grad_S)
    grad_S.zero_()
    update(master_S, host_S)
    link.copy(weights_S, master_S.to(weights_S.dtype)).wait()


@wrong("the link neither rounds nor widens")
def lets_the_link_round(link, weights_S, grad_S, master_S, update):
    """Sends the master to 16-bit weights."""
    host_S = host(grad_S)
    link.copy(host_S, grad_S).wait()
    grad_S.zero_()
    update(master_S, host_S)
    link.copy(weights_S, master_S).wait()


@wrong("torch.empty(n, dtype=…) is on the host")
def stays_on_the_device(link, weights_S, grad_S, master_S, update):
    """Makes the host's memory like the gradient, on its side."""
    host_S = torch.empty_like(grad_S)
    link.copy(host_S, grad_S).wait()
    grad_S.zero_()
    update(master_S, host_S)
    link.copy(weights_S, master_S.to(weights_S.dtype)).wait()


@wrong("the weights go up before they are updated")
def sends_before(link, weights_S, grad_S, master_S, update):
    """Sends the weights first."""
    host_S = host(grad_S)
    link.copy(host_S, grad_S).wait()
    grad_S.zero_()
    link.copy(weights_S, master_S.to(weights_S.dtype)).wait()
    update(master_S, host_S)


@wrong("it has not been cleared")
def clears_nothing(link, weights_S, grad_S, master_S, update):
    """Leaves the gradient as it is."""
    host_S = host(grad_S)
    link.copy(host_S, grad_S).wait()
    update(master_S, host_S)
    link.copy(weights_S, master_S.to(weights_S.dtype)).wait()


@wrong("round a copy of it")
def rounds_the_master(link, weights_S, grad_S, master_S, update):
    """Rounds the master itself."""
    host_S = host(grad_S)
    link.copy(host_S, grad_S).wait()
    grad_S.zero_()
    update(master_S, host_S)
    master_S.copy_(master_S.to(weights_S.dtype))
    link.copy(weights_S, master_S.to(weights_S.dtype)).wait()


@wrong("changes the fp32 master there")
def updates_on_the_device(link, weights_S, grad_S, master_S, update):
    """Updates the weights where they are."""
    update(weights_S, grad_S)
    grad_S.zero_()


@wrong("have to reach the device")
def sends_nothing_up(link, weights_S, grad_S, master_S, update):
    """Forgets the weights."""
    host_S = host(grad_S)
    link.copy(host_S, grad_S).wait()
    grad_S.zero_()
    update(master_S, host_S)


@wrong("the master is on the host already")
def fetches_the_weights(link, weights_S, grad_S, master_S, update):
    """Brings the weights down as well."""
    host_S = host(grad_S)
    link.copy(host_S, grad_S).wait()
    grad_S.zero_()
    link.copy(host(weights_S), weights_S).wait()
    update(master_S, host_S)
    link.copy(weights_S, master_S.to(weights_S.dtype)).wait()
