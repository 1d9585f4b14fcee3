import math
from decimal import Decimal

import pytest

from minizero.lens import theory

# Table 1 of the ZeRO paper, GB per device, as printed: N -> stages 1, 2, 3 for each model.
TABLE_1 = {
    7_500_000_000: {
        1: "120 120 120",
        4: "52.5 41.3 30",
        16: "35.6 21.6 7.5",
        64: "31.4 16.6 1.88",
        256: "30.4 15.4 0.47",
        1024: "30.1 15.1 0.12",
    },
    128_000_000_000: {
        1: "2048 2048 2048",
        4: "896 704 512",
        16: "608 368 128",
        64: "536 284 32",
        256: "518 263 8",
        1024: "513 257 2",
    },
    1_000_000_000_000: {
        1: "16000 16000 16000",
        4: "7000 5500 4000",
        16: "4750 2875 1000",
        64: "4187 2218 250",
        256: "4046 2054 62.5",
        1024: "4011 2013 15.6",
    },
}
CELLS = [
    (numel, world_size, stage, printed)
    for numel, rows in TABLE_1.items()
    for world_size, row in rows.items()
    for stage, printed in enumerate(row.split(), start=1)
]


def total(*args):
    return sum(theory.memory(*args).values())


@pytest.mark.parametrize(("numel", "world_size", "stage", "printed"), CELLS)
def test_memory_is_table_1_of_the_paper(numel, world_size, stage, printed):
    # The paper rounds some cells and cuts others off (4187.5 is printed as 4187): within one unit of the last digit.
    one_unit = 10.0 ** Decimal(printed).as_tuple().exponent
    assert abs(total(stage, numel, world_size) / 1e9 - float(printed)) < one_unit


def test_ddp_holds_sixteen_bytes_a_parameter_on_any_number_of_ranks():
    for world_size in (1, 3, 64):
        assert theory.memory(0, 1000, world_size) == {"params": 2000, "grads": 2000, "optimizer": 12000}


def test_fp32_has_no_master_copy():
    for precision in (None, "fp32"):
        assert theory.memory(0, 1000, 4, precision) == {"params": 4000, "grads": 4000, "optimizer": 8000}
    assert theory.memory(2, 1000, 4, "fp16") == theory.memory(2, 1000, 4, "bf16")


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_each_stage_shards_one_kind_more(precision):
    full = theory.memory(0, 1200, 4, precision)
    sharded = ["optimizer", "grads", "params"]
    for stage in range(4):
        expected = {kind: n // 4 if kind in sharded[:stage] else n for kind, n in full.items()}
        assert theory.memory(stage, 1200, 4, precision) == expected


def test_all_stages_are_equal_on_one_rank():
    assert len({total(stage, 1234567, 1) for stage in range(4)}) == 1


def test_zero_1_approaches_a_saving_of_three_quarters():
    saved = [1 - total(1, 4096, n) / total(0, 4096, n) for n in (2, 4, 8)]
    assert saved == [0.375, 0.5625, 0.65625]


def test_175_billion_parameters_on_64_ranks_need_43_75_gb():
    assert total(3, 175e9, 64) == 43.75e9


def test_uneven_shards_are_the_nearest_float():
    assert theory.memory(3, 10, 3)["params"] == 20 / 3
    huge = 10**18 + 1  # beyond what a float counts exactly
    assert theory.memory(0, huge, 3)["params"] == 2 * huge
    assert isinstance(theory.memory(3, 12, 3)["params"], int)


@pytest.mark.parametrize("g", [1, 2, 4, 8])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 64])
def test_traffic_counts_reduce_scatters_and_all_gathers(g, n):
    share = 192 * (n - 1) // n
    assert theory.traffic(0, 192, n, g) == 2 * g * share
    assert theory.traffic(1, 192, n, g) == (g + 1) * share
    assert theory.traffic(2, 192, n, g) == (g + 1) * share
    assert theory.traffic(3, 192, n, g) == 3 * g * share


def test_no_sync_reduces_once_however_many_micro_steps():
    for stage in (0, 1):
        for g in (1, 2, 8):
            assert theory.traffic(stage, 192, 4, g, no_sync=True) == 2 * 144


def test_zero_3_sends_one_and_a_half_times_zero_2_and_more_with_accumulation():
    ratios = [theory.traffic(3, 192, 4, g) / theory.traffic(2, 192, 4, g) for g in (1, 2, 4, 8)]
    assert ratios == [1.5, 2.0, 2.4, 24 / 9]


@pytest.mark.parametrize(("stage", "name"), [(2, "ZeRO-2"), (3, "ZeRO-3")])
def test_no_sync_with_sharded_gradients_is_refused_with_the_reason(stage, name):
    with pytest.raises(ValueError, match=f"no_sync=True at stage {stage}: .*{name} keeps only its shard"):
        theory.traffic(stage, 192, 4, no_sync=True)


@pytest.mark.parametrize(
    ("op", "elements"),
    [
        ("all_reduce", 18),
        ("reduce_scatter", 9),
        ("all_gather", 9),
        ("all_to_all", 9),
        ("scatter", 9),
        ("broadcast", 12),
        ("reduce", 12),
        ("gather", 12),
        ("send", 12),
        ("recv", 0),
        ("barrier", 0),
    ],
)
def test_sent_by_the_source_of_12_elements_among_4_ranks(op, elements):
    assert theory.sent(op, 12, 4) == elements
    assert isinstance(theory.sent(op, 12, 4), int)


@pytest.mark.parametrize("op", ["broadcast", "scatter", "reduce", "gather"])
def test_who_is_no_source_sends_nothing(op):
    assert theory.sent(op, 12, 4, is_source=False) == 0


