"""Wrong answers to zero3.backward: a right one, and what people change in it."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from wrong_answers import wrong

reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Right:
    def __init__(self, module, params):
        self.params, self.arrived, self.grad_S = params, 0, None
        self.rank, self.n = dist.get_rank(), dist.get_world_size()
        flat = torch.cat([param.data.flatten() for param in params])
        self.flat_P, start = F.pad(flat, (0, -len(flat) % self.n)), 0
        self.shard_S = self.own()
        for param in params:
            param.data = self.flat_P[start : start + param.numel()].view_as(param)
            start += param.numel()
        self.free()
        self.place_hooks(module)
        for param in params:
            param.register_post_accumulate_grad_hook(self.on_gradient)

    def place_hooks(self, module):
        module.register_forward_pre_hook(lambda module, args: self.gather())
        module.register_forward_hook(lambda module, args, output: self.free(), always_call=True)
        module.register_forward_hook(self.await_backward)

    def own(self):
        return self.flat_P.chunk(self.n)[self.rank].clone()

    def gather(self):
        self.flat_P.untyped_storage().resize_(self.flat_P.nbytes)
        all_gather(self.flat_P, self.shard_S)

    def free(self):
        self.flat_P.untyped_storage().resize_(0)

    def await_backward(self, module, args, output):
        if output.requires_grad:
            output.register_hook(lambda grad: self.gather())

    def on_gradient(self, param):
        self.arrived += 1
        if self.arrived == len(self.params):
            self.arrived = 0
            self.reduce()
            self.free()

    def flat_gradient(self):
        flat = torch.cat([param.grad.flatten() for param in self.params])
        for param in self.params:
            param.grad = None
        return F.pad(flat, (0, -len(flat) % self.n))

    def reduce(self):
        self.grad_S = torch.empty_like(self.shard_S)
        reduce_scatter(self.grad_S, self.flat_gradient())
        self.grad_S /= self.n


@wrong("gather in a hook on the unit's output")
class NoBackwardGather(Right):
    """Forgets that backward needs the weights again."""

    def await_backward(self, module, args, output):
        pass


@wrong("gather in a hook on the unit's output")
class GathersWhenGradientsArrive(Right):
    """Gathers when the first gradient has arrived: by then it was needed."""

    def await_backward(self, module, args, output):
        pass

    def on_gradient(self, param):
        if self.arrived == 0:
            self.gather()
        super().on_gradient(param)


@wrong("the weights are kept from forward to backward")
class KeepsWeights(Right):
    """Does not free after forward, and does not gather again: ZeRO-2's memory."""

    def place_hooks(self, module):
        module.register_forward_pre_hook(lambda module, args: self.gather())

        def after(module, args, output):
            if not torch.is_grad_enabled():
                self.free()

        module.register_forward_hook(after, always_call=True)


@wrong("the root is kept from forward to backward")
class KeepsTheRoot(Right):
    """Keeps the root's weights from forward to backward, as FSDP2 does by default."""

    def place_hooks(self, module):
        if not hasattr(module, "blocks"):
            return super().place_hooks(module)
        module.register_forward_pre_hook(lambda module, args: self.gather())
        module.register_forward_hook(lambda module, args, output: None if torch.is_grad_enabled() else self.free())


@wrong("a unit is freed as soon as its gradients are reduced")
class NeverFreesInBackward(Right):
    """Reduces, and leaves the weights there."""

    def on_gradient(self, param):
        self.arrived += 1
        if self.arrived == len(self.params):
            self.arrived = 0
            self.reduce()


@wrong("autograd, if the storage is not resized")
class Rebinds(Right):
    """Frees by giving the parameters another .data, and gathers into a new buffer: right numbers, and nothing is freed."""

    def __init__(self, module, params):
        self.shapes = [param.shape for param in params]
        super().__init__(module, params)

    def gather(self):
        self.flat_P, start = torch.empty(len(self.shard_S) * self.n), 0
        all_gather(self.flat_P, self.shard_S)
        for param, shape in zip(self.params, self.shapes, strict=True):
            param.data = self.flat_P[start : start + shape.numel()].view(shape)
            start += shape.numel()

    def free(self):
        self.flat_P = None
        for param, shape in zip(self.params, self.shapes, strict=True):
            param.data = torch.zeros(()).expand(shape)


@wrong("summed, not averaged")
class Sums(Right):
    """Forgets that a reduce-scatter sums."""

    def reduce(self):
        super().reduce()
        self.grad_S *= self.n


@wrong("twice the bytes of a reduce_scatter")
class AllReduces(Right):
    """All-reduces, and keeps a slice."""

    def reduce(self):
        grad_P = self.flat_gradient()
        dist.all_reduce(grad_P)
        self.grad_S = grad_P.chunk(self.n)[self.rank] / self.n


@wrong("nothing has come from the others")
class ReducesNothing(Right):
    """Keeps its own slice, and sends a copy of it round for the look of it."""

    def reduce(self):
        grad_P = self.flat_gradient()
        reduce_scatter(torch.empty_like(self.shard_S), grad_P)
        self.grad_S = grad_P.chunk(self.n)[self.rank].clone()


@wrong("is the counter set back")
class CountsOn(Right):
    """Never sets the counter back: the second backward reduces nothing."""

    def on_gradient(self, param):
        self.arrived += 1
        if self.arrived == len(self.params):
            self.reduce()
            self.free()


