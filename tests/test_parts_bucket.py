"""Which parameters share a bucket, and what happens to a gradient that lies in one."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from minizero.parts import flat, kinds
from minizero.parts.bucket import Bucket, ShardBucket, State, TransientBucket, partition
from minizero.parts.flat import FlatShard
from minizero.parts.freed import FreedGradient

MB = 2**20


def parameters(*sizes, dtype=torch.float32):
    return [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in sizes]


def bucket_of(*sizes, world_size=2):
    params = parameters(*sizes)
    return Bucket("bucket 0", params, world_size), params


# --- partition --------------------------------------------------------------------------------------

dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])


@settings(max_examples=60, deadline=None, database=None)
@given(st.lists(st.tuples(st.integers(0, 20), dtypes), max_size=12), st.floats(1, 200))
def test_each_parameter_is_in_one_bucket_of_its_dtype_in_reverse_order(kinds_of_params, limit):
    params = [nn.Parameter(torch.zeros(size, dtype=dtype)) for size, dtype in kinds_of_params]
    buckets = partition(params, limit / MB)
    for dtype in {p.dtype for p in params}:
        own = [bucket for bucket in buckets if bucket[0].dtype is dtype]
        assert all(p.dtype is dtype for bucket in own for p in bucket)
        assert [id(p) for bucket in own for p in bucket] == [id(p) for p in reversed(params) if p.dtype is dtype]
        for bucket, following in zip(own, own[1:], strict=False):
            size = sum(p.nbytes for p in bucket)
            assert size + following[0].nbytes > limit  # it closed only where it had to
        assert all(len(bucket) == 1 or sum(p.nbytes for p in bucket) <= limit for bucket in own)
    assert sum(map(len, buckets)) == len(params)


def test_a_bucket_closes_before_the_parameter_that_would_overflow_it():
    params = parameters(4, 5, 6, 3, 7)
    sizes = [[p.numel() for p in bucket] for bucket in partition(params, 10 * 4 / MB)]
    assert sizes == [[7, 3], [6], [5, 4]]


def test_a_parameter_larger_than_a_bucket_has_one_of_its_own():
    assert [[p.numel() for p in bucket] for bucket in partition(parameters(2, 100, 3), 12 / MB)] == [[3], [100], [2]]


def test_extreme_sizes_give_a_bucket_for_each_parameter_and_one_for_all():
    params = parameters(4, 5, 6)
    assert [len(bucket) for bucket in partition(params, 1e-12)] == [1, 1, 1]
    assert [len(bucket) for bucket in partition(params, math.inf)] == [3]
    assert partition([], 25) == []


@pytest.mark.parametrize("bucket_mb", [0, -1, -0.5, math.nan, "25", None, True])
def test_a_size_that_is_not_positive_is_refused(bucket_mb):
    with pytest.raises(ValueError, match=r"bucket_mb must be a positive number of MiB.*got"):
        partition(parameters(1), bucket_mb)


# --- the life of a gradient ----------------------------------------------------------------------------


def test_a_gradient_becomes_its_view_of_the_bucket():
    bucket, (a, b) = bucket_of(3, 5)
    a.grad = torch.ones(3)
    bucket.take(a)
    assert a.grad is bucket.views[a]
    assert bucket.grad_P.sum() == 3
    assert b.grad is None
    assert kinds.kind_of(bucket.grad_P) == "grads"


def test_a_bucket_is_full_when_each_of_its_parameters_has_arrived():
    bucket, (a, b) = bucket_of(3, 5)
    bucket.arrived.add(a)
    assert not bucket.full
    bucket.arrived.add(a)
    assert not bucket.full
    bucket.arrived.add(b)
    assert bucket.full


def test_what_leaves_has_zeros_where_there_is_no_gradient():
    bucket, (a, b, c) = bucket_of(3, 5, 2)
    for p in (a, b):
        p.grad = torch.ones_like(p)
        bucket.take(p)
    b.grad = None  # cleared
    c.grad = torch.full((2,), 7.0)  # set by hand
    full_P = bucket.close()
    assert full_P is bucket.grad_P
    assert [bucket.views[p].tolist() for p in (a, b, c)] == [[1] * 3, [0] * 5, [7] * 2]
    assert full_P.sum() == 3 + 14
    assert bucket.state is State.IN_FLIGHT
    assert all(p.grad is None for p in (a, b, c))


def test_a_gradient_that_comes_too_late_waits_and_is_added_when_the_bucket_lands():
    bucket, (a, b) = bucket_of(3, 5)
    a.grad = torch.ones(3)
    bucket.take(a)
    bucket.close()
    b.grad = torch.full((5,), 4.0)
    bucket.take(b)
    assert b.grad is not bucket.views[b]
    bucket.land()
    assert bucket.late
    assert bucket.views[b].tolist() == [4] * 5
    assert bucket.gradients() == [True, True]
    bucket.close()
    bucket.land()
    assert not bucket.late


def test_after_the_reduction_a_gradient_is_there_if_some_rank_has_one():
    bucket, (a, b) = bucket_of(3, 5)
    a.grad = torch.ones(3)
    bucket.take(a)
    bucket.close()
    bucket.land()
    assert a.grad is bucket.views[a] and b.grad is bucket.views[b]
    assert bucket.gradients() == [True, False]
    bucket.hand_out({b}, 1.0)
    assert a.grad is None and b.grad is bucket.views[b]


def test_a_gradient_cleared_after_the_reduction_is_none_and_one_set_by_hand_is_one():
    bucket, (a, b) = bucket_of(3, 5)
    a.grad = torch.ones(3)
    bucket.take(a)
    bucket.close()
    bucket.land()
    a.grad = None
    b.grad = torch.full((5,), 2.0)
    assert bucket.gradients() == [False, True]
    bucket.hand_out({b}, 1.0)
    assert a.grad is None and b.grad.tolist() == [2] * 5


# --- a bucket of which a rank keeps its shard ------------------------------------------------------------


def shard_bucket(kind=ShardBucket, rank=0, world_size=2, dtype=torch.float32, master=False):
    """Two parameters of 40 and 5 elements: 64 + 32, so that on two ranks the border, at 64, lies between them."""
    params = parameters(40, 5, dtype=dtype)
    weights = FlatShard("bucket 0", params, rank, world_size, master=master)
    names = [dict(zip(params, "ab", strict=True))] if kind is TransientBucket else []
    return kind("bucket 0", params, weights, rank, world_size, *names), params


both_kinds = pytest.mark.parametrize("kind", [ShardBucket, TransientBucket], ids=lambda kind: kind.__name__)


def arrives(bucket, param, value):
    """What autograd and the hooks do when a parameter's gradient is there."""
    bucket.before_accumulation(param)
    grad = torch.full_like(param, value)
    param.grad = grad if param.grad is None else param.grad + grad
    bucket.take(param)


