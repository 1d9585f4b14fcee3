"""Which parameters share a bucket, and what happens to a gradient that lies in one."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from minizero.parts import kinds
from minizero.parts.bucket import Bucket, State, partition

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
    bucket.hand_out({b})
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
    bucket.hand_out({b})
    assert a.grad is None and b.grad.tolist() == [2] * 5
