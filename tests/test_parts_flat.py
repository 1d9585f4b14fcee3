"""Flatten, pad, shard, view: whatever the sizes, each element lies in one place and padding is never seen."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from minizero.parts import flat
from minizero.parts.flat import FlatShard

shapes = st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), max_size=8)
world_sizes = st.integers(1, 9)
few = settings(max_examples=60, deadline=None, database=None)


def numbered(shapes):
    """Tensors whose elements are 1, 2, 3, … throughout."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    elements = torch.arange(1.0, 1 + sum(sizes))
    return [piece.view(shape) for piece, shape in zip(elements.split(sizes), shapes, strict=True)]


def filled(tensors, world_size):
    """The flat buffer with the tensors in their places and zeros elsewhere."""
    layout = flat.layout(tensors, world_size)
    flat_P = torch.zeros(layout.P)
    for view, tensor in zip(flat.views(flat_P, layout), tensors, strict=True):
        view.copy_(tensor)
    return layout, flat_P


@few
@given(shapes, world_sizes)
def test_every_element_has_one_place_and_comes_back(shapes, world_size):
    tensors = numbered(shapes)
    layout, flat_P = filled(tensors, world_size)
    for view, tensor in zip(flat.views(flat_P, layout), tensors, strict=True):
        assert view.shape == tensor.shape
        assert torch.equal(view, tensor)
    assert flat_P[flat_P > 0].tolist() == [i + 1 for i in range(sum(t.numel() for t in tensors))]


@few
@given(shapes, world_sizes)
def test_shards_partition_the_buffer_into_equal_parts(shapes, world_size):
    layout, flat_P = filled(numbered(shapes), world_size)
    shards = [flat.shard(flat_P, rank, world_size) for rank in range(world_size)]
    assert {shard.numel() for shard in shards} == {layout.S}
    assert layout.S * world_size == layout.P
    assert torch.equal(torch.cat(shards), flat_P)
    for rank, shard in enumerate(shards):
        shard.fill_(rank)  # a shard is a view
    assert torch.equal(flat_P, torch.arange(world_size).repeat_interleave(layout.S).float())


@few
@given(shapes, world_sizes)
def test_tensors_and_shards_start_at_64_bytes_in_16_bits_and_at_the_same_element_in_32(shapes, world_size):
    layout = flat.layout(numbered(shapes), world_size)
    assert all(offset % 32 == 0 for offset in layout.offsets)
    assert layout.S % 32 == 0
    assert flat.layout([t.half() for t in numbered(shapes)], world_size) == layout


@few
@given(shapes, world_sizes)
def test_padding_is_less_than_a_line_for_each_tensor_and_each_rank(shapes, world_size):
    tensors = numbered(shapes)
    padding = flat.layout(tensors, world_size).P - sum(t.numel() for t in tensors)
    assert 0 <= padding <= 31 * len(tensors) + 32 * (world_size - 1)


@few
@given(st.integers(0, 50), st.integers(1, 8))
def test_each_element_is_owned_by_exactly_one_rank(numel, world_size):
    """Also with more ranks than elements: those at the end own padding."""
    tensor = torch.arange(1.0, numel + 1)
    _, flat_P = filled([tensor], world_size)
    owned = [flat.shard(flat_P, rank, world_size) for rank in range(world_size)]
    assert torch.cat([shard[shard > 0] for shard in owned]).tolist() == tensor.tolist()


def test_nothing_takes_no_room():
    assert flat.layout([], 3).P == 0
    assert flat.layout([torch.empty(0, 4)], 3).P == 0