def backward(bucket, *grads):
    for p, grad in zip(bucket.params, grads, strict=True):
        if grad is not None:
            arrives(bucket, p, grad)


def leaves(bucket, rank=0):
    """Alone, the mean is what is there."""
    full_P = bucket.close()
    bucket.grad_S.copy_(flat.shard(full_P, rank, bucket.layout.world_size))


def reduced(bucket, rank=0):
    leaves(bucket, rank)
    bucket.land()


def seen(bucket, scale=1.0):
    bucket.gradients()
    bucket.prepare(scale)
    return [None if piece.grad is None else piece.grad.unique().tolist() for piece in bucket.weights.pieces.values()]


def test_outside_the_shard_of_a_rank_the_buffer_is_nan():
    bucket, (a, b) = shard_bucket(rank=1)
    backward(bucket, 1.0, 2.0)
    reduced(bucket, rank=1)
    assert a.grad.isnan().all() and b.grad.tolist() == [2] * 5
    assert not bucket.late and bucket.gradients() == [True, True]
    assert seen(bucket) == [[2.0]]


@both_kinds
def test_the_next_gradient_finds_zeros_and_the_mean_is_kept_apart_in_fp32(kind):
    bucket, _ = shard_bucket(kind, dtype=torch.bfloat16)
    for i in range(3):
        backward(bucket, 1.0 if i == 0 else 2.0**-10, 1.0)
        assert bucket.late
        reduced(bucket)
    assert bucket.sum_S.dtype is torch.float32
    assert seen(bucket) == [[1.0]]  # the parameter itself is of 16 bits
    assert bucket.sum_S[:40].unique().tolist() == [1 + 2 * 2.0**-10]


