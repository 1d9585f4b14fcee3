"""Wrong answers to zero3.find_the_bug: what one would measure, and the mended function."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from wrong_answers import wrong

reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Shards:
    grad_S = None


def mended(by="the input's gradient", after=True, scale=1.0):
    def shard(module):
        rank, world_size = dist.get_rank(), dist.get_world_size()
        params = list(module.parameters())
        trained = [param for param in params if param.requires_grad]
        flat = torch.cat([param.data.flatten() for param in params])
        flat_P, start = F.pad(flat, (0, -len(flat) % world_size)), 0
        for param in params:
            param.data = flat_P[start : start + param.numel()].view_as(param)
            start += param.numel()
        shards, arrived = Shards(), []
        shards.weights_S = flat_P.chunk(world_size)[rank].clone()
        storage, nbytes = flat_P.untyped_storage(), flat_P.nbytes

        def gather(*_):
            storage.resize_(nbytes)
            all_gather(flat_P, shards.weights_S)

        def free(*_):
            storage.resize_(0)

        def await_backward(module, args, output):
            if output.requires_grad and (trained or by != "no gather"):
                output.register_hook(gather)
                if not trained and by == "the input's gradient":
                    args[0].register_hook(free)
                if not trained and by == "the end":
                    end = lambda grad: torch.autograd.Variable._execution_engine.queue_callback(free)  # noqa: E731
                    output.register_hook(end)

        def on_gradient(param):
            arrived.append(param)
            if len(arrived) == len(trained):
                flat = torch.cat([param.grad.flatten() for param in trained])
                shards.grad_S = torch.empty_like(shards.weights_S)
                reduce_scatter(shards.grad_S, F.pad(flat, (0, -len(flat) % world_size)))
                shards.grad_S *= scale / world_size
                for param in trained:
                    param.grad = None
                arrived.clear()
                free()

        if after or trained:
            free()
        module.register_forward_pre_hook(gather)
        if after or trained:
            module.register_forward_hook(free, always_call=True)
        module.register_forward_hook(await_backward)
        for param in trained:
            param.register_post_accumulate_grad_hook(on_gradient)
        return shards

    return shard


def sends_zeros(module):
    """Reduces zeros for frozen blocks, so that something frees them."""
    shards = mended()(module)
    if not any(param.requires_grad for param in module.parameters()):
        grad_P = torch.zeros(len(shards.weights_S) * dist.get_world_size())
        module.register_full_backward_hook(lambda *_: reduce_scatter(torch.empty_like(shards.weights_S), grad_P) and None)
    return shards


wrong("a forward hook frees every unit", "a", mended(), mistake="says that nothing is freed after forward")
wrong("their outputs require a gradient", "b", mended(), mistake="says that frozen blocks are gathered once")
wrong("frozen weights do not change", "d", mended(), mistake="says that weights are stale")
wrong("for trained parameters only", "e", mended(), mistake="says that frozen blocks are reduced")
wrong("after backward every unit is freed", "c", mended(by="nothing"), mistake="mends nothing")
wrong("as soon as the gradient of its input is ready", "c", mended(by="the end"), mistake="frees when backward has ended")
wrong("they have to be gathered again", "c", mended(by="no gather"), mistake="does not gather frozen blocks for backward")
wrong("freed after forward as well", "c", mended(by="no gather", after=False), mistake="keeps frozen blocks whole from forward to backward")
wrong("summed, not averaged", "c", mended(scale=float(2)), mistake="loses the division, on two ranks")
wrong("a frozen block has no gradient to reduce", "c", sends_zeros, mistake="reduces zeros for frozen blocks")