@wrong("a unit is reduced more than once")
class ReducesEach(Right):
    """Reduces with every gradient that arrives."""

    def on_gradient(self, param):
        param.kept = param.grad
        self.arrived += 1
        self.grad_S = torch.empty_like(self.shard_S)
        flat = torch.cat([getattr(each, "kept", torch.zeros_like(each)).flatten() for each in self.params])
        reduce_scatter(self.grad_S, F.pad(flat, (0, -len(flat) % self.n)))
        self.grad_S /= self.n
        if self.arrived == len(self.params):
            self.arrived = 0
            for each in self.params:
                each.grad = None
                del each.kept
            self.free()


@wrong("set .grad to None")
class LeavesGradients(Right):
    """Leaves the full gradients in .grad."""

    def flat_gradient(self):
        flat = torch.cat([param.grad.flatten() for param in self.params])
        return F.pad(flat, (0, -len(flat) % self.n))


@wrong("ask output.requires_grad")
class HooksAlways(Right):
    """Registers a hook on the output, also in an evaluation."""

    def await_backward(self, module, args, output):
        output.register_hook(lambda grad: self.gather())


@wrong("an evaluation gathers as well")
class NoEvaluation(Right):
    """Frees only where there is a backward to come."""

    def place_hooks(self, module):
        module.register_forward_pre_hook(lambda module, args: self.gather())

        def after(module, args, output):
            if output.requires_grad:
                self.free()
                output.register_hook(lambda grad: self.gather())

        module.register_forward_hook(after)


@wrong("Count the gradients")
class FullBackwardHook(Right):
    """Reduces in a full backward hook: at the root, whose input needs no gradient, it comes first."""

    def __init__(self, module, params):
        super().__init__(module, params)
        module.register_full_backward_hook(lambda module, grad_in, grad_out: self.over())

    def on_gradient(self, param):
        pass

    def over(self):
        for param in self.params:
            param.grad = torch.zeros(param.shape) if param.grad is None else param.grad
        self.reduce()
        self.free()


@wrong("a pre-hook on each unit's own module gathers just that one")
class GathersAllAtOnce(Right):
    """Gathers all units when the root's forward begins."""

    def place_hooks(self, module):
        if not hasattr(module, "blocks"):
            module.unit = self
            module.register_forward_hook(lambda module, args, output: self.free(), always_call=True)
            module.register_forward_hook(self.await_backward)
            return
        super().place_hooks(module)

        def gather_all(module, args):
            for block in module.blocks:
                block.unit.gather()

        module.register_forward_pre_hook(gather_all)


@wrong("a grad_S that is a slice is one")
class SliceOfTheGradient(Right):
    """Keeps a view of the full gradient for a shard."""

    def reduce(self):
        grad_P = self.flat_gradient()
        self.grad_S = grad_P.chunk(self.n)[self.rank]
        reduce_scatter(self.grad_S, grad_P.clone())
        self.grad_S /= self.n


@wrong("always_call=True (as in exercise 3)")
class NotAlways(Right):
    """Frees in a forward hook that is skipped when forward raises."""

    def place_hooks(self, module):
        module.register_forward_pre_hook(lambda module, args: self.gather())
        module.register_forward_hook(lambda module, args, output: self.free())
        module.register_forward_hook(self.await_backward)


@wrong("in evaluation as well")
class GathersInTraining(Right):
    """Gathers in training mode only."""

    def place_hooks(self, module):
        module.register_forward_pre_hook(lambda module, args: self.gather() if module.training else None)
        module.register_forward_hook(lambda module, args, output: self.free(), always_call=True)
        module.register_forward_hook(self.await_backward)


@wrong("the exception of a forward reaches the caller")
class Swallows(Right):
    """Wraps forward, and keeps its exception to itself."""

    def place_hooks(self, module):
        super().place_hooks(module)
        forward = module.forward

        def wrapped(x):
            try:
                return forward(x)
            except ValueError:
                return x

        module.forward = wrapped


@wrong("that is rank 1's shard")
class NextGradient(Right):
    """Rolls the gradient by a shard: each rank gets its neighbour's."""

    def flat_gradient(self):
        return super().flat_gradient().roll(-len(self.shard_S))


@wrong("that is rank 1's shard")
class ReversedShards(Right):
    """Hands out the shards of the weights from the last to the first."""

    def own(self):
        return self.flat_P.chunk(self.n)[-1 - self.rank].clone()


@wrong("lost its memory with it")
class SliceOfTheWeights(Right):
    """Keeps a view of the buffer for a shard."""

    def own(self):
        return self.flat_P.chunk(self.n)[self.rank]


@wrong("however many ranks there are")
class DividesByTwo(Right):
    """Divides the sum by 2, on 3 ranks as well."""

    def reduce(self):
        super().reduce()
        self.grad_S *= self.n / 2


@wrong("every element is 0.25 times the right one")
class DividesByRows(Right):
    """Divides by the rows of a whole batch as well."""

    def reduce(self):
        super().reduce()
        self.grad_S /= 4


@wrong("outputs or inputs of units are still held")
class KeepsOutputs(Right):
    """Keeps each unit's output and input for later."""

    def await_backward(self, module, args, output):
        self.args, self.output = args, output
        super().await_backward(module, args, output)


@wrong("A tensor's own resize_")
class ResizesTheTensor(Right):
    """Resizes the tensor, not its storage."""

    def free(self):
        self.flat_P.resize_(0)


@wrong("it is called as ShardedUnit(module, params)")
class TakesParams(Right):
    """Takes what exercise 2's Unit takes."""

    def __init__(self, params):
        super().__init__(torch.nn.Identity(), params)