def test_one_mean_needs_no_second_buffer():
    bucket, _ = shard_bucket()
    backward(bucket, 1.0, 2.0)
    reduced(bucket)
    assert seen(bucket) == [[1.0]] and bucket.sum_S is None
    assert bucket.weights.pieces[bucket.params[0]].grad.untyped_storage().data_ptr() == bucket.grad_P.untyped_storage().data_ptr()


@both_kinds
def test_pieces_of_masters_see_fp32_gradients_without_the_loss_scale_also_after_a_second_look_and_more_backwards(kind):
    bucket, _ = shard_bucket(kind, dtype=torch.float16, master=True)
    backward(bucket, 8.0, 8.0)
    reduced(bucket)
    assert seen(bucket, 4.0) == [[2.0]]
    assert seen(bucket, 4.0) == [[2.0]]
    backward(bucket, 4.0, 4.0)
    reduced(bucket)
    assert seen(bucket, 4.0) == [[3.0]]
    assert bucket.weights.pieces[bucket.params[0]].grad.dtype is torch.float32


@both_kinds
def test_a_gradient_that_is_cleared_between_two_backwards_loses_its_earlier_mean_too(kind):
    bucket, (a, b) = shard_bucket(kind, world_size=1)
    backward(bucket, 1.0, 1.0)
    reduced(bucket)
    a.grad = None
    backward(bucket, None, 1.0)
    reduced(bucket)
    assert bucket.gradients() == [False, True]
    bucket.prepare(1.0)
    bucket.hand_out({b}, 1.0)
    assert [bucket.weights.pieces[p].grad if p is a else bucket.weights.pieces[p].grad.tolist() for p in (a, b)] == [None, [2] * 5]
    assert a.grad is None


@both_kinds
@pytest.mark.parametrize("late", [False, True], ids=["", "and a late one"])
@pytest.mark.parametrize("how", ["None", "zeros", "replaced"])
def test_a_gradient_that_is_cleared_or_replaced_is_forgotten_also_by_the_next_backward(kind, how, late):
    bucket, (a, _) = shard_bucket(kind, world_size=1)
    arrives(bucket, a, 1.0)
    leaves(bucket)
    if late:
        arrives(bucket, a, 1.0)
    bucket.land()
    if how == "zeros":
        a.grad.zero_()
    else:
        a.grad = None if how == "None" else torch.full((40,), 0.5)
    backward(bucket, 3.0, 1.0)
    reduced(bucket)
    assert seen(bucket) == [[3.5 if how == "replaced" else 3.0], [1.0]]


@both_kinds
def test_a_step_forgets_everything(kind):
    bucket, (a, b) = shard_bucket(kind)
    for _ in range(2):
        backward(bucket, 1.0, 1.0)
        reduced(bucket)
    seen(bucket, 2.0)
    for p in (a, b):
        p.grad = None
    bucket.clear()
    backward(bucket, 5.0, 5.0)
    reduced(bucket)
    assert seen(bucket) == [[5.0]]


# --- a bucket that has memory only while it is needed -----------------------------------------------------


def transient(**settings):
    return shard_bucket(TransientBucket, **settings)


def test_the_buffer_has_memory_from_the_first_gradient_to_the_landing_and_the_shard_has_its_own():
    bucket, (a, b) = transient()
    resident = [bucket.resident]
    arrives(bucket, a, 1.0)
    resident.append(bucket.resident)
    arrives(bucket, b, 2.0)
    bucket.close()
    resident.append(bucket.resident)
    bucket.land()
    resident.append(bucket.resident)
    assert resident == [False, True, True, False]
    assert bucket.grad_P.untyped_storage().nbytes() == 0
    assert bucket.grad_S.untyped_storage().nbytes() == 4 * 64 and kinds.kind_of(bucket.grad_S) == "grads"