def test_a_transposed_and_a_channels_last_tensor_lie_in_the_buffer_as_they_do_elsewhere():
    tensors = [
        torch.arange(12.0).view(3, 4).t(),
        torch.arange(120.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.arange(3.0).view(3, 1).expand(3, 5),  # overlaps itself
        torch.arange(20.0)[::2],  # has gaps
        torch.tensor(7.0),
    ]
    layout, flat_P = filled(tensors, 2)
    views = flat.views(flat_P, layout)
    assert all(torch.equal(view, tensor) for view, tensor in zip(views, tensors, strict=True))
    assert [view.stride() for view in views[:2]] == [tensor.stride() for tensor in tensors[:2]]
    for view, offset in zip(views, layout.offsets, strict=True):
        assert view.storage_offset() == offset
        assert view.as_strided((view.numel(),), (1,)).sort().values.equal(view.flatten().sort().values)  # dense


@pytest.mark.parametrize("device", ["meta"])
def test_a_layout_needs_no_data(device):
    assert flat.layout([torch.empty(40, device=device), torch.empty(5, device=device)], 2).offsets == (0, 64)


# --- what a rank owns of each tensor ----------------------------------------------------------------------


@few
@given(shapes, world_sizes)
def test_cuts_are_what_the_shard_holds_of_each_tensor_and_together_everything(shapes, world_size):
    tensors = numbered([(*shape, 7) for shape in shapes])
    layout, flat_P = filled(tensors, world_size)
    owned = [torch.zeros(t.numel(), dtype=torch.int64) for t in tensors]
    for rank in range(world_size):
        shard_S = flat.shard(flat_P, rank, world_size)
        covered = torch.zeros(layout.S, dtype=torch.bool)
        for cut in flat.cuts(layout, rank):
            assert torch.equal(shard_S[cut.of_shard], tensors[cut.tensor].flatten()[cut.of_tensor])
            assert not covered[cut.of_shard].any()
            covered[cut.of_shard] = True
            owned[cut.tensor][cut.of_tensor] += 1
        assert torch.equal(covered, shard_S > 0)  # all that is no padding
    assert all((count == 1).all() for count in owned)


# --- FlatShard --------------------------------------------------------------------------------------------


def parameters(dtype=torch.float32):
    torch.manual_seed(0)
    return [nn.Parameter(t.to(dtype)) for t in (torch.randn(5, 41), torch.randn(1), torch.empty(0, 4), torch.tensor(2.0), torch.randn(7, 9).t())]


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("master", [False, True])
def test_parameters_keep_value_shape_and_strides_and_become_views_of_one_buffer(world_size, master):
    params, before = (parameters(torch.bfloat16 if master else torch.float32) for _ in range(2))
    shard = FlatShard("bucket 0", params, world_size - 1, world_size, master=master)
    for param, old in zip(params, before, strict=True):
        assert torch.equal(param, old) and param.stride() == old.stride() and param.requires_grad
        assert param.untyped_storage().data_ptr() == shard.full_P.untyped_storage().data_ptr()


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("master", [False, True])
def test_pieces_of_all_ranks_are_all_elements_and_a_shape_is_kept_where_nothing_is_cut(world_size, master):
    held = 0
    for rank in range(world_size):
        params = parameters()
        shard = FlatShard("bucket 0", params, rank, world_size, master=master)
        for param, piece in shard.pieces.items():
            assert piece.is_leaf and piece.requires_grad and piece.numel()
            assert piece.shape == (param.shape if world_size == 1 else (piece.numel(),))
            assert torch.equal(shard.own(param, param.detach()), piece)
            assert (piece.untyped_storage().data_ptr() == shard.full_P.untyped_storage().data_ptr()) is (not master)
            held += piece.numel()
    assert held == 5 * 41 + 1 + 1 + 63


def test_a_master_begins_with_the_exact_values_and_weights_are_its_rounding():
    exact = [p.detach().clone() for p in parameters()]
    params = parameters(torch.bfloat16)
    shard = FlatShard("bucket 0", params, 1, 2, exact, master=True)
    for param, value in zip(params, exact, strict=True):
        assert torch.equal(param, value.bfloat16())
        if param in shard.pieces:
            assert torch.equal(shard.pieces[param], shard.own(param, value))
    for piece in shard.pieces.values():
        piece.data += 0.125
    shard.publish()
    assert torch.equal(shard.slice_S, shard.shard_S.bfloat16())


@pytest.mark.parametrize("how", ["copied", "assigned"])
@pytest.mark.parametrize("master", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_weights_written_past_the_optimizer_are_adopted_and_a_master_that_was_not_overwritten_keeps_its_digits(how, master, rank):
    exact = [p.detach().clone() for p in parameters()]
    params = parameters(torch.bfloat16 if master else torch.float32)
    shard = FlatShard("bucket 0", params, rank, 2, exact, master=master)
    new = torch.full_like(params[0], 100.0)
    if how == "copied":
        params[0].data.copy_(new)
    else:
        params[0].data = new.clone()
    shard.adopt()
    assert params[0].untyped_storage().data_ptr() == shard.full_P.untyped_storage().data_ptr()
    for param, value in zip(params, exact, strict=True):
        if param in shard.pieces:
            assert torch.equal(shard.pieces[param], shard.own(param, new.float() if param is params[0] else value))


def test_a_parameter_that_has_become_another_one_is_not_adopted():
    params = parameters()
    shard = FlatShard("bucket 0", params, 0, 2)
    params[0].data = params[0].data.double()
    with pytest.raises(RuntimeError, match=r"was torch.float32 \[5, 41\] on cpu when the optimizer took it over and is torch.float64"):
        shard.adopt()
