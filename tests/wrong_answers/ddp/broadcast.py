"""Wrong answers to ddp.broadcast."""

import torch
import torch.distributed as dist
from wrong_answers import wrong


@wrong("only trainable parameters are broadcast")
def only_trainable(model):
    """Skips frozen parameters, which then differ from rank to rank for ever."""
    for param in model.parameters():
        if param.requires_grad:
            dist.broadcast(param.data, src=0)
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)


@wrong("model.parameters() has no buffers in it")
def no_buffers(model):
    """Forgets the buffers."""
    for param in model.parameters():
        dist.broadcast(param.data, src=0)


@wrong("state_dict() leaves this buffer out")
def what_is_saved(model):
    """Broadcasts the state dict: buffers that are not saved are missing in it."""
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, src=0)


@wrong("a tied weight is sent under both of its names")
def every_name(model):
    """Goes by name and meets the tied weight twice."""
    for _, param in model.named_parameters(remove_duplicate=False):
        dist.broadcast(param.data, src=0)
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)


@wrong("the ranks' values are averaged")
def averaged(model):
    """Averages the starts instead of taking rank 0's."""
    for tensor in (*model.parameters(), *model.buffers()):
        dist.all_reduce(tensor.data)
        tensor.data.copy_(tensor.data / dist.get_world_size())


@wrong("the source is rank 0, and every rank has to say so")
def own_source(model):
    """Every rank names itself as the source."""
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.data, src=dist.get_rank())


@wrong("a broadcast is a call of all ranks")
def only_rank_0_calls(model):
    """Rank 0 broadcasts, and nobody listens."""
    if dist.get_rank() == 0:
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.data, src=0)


@wrong("is a copy broadcast")
def into_a_copy(model):
    """Receives into a copy."""
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.detach().clone(), src=0)


@wrong("overwrite its values instead")
def new_parameters(model):
    """Puts new parameters into the model: the optimizer goes on with the old ones."""
    for name, param in list(model.named_parameters()):
        module = model.get_submodule(name.rpartition(".")[0])
        received = param.detach().clone()
        dist.broadcast(received, src=0)
        setattr(module, name.rpartition(".")[2], torch.nn.Parameter(received))
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)


@wrong("float32, which has 24 bits for a whole number")
def one_flat_tensor(model):
    """Sends everything in one float32 tensor."""
    tensors = [*model.parameters(), *model.buffers()]
    flat = torch.cat([tensor.detach().flatten().float() for tensor in tensors])
    dist.broadcast(flat, src=0)
    for tensor, piece in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.data.copy_(piece.view_as(tensor))


@wrong("copy_() into the one that is there")
def other_memory(model):
    """Gives each parameter another memory."""
    for tensor in (*model.parameters(), *model.buffers()):
        received = tensor.detach().clone()
        dist.broadcast(received, src=0)
        tensor.data = received


@wrong("something else has sent the values")
def lets_torch(model):
    """Lets torch's DDP do it."""
    torch.nn.parallel.DistributedDataParallel(model)


@wrong("a set has no order")
def through_a_set(model):
    """Goes through a set, whose order is that of the addresses: another one on each rank."""
    for param in set(model.parameters()):
        dist.broadcast(param.data, src=0)
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)


@wrong("a set has no order")
def buffers_through_a_set(model):
    """The same for buffers only."""
    for param in model.parameters():
        dist.broadcast(param.data, src=0)
    for buffer in set(model.buffers()):
        dist.broadcast(buffer, src=0)


@wrong("expected  one broadcast      got  2 on rank 0")
def as_an_object(model):
    """Pickles the state and sends it."""
    state = [model.state_dict() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(state, src=0)
    model.load_state_dict(state[0])


@wrong("expected  rank 0's batches is 16,777,217      got  16,777,216")
def counts_in_fp32(model):
    """Sends buffers as float32: a large whole number changes, on rank 0 as well."""
    for param in model.parameters():
        dist.broadcast(param.data, src=0)
    for buffer in model.buffers():
        wide = buffer.float()
        dist.broadcast(wide, src=0)
        buffer.copy_(wide)