def test_what_autograd_leaves_is_moved_and_something_that_cannot_be_used_stands_in_its_place():
    bucket, (a, b) = transient()
    arrives(bucket, a, 1.0)
    assert type(a.grad) is FreedGradient and a.grad is bucket.held[a] and b.grad is None
    assert bucket.views[a].tolist() == [1] * 40
    reduced(bucket)
    assert a.grad is bucket.held[a] and b.grad is bucket.held[b]
    with pytest.raises(RuntimeError, match="the gradient of parameter 'b'"):
        b.grad.sum()


def test_two_gradients_of_one_backward_are_added():
    bucket, (a, b) = transient()
    for param in (a, b, a):
        arrives(bucket, param, 2.0)
    assert bucket.views[a].tolist() == [4] * 40 and bucket.views[b].tolist() == [2] * 5


def test_what_leaves_is_zeros_where_there_is_no_gradient_whatever_was_in_the_memory(monkeypatch):
    allocate = flat.allocate
    monkeypatch.setattr(flat, "allocate", lambda grad_P: (allocate(grad_P), grad_P.fill_(7.0)))
    for cleared in (False, True):
        bucket, (a, b) = transient()
        backward(bucket, 1.0, 2.0 if cleared else None)
        b.grad = None
        bucket.close()
        assert bucket.views[a].tolist() == [1] * 40 and bucket.views[b].tolist() == [0] * 5
        assert bucket.gradients() == [True, False]


def test_a_gradient_that_comes_when_the_bucket_has_left_makes_it_late_and_needs_the_buffer_again():
    bucket, (a, b) = transient(world_size=1)
    arrives(bucket, a, 1.0)
    leaves(bucket)
    for _ in range(2):
        arrives(bucket, b, 4.0)
    bucket.land()
    assert bucket.late and bucket.resident and b.grad is bucket.held[b]
    assert bucket.gradients() == [True, True]
    reduced(bucket)
    assert not bucket.late and not bucket.resident
    assert seen(bucket) == [[1.0], [8.0]]


@pytest.mark.parametrize("then", ["nothing", "replaced", "another backward"])
def test_if_autograd_came_for_a_gradient_and_left_none_nothing_has_happened(then):
    """torch.autograd.grad() calls the hook on the parameter too."""
    bucket, (a, b) = transient(world_size=1)
    backward(bucket, 1.0, 2.0)
    reduced(bucket)
    for param in (a, b):
        bucket.before_accumulation(param)
    if then == "replaced":
        a.grad = torch.full((40,), 0.5)
    elif then == "another backward":
        backward(bucket, 1.0, None)
    assert bucket.gradients() == [True, True]
    if bucket.late:
        reduced(bucket)
    assert seen(bucket) == [[{"nothing": 1.0, "replaced": 0.5, "another backward": 2.0}[then]], [2.0]]


def test_a_single_mean_is_kept_in_16_bits_and_several_in_32_and_never_both():
    bucket, _ = transient(dtype=torch.bfloat16)
    backward(bucket, 1.0, 1.0)
    reduced(bucket)
    assert bucket.grad_S.dtype is torch.bfloat16 and bucket.sum_S is None
    backward(bucket, 2.0**-10, 1.0)
    reduced(bucket)
    assert bucket.grad_S is None and bucket.sum_S.dtype is torch.float32
    assert bucket.sum_S[:40].unique().tolist() == [1 + 2.0**-10]
    for p in bucket.params:
        p.grad = None
    bucket.clear()
    assert bucket.grad_S is None and bucket.sum_S is None


def test_edits_of_the_pieces_are_kept_by_the_next_backward():
    bucket, _ = transient()
    backward(bucket, 1.0, 2.0)
    reduced(bucket)
    assert seen(bucket) == [[1.0]]
    (piece,) = bucket.weights.pieces.values()
    piece.grad *= 10
    backward(bucket, 1.0, 1.0)
    reduced(bucket)
    assert seen(bucket) == [[11.0]]