def test_a_single_rank_sends_nothing():
    assert all(theory.sent(op, 12, 1) == 0 for op in theory._SENT)


def test_an_uneven_collective_is_the_nearest_float():
    assert theory.sent("all_reduce", 10, 3) == 40 / 3
    assert math.isclose(theory.sent("all_gather", 10, 3) * 3, 20)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: theory.memory(4, 1, 1), r"stage=4: choose one of 0 \(DDP\), 1 \(ZeRO-1\), 2 \(ZeRO-2\), 3 \(ZeRO-3\)"),
        (lambda: theory.traffic("zero1", 1, 1), "stage='zero1'"),
        (lambda: theory.memory(0, -1, 1), "numel=-1"),
        (lambda: theory.traffic(0, 2.5, 1), "numel=2.5"),
        (lambda: theory.memory(0, 1, 0), "world_size=0"),
        (lambda: theory.sent("send", 1, -2), "world_size=-2"),
        (lambda: theory.memory(0, 1, 2.5), "world_size=2.5"),
        (lambda: theory.traffic(0, 1, 2, micro_steps=1.5), "micro_steps=1.5"),
        (lambda: theory.memory(0, 1, 1, "int8"), "precision='int8': choose one of None, 'fp32', 'bf16', 'fp16'"),
        (lambda: theory.traffic(0, 1, 1, micro_steps=0), "micro_steps=0"),
        (lambda: theory.sent("allreduce", 1, 1), "op='allreduce': choose one of all_reduce, "),
    ],
)
def test_wrong_arguments_are_named_with_what_is_allowed(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# --- time ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("op", "n", "expected"), [
    ("all_gather", 4, 3 * (1e-3 + 1.0 / 4)), ("reduce_scatter", 2, 1e-3 + 1.0 / 2), ("all_to_all", 2, 1e-3 + 1.0 / 2),
    ("scatter", 2, 1e-3 + 1.0 / 2), ("all_reduce", 4, 6 * (1e-3 + 1.0 / 4)), ("broadcast", 4, 3e-3 + 1.0), ("reduce", 4, 3e-3 + 1.0),
    ("gather", 4, 3 * (1e-3 + 1.0)), ("send", 4, 1e-3 + 1.0), ("recv", 2, 1e-3 + 1.0), ("barrier", 4, 6e-3), ("all_reduce", 1, 0.0),
])  # fmt: skip
def test_a_collective_takes_its_messages_one_after_the_other(op, n, expected):
    assert theory.seconds(op, 8e9, n, bandwidth=8e9, latency=1e-3) == pytest.approx(expected)


def test_an_all_reduce_takes_as_long_as_its_two_halves():
    halves = theory.seconds("reduce_scatter", 1e8, 8, 1e9, 1e-5) + theory.seconds("all_gather", 1e8, 8, 1e9, 1e-5)
    assert theory.seconds("all_reduce", 1e8, 8, 1e9, 1e-5) == pytest.approx(halves)


BLOCKS = [f"blocks.{i}" for i in range(12)]


def twelve_blocks(bandwidth, depth):
    """Blocks of 1 GB, which compute for 1 s forward and 2 s backward, on two ranks; a root that is nothing beside them."""
    forward = [("root", 0.0), *((block, 1.0) for block in BLOCKS), ("root", 0.0)]
    backward = [("root", 0.0), *((block, 2.0) for block in reversed(BLOCKS)), ("root", 0.0)]
    return theory.schedule(forward, backward, {"root": 0.0, **dict.fromkeys(BLOCKS, 2e9)}, 2, bandwidth, depth=depth)


def test_where_a_gather_takes_as_long_as_a_forward_zero3_exposes_all_gathers_and_prefetch_all_but_the_first_of_each_pass():
    on_demand, ahead = (twelve_blocks(1e9, depth) for depth in (0, 1))
    assert on_demand.communication == ahead.communication == 36
    assert on_demand.exposed == 24 + 1  # each gather; the reductions hide behind backward, but for the last
    assert ahead.exposed == 1 + 1 + 1
    assert on_demand.seconds == 36 + 25 and ahead.seconds == 36 + 3
    assert ahead.hidden == 1 - 3 / 36


def test_nothing_can_be_hidden_where_there_is_nothing_to_hide_it_behind():
    assert twelve_blocks(1e7, 4).hidden == pytest.approx(36 / 3600, abs=0.001)  # what computes is a hundredth
    assert twelve_blocks(1e12, 0).seconds == pytest.approx(36, rel=0.01)


def test_no_gather_is_asked_for_more_than_depth_units_ahead():
    for depth in (1, 2, 3):
        schedule = twelve_blocks(1e9, depth)
        began = -1  # blocks whose forward has begun, but for the root's own
        for what, unit, _, _ in schedule.events:
            if what == "backward":
                break
            began += what == "forward" and unit != "root"
            if what == "gather" and unit != "root":
                assert BLOCKS.index(unit) - (began + 1) <= depth


def test_its_order_is_that_of_the_engine():
    forward = [("root", 0.1), ("a", 1.0), ("root", 0.1), ("b", 1.0), ("root", 0.1)]
    backward = [("root", 0.1), ("b", 1.0), ("root", 0.1), ("a", 1.0), ("root", 0.1)]
    schedule = theory.schedule(forward, backward, {"root": 1, "a": 1, "b": 1}, 2, 1e9, depth=1, rest=0.5, control=64)
    order = [f"{what} {unit}" for what, unit, _, _ in schedule.events if what in ("gather", "reduce", "step")]
    assert order == [
        "gather root", "gather a", "gather b", "gather root", "gather b", "gather a", "reduce b", "reduce a", "reduce root",
        "reduce control", "step model",
    ]  # fmt: skip
