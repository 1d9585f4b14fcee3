from io import BytesIO
from itertools import combinations, pairwise
from types import SimpleNamespace

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib._pylab_helpers import Gcf
from matplotlib.collections import LineCollection
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.text import Text

from minizero.lens import plots, theory
from minizero.parts import flat

MB = 1e6


def event(rank, unit, what, start, end):
    return SimpleNamespace(rank=rank, unit=unit, what=what, start=start, end=end)


def ddp_events(blocks=4):
    events = []
    for rank in range(2):
        t = 0.1
        for i in range(blocks):
            events.append(event(rank, f"blocks.{i}", "forward", t, t + 0.004))
            t += 0.004
        for i in reversed(range(blocks)):
            events.append(event(rank, f"blocks.{i}", "backward", t, t + 0.008))
            events.append(event(rank, f"bucket {blocks - 1 - i}", "reduce", t + 0.008, t + 0.014))
            t += 0.008
        events.append(event(rank, None, "wait", t, t + 0.006))
        events.append(event(rank, None, "step", t + 0.006, t + 0.009))
    return events


def shards(sizes, world_size):
    layout = flat.layout([torch.empty(size) for size in sizes], world_size)
    return plots.shards(layout, [f"layer.{i}" for i in range(len(sizes))], "Who owns what")


PEAKS = {
    "one process": {"params": 0.5 * MB, "grads": 0.5 * MB, "optimizer": MB, "activations": 3 * MB, "other": 0.2 * MB},
    "DDP": {"params": 0.5 * MB, "grads": 0.5 * MB, "optimizer": MB, "comm": MB, "host": 0.4 * MB, "other": 0.2 * MB},
}
COMB = {
    "params": [MB, 3 * MB] * 20,
    "optimizer": [3 * MB] * 40,
    "grads": [0] * 20 + [MB * i / 20 for i in range(20)],
    "activations": [MB * min(i, 40 - i) / 4 for i in range(40)],
    "comm": [0] * 40,
}
PHASES = ("forward", "backward", "step")
RUNS = {
    "ZeRO-1": (
        [0, 2, 4, 6],
        {"params": [MB] * 4, "grads": [2 * MB] * 4, "activations": [0, 3 * MB, 2 * MB, 0]},
        [3, 5, 6],
    ),
    "ZeRO-2": (
        [0, 1, 2, 3],
        {"params": [MB] * 4, "grads": [0, 0, MB, MB], "activations": [0, MB, 2 * MB, 0]},
        [1, 3, 4],
    ),
}
MUSIC = [
    *[(what, unit) for unit in ("root", "blocks.0") for what in ("gather", "forward")],
    ("free", "blocks.0"),
    *[(what, "blocks.1") for what in ("gather", "forward", "free")],
    *[("forward", "root"), ("free", "root"), ("gather", "root"), ("backward", "root")],
    *[(what, f"blocks.{i}") for i in (1, 0) for what in ("gather", "backward", "reduce", "free")],
    *[("backward", "root"), ("reduce", "root"), ("free", "root")],
]
WHATS = ["gather", "forward", "backward", "reduce", "free", "step", "wait", "copy", "all_reduce"]
NS = [2, 3, 4, 8, 16, 32, 64]
PICTURES = {
    "bars": lambda: plots.memory_bars(PEAKS, "Peak of one training step"),
    "bars with a long name": lambda: plots.memory_bars(
        {"ZeRO-2, the name of which is long": dict.fromkeys(plots.COLOURS, MB)}
    ),
    "ladder": plots.memory_ladder,
    "curve over time": lambda: plots.memory_curve([i / 100 for i in range(40)], COMB, "One step of ZeRO-3"),
    "traffic": lambda: plots.traffic_bars(
        {"DDP": MB, "ZeRO-3": 1.5 * MB}, {"DDP": MB, "ZeRO-3": 1.4 * MB}, title="Sent"
    ),
    "elements": lambda: plots.traffic_bars({"all to rank 0": 300000, "ring": 150000}, unit="elements"),
    "lanes": lambda: plots.lanes(ddp_events(), "DDP"),
    "many lanes": lambda: plots.lanes(ddp_events(24)),
    "all there is in lanes": lambda: plots.lanes([event(0, "u", what, i, i + 1) for i, what in enumerate(WHATS)]),
    "ring of 2": lambda: plots.ring(2, 1),
    "ring of 4": lambda: plots.ring(4, 1),
    "ring of 6": lambda: plots.ring(6, 7),
    "end of a ring": lambda: plots.ring(5, 8),
    "lines": lambda: plots.curve(
        NS,
        {"all-reduce": [2 - 2 / n for n in NS], "a": [1 - 1 / n for n in NS], "b": [1 - 1 / n for n in NS]},
        "N",
        "sent",
    ),
    "shards": lambda: shards((50, 10, 80), world_size=3),
    "shards of many": lambda: shards((1, 1000, 7, 3), world_size=8),
    "log": lambda: plots.curve([1e7, 1e8, 1e9], {"DDP": [5, 3, 2], "ZeRO-3": [9, 4, 2]}, "bytes/s", "s", log_x=True),
    "phases": lambda: plots.memory_phases(PHASES, RUNS, "One step"),
    "peaks side by side": lambda: plots.memory_phases(PHASES, dict.fromkeys(("DDP", "a", "b"), RUNS["ZeRO-2"])),
    "measured": lambda: plots.predicted(
        [1e7, 1e8, 1e9], {"DDP": [5, 3, 2], "ZeRO-3": [9, 4, 2]}, [2e7, 5e8], {"ZeRO-3": [8, 2.5]}, "bytes/s", "s", log_x=True
    ),
    "score": lambda: plots.score(MUSIC, "One step of ZeRO-3"),
    "score of one unit": lambda: plots.score([("gather", "root"), ("forward", "root"), ("free", "root")]),
}


def texts(figure):
    """The visible texts. Matplotlib has tick labels beyond the ends of an axis, too, which it does not draw."""
    beyond = set()
    for axis in (figure.axes[0].xaxis, figure.axes[0].yaxis):
        low, high = sorted(axis.get_view_interval())
        beyond |= {tick.label1 for tick in axis.get_major_ticks() if not low <= tick.get_loc() <= high}
    return [text for text in figure.findobj(Text) if text.get_visible() and text.get_text() and text not in beyond]


def words(figure):
    return [text.get_text() for text in texts(figure)]


def png(figure):
    file = BytesIO()
    figure.savefig(file, format="png", dpi=50)
    return file.getvalue()


def boxes(figure, colour):
    patches = figure.axes[0].patches
    return [p for p in patches if isinstance(p, Rectangle) and to_hex(p.get_facecolor()) == colour.lower()]


# The style --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_a_figure_of_6_by_3_5_inches(name):
    figure = PICTURES[name]()
    assert isinstance(figure, Figure)
    assert figure.get_size_inches().tolist() == [6, 3.5]


@pytest.mark.parametrize("name", PICTURES)
def test_no_two_words_overlap_and_none_is_cut_off(name):
    figure = PICTURES[name]()
    figure.draw_without_rendering()
    extents = [(text.get_text(), text.get_window_extent()) for text in texts(figure)]
    for (a, box_a), (b, box_b) in combinations(extents, 2):
        width = min(box_a.x1, box_b.x1) - max(box_a.x0, box_b.x0)
        height = min(box_a.y1, box_b.y1) - max(box_a.y0, box_b.y0)
        assert width <= 1 or height <= 1, f"{a!r} and {b!r} overlap"
    for word, box in extents:
        inside = box.x0 >= -1 and box.y0 >= -1 and box.x1 <= figure.bbox.x1 + 1 and box.y1 <= figure.bbox.y1 + 1
        assert inside, f"{word!r} leaves the picture"


@pytest.mark.parametrize("name", PICTURES)
def test_drawing_changes_no_setting_and_opens_no_window(name):
    before, windows = dict(matplotlib.rcParams), dict(Gcf.figs)
    PICTURES[name]()
    assert dict(matplotlib.rcParams) == before
    assert dict(Gcf.figs) == windows


@pytest.mark.parametrize("name", PICTURES)
def test_a_reader_s_own_settings_do_not_show(name):
    plain = png(PICTURES[name]())
    settings = {
        "font.size": 30,
        "axes.facecolor": "black",
        "ytick.major.pad": 20,
        "text.color": "red",
        "axes.grid": True,
    }
    with matplotlib.rc_context(settings):
        assert png(PICTURES[name]()) == plain


def test_a_notebook_gets_a_sharp_png_of_600_by_350():
    image, size = plots.ring(2, 0)._repr_png_()
    assert image.startswith(b"\x89PNG")
    assert int.from_bytes(image[16:20], "big") == 1200  # pixels: two for each of the 600
    assert size == {"width": 600, "height": 350}


def linear(colour):
    return np.array([c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)])


def lab(rgb):
    """CIELAB of linear RGB: [lightness, a, b]; a distance of 2 is what an eye can notice."""
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ np.clip(rgb, 0, 1) / np.array([0.9505, 1, 1.089])
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def test_kinds_stay_apart_in_grey():
    lightness = sorted(lab(linear(colour))[0] for colour in plots.COLOURS.values())
    assert min(b - a for a, b in pairwise(lightness)) > 7
    as_a_printer_sees_it = sorted(np.dot(to_rgb(colour), [0.299, 0.587, 0.114]) for colour in plots.COLOURS.values())
    assert min(b - a for a, b in pairwise(as_a_printer_sees_it)) > 0.07


# Machado, Oliveira and Fernandes 2009, severity 1.0.
COLOUR_BLIND = {
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}


@pytest.mark.parametrize("kind", COLOUR_BLIND)
def test_kinds_stay_apart_for_a_colour_blind_reader(kind):
    seen = [lab(np.array(COLOUR_BLIND[kind]) @ linear(colour)) for colour in plots.COLOURS.values()]
    assert min(np.linalg.norm(a - b) for a, b in combinations(seen, 2)) > 18


# Memory -----------------------------------------------------------------------------------------------------------


def test_the_ladder_says_120_31_4_16_6_1_9():
    figure = plots.memory_ladder()
    assert [w for w in words(figure) if w.endswith(" GB")] == ["120 GB", "31.4 GB", "16.6 GB", "1.9 GB"]
    assert {"DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3", "weights", "gradients", "optimizer"} <= set(words(figure))


@pytest.mark.parametrize(("numel", "said"), [(1e12, "1000 B parameters"), (113152, "113,152 parameters")])
def test_the_ladder_says_for_how_many_parameters(numel, said):
    assert any(said in word for word in words(plots.memory_ladder(numel, 4)))


def test_the_ladder_is_drawn_from_theory():
    figure = plots.memory_ladder(1e9, 16)
    for kind in ("params", "grads", "optimizer"):
        widths = [box.get_width() * 1e9 for box in boxes(figure, plots.COLOURS[kind])]
        assert widths == pytest.approx([theory.memory(stage, 1e9, 16)[kind] for stage in range(4)])


def test_a_bars_segments_follow_one_another_in_the_courses_order():
    figure = plots.memory_bars({"DDP": {"optimizer": 4 * MB, "params": MB, "grads": 2 * MB}})
    spans = [
        (p.get_x(), p.get_width())
        for kind in ("params", "grads", "optimizer")
        for p in boxes(figure, plots.COLOURS[kind])
    ]
    assert spans == [(0, 1), (1, 2), (3, 4)]


def test_a_kind_is_named_above_the_place_where_its_segment_begins():
    figure = plots.memory_bars({"a long name of a bar": {"params": 2 * MB, "grads": 2 * MB, "optimizer": 3 * MB}})
    squares = [text.get_window_extent().x0 for text in texts(figure) if text.get_text() == "■"]
    segments = [box.get_window_extent().x0 for box in figure.axes[0].patches]
    assert squares == pytest.approx(segments, abs=1.5)


def test_kinds_without_bytes_are_not_named():
    figure = plots.memory_bars({"DDP": {"params": MB, "comm": 0}})
    assert "weights" in words(figure)
    assert "communication" not in words(figure)


def test_a_kind_that_only_a_later_bar_has_is_named():
    assert {"host", "communication", "activations"} <= set(words(PICTURES["bars"]()))


@pytest.mark.parametrize(
    ("total", "text"), [(45e3, "45.0 kB"), (1.26e6, "1.3 MB"), (9e9, "9000 MB"), (31.4e9, "31.4 GB")]
)
def test_bytes_are_mb_with_one_decimal_unless_they_are_far_from_it(total, text):
    assert text in words(plots.memory_bars({"x": {"params": total}}))


def test_the_curve_marks_its_peak():
    figure = plots.memory_curve([1.0, 1.1, 1.2, 1.3], {"params": [MB] * 4, "activations": [0, 2 * MB, MB, 0]})
    assert "peak 3.0 MB" in words(figure)
    (line,) = figure.axes[0].lines
    assert line.get_xydata()[0] == pytest.approx([100, 3])  # ms since the first reading, MB


def test_the_curve_names_a_band_where_it_has_room_and_else_in_the_key():
    figure = PICTURES["curve over time"]()
    inside = {text.get_text() for text in figure.axes[0].texts}
    key = {text.get_text() for text in figure.legends[0].get_texts()}
    assert {"activations", "optimizer"} <= inside
    assert "weights" in key  # a comb is too narrow for a word
    assert not inside & key


def test_what_changes_least_lies_lowest():
    figure = PICTURES["curve over time"]()
    bands = [to_hex(band.get_facecolor()[0]) for band in figure.axes[0].collections]
    assert bands == [plots.COLOURS[kind].lower() for kind in ("optimizer", "grads", "activations", "params")]


def test_memory_stands_until_the_next_reading():
    figure = plots.memory_curve([0, 1], {"params": [MB, 5 * MB]})
    corners = figure.axes[0].collections[0].get_paths()[0].vertices
    assert corners[(corners[:, 0] > 0) & (corners[:, 0] < 1000)].size == 0
    assert [1000, 1] in corners.tolist()


# Traffic ----------------------------------------------------------------------------------------------------------


def test_traffic_has_a_tick_where_theory_says():
    figure = plots.traffic_bars({"naive": 6 * MB, "DDP": 2 * MB, "ZeRO-3": 3 * MB}, {"DDP": 1.5 * MB, "ZeRO-3": 3 * MB})
    ticks = [c for c in figure.axes[0].collections if isinstance(c, LineCollection)]
    assert [tick.get_segments()[0][:, 0].tolist() for tick in ticks] == [[1.5, 1.5], [3, 3]]
    assert [box.get_width() for box in boxes(figure, plots.COLOURS["comm"])] == [6, 2, 3]
    assert words(figure).count("theory") == 1


def test_traffic_without_theory_speaks_of_none():
    assert "theory" not in words(plots.traffic_bars({"DDP": MB}))


def test_elements_are_counted_in_full():
    assert "113,152 elements" in words(plots.traffic_bars({"DDP": 113152}, unit="elements"))


# Lanes ------------------------------------------------------------------------------------------------------------


def test_a_rank_is_a_row_with_compute_above_communication():
    figure = plots.lanes([event(r, "u", what, 0, 1) for r in (0, 1) for what in ("forward", "gather")])
    heights = {}
    for kind, what in (("activations", "forward"), ("comm", "gather")):
        heights[what] = [box.get_window_extent().y0 for box in boxes(figure, plots.COLOURS[kind])]
    assert heights["forward"][0] > heights["gather"][0] > heights["forward"][1] > heights["gather"][1]
    assert {"rank 0", "rank 1"} <= set(words(figure))


def test_time_starts_at_the_first_event_and_runs_right():
    figure = plots.lanes([event(0, "a", "forward", 5.0, 5.25), event(0, "b", "forward", 5.25, 5.5)])
    assert [(box.get_x(), box.get_width()) for box in boxes(figure, plots.COLOURS["activations"])] == [
        (0, 250),
        (250, 250),
    ]


def test_units_are_named_in_full_where_all_fit_and_else_by_their_last_part():
    wide = [event(0, f"blocks.{i}", "forward", i, i + 1) for i in range(4)]
    narrow = [event(0, f"blocks.{i}", "forward", i, i + 1) for i in range(20)]
    assert "blocks.3" in words(plots.lanes(wide))
    assert "blocks.3" not in words(plots.lanes(narrow))
    assert "3" in words(plots.lanes(narrow))


def test_a_plain_collective_carries_its_own_name():
    assert {"all_reduce", "communication"} <= set(words(plots.lanes([event(0, None, "all_reduce", 0, 1)])))


def test_free_is_a_tick_and_not_a_box():
    figure = plots.lanes([event(0, "a", "forward", 0, 1), event(0, "a", "free", 1, 1)])
    (tick,) = [c for c in figure.axes[0].collections if isinstance(c, LineCollection)]
    assert tick.get_segments()[0][:, 0].tolist() == [1000, 1000]
    assert "free" in words(figure)


def test_the_key_has_what_occurs_and_no_more():
    figure = plots.lanes(ddp_events())
    assert [t.get_text() for t in figure.legends[0].get_texts()] == ["forward", "backward", "step", "wait", "reduce"]


# The ring ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3, 4, 6])
def test_the_ring_draws_what_a_ring_all_reduce_holds(n):
    held = [[{rank} for _ in range(n)] for rank in range(n)]  # whose gradients are summed in [rank][chunk]
    for step in range(2 * n - 1):
        figure = plots.ring(n, step)
        cells = boxes(figure, plots.COLOURS["grads"])
        size = boxes(figure, "#ffffff")[0].get_height()
        drawn = [round(cell.get_height() / size * n) for cell in cells]
        assert drawn == [len(whose) for chunks in held for whose in chunks], f"before step {step}"
        if step < 2 * n - 2:
            sent = [held[rank][(rank - step - 1) % n] for rank in range(n)]
            for rank, whose in enumerate(sent):
                chunks, chunk = held[(rank + 1) % n], (rank - step - 1) % n
                chunks[chunk] = chunks[chunk] | whose if step < n - 1 else whose
        if step == n - 2:
            assert all(
                len(held[rank][rank]) == n for rank in range(n)
            )  # a reduce-scatter: rank r has the sum of chunk r


def test_the_ring_frames_the_chunk_that_moves_and_labels_its_arrow():
    figure = plots.ring(4, 1)
    frames = [p for p in figure.axes[0].patches if isinstance(p, Rectangle) and not p.get_fill()]
    assert len(frames) == 4
    arrows = [text.get_text() for text in figure.axes[0].texts if text.get_bbox_patch()]
    assert arrows == [str((rank - 2) % 4) for rank in range(4)]


@pytest.mark.parametrize("step", [0, 3, 6])
def test_the_ring_says_what_its_filling_means_at_every_step(step):
    assert any("filled 1/4 for each rank in the sum" in word for word in words(plots.ring(4, step)))


def test_nothing_moves_at_the_end_of_a_ring():
    figure = plots.ring(3, 4)
    assert not [text for text in figure.axes[0].texts if text.get_bbox_patch()]
    assert "The end: every rank holds every sum" in words(figure)


def test_the_ring_says_which_half_it_is_in():
    assert any("reduce-scatter" in w for w in words(plots.ring(4, 2)))
    assert any("all-gather" in w for w in words(plots.ring(4, 3)))


# Shards -----------------------------------------------------------------------------------------------------------


def test_a_shard_is_a_row_with_what_it_owns_of_each_tensor():
    figure = shards((50, 10, 80), world_size=3)  # at 0, 64 and 96; P = 192, S = 64
    drawn = [(box.get_x(), round(box.get_y()), box.get_width()) for box in boxes(figure, plots.COLOURS["params"])]
    assert drawn == [(0, 0, 50), (0, 1, 10), (32, 1, 32), (0, 2, 48)]
    assert {"rank 0", "rank 2", "50 of 64", "42 of 64", "48 of 64"} <= set(words(figure))
    assert {"layer.2\n[0, 32)", "layer.2\n[32, 80)"} <= set(words(figure))


def test_padding_is_hatched_behind_the_whole_shard():
    figure = shards((50, 10, 80), world_size=3)
    hatched = [p for p in figure.axes[0].patches if p.get_hatch()]
    assert [(p.get_x(), p.get_width()) for p in hatched] == [(0, 64)] * 3


# Lines ------------------------------------------------------------------------------------------------------------


def test_each_line_is_named_at_its_right_end():
    figure = plots.curve([1, 2], {"low": [1, 1], "high": [1, 9]}, "N", "elements")
    places = {text.get_text(): text.get_window_extent() for text in figure.axes[0].texts}
    assert places["high"].y0 > places["low"].y1
    assert all(place.x0 > figure.axes[0].get_window_extent().x1 for place in places.values())


def test_whole_numbers_have_whole_ticks():
    figure = plots.curve([2, 3, 4], {"a": [10, 20, 30]}, "ranks", "elements")
    assert {"2", "3", "4"} <= set(words(figure))
    assert not {"2.5", "2.50"} & set(words(figure))


def test_lines_differ_without_colour():
    figure = plots.curve([1, 2], {name: [1, 2] for name in "abcdef"}, "N", "elements")
    assert len({str(line._unscaled_dash_pattern) for line in figure.axes[0].lines}) == 6


def test_a_line_named_after_a_kind_has_its_colour_and_others_have_none_of_these():
    figure = plots.curve([1, 2], {"grads": [1, 2], **{name: [1, 2] for name in "abcde"}}, "N", "bytes")
    first, *others = [line.get_color() for line in figure.axes[0].lines]
    assert first == plots.COLOURS["grads"]
    assert not set(others) & set(plots.COLOURS.values())


# Errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: plots.memory_bars({}), "rows is empty"),
        (
            lambda: plots.memory_bars({"x": {"weights": 1}}),
            r"unknown kind of bytes: \['weights'\]; choose from params, ",
        ),
        (lambda: plots.memory_curve([], {"params": []}), "times is empty"),
        (lambda: plots.memory_curve([0, 1], {"params": [1]}), "'params' has 1 values for 2 times"),
        (lambda: plots.traffic_bars({}), "measured is empty"),
        (lambda: plots.traffic_bars({"a": 1}, unit="bits"), "unit='bits'"),
        (lambda: plots.traffic_bars({"a": 1}, {"b": 1}), r"theory for \['b'\]"),
        (lambda: plots.lanes([]), "events is empty"),
        (lambda: plots.ring(7, 0), "world_size=7"),
        (lambda: plots.ring(4, 7), "step=7: an all-reduce among 4 ranks has steps 0 to 5, and 6 is its end"),
        (lambda: shards((1,), world_size=9), "world_size=9: shards are drawn for up to 8 ranks"),
        (lambda: plots.shards(flat.layout([torch.empty(3)], 2), []), "0 names for 1 tensors"),
        (lambda: plots.curve([1, 2], {}, "x", "y"), "series is empty"),
        (lambda: plots.curve([1, 2], {"a": [1]}, "x", "y"), "'a' has 1 values for 2 points"),
    ],
)
def test_wrong_arguments_are_named(draw, message):
    with pytest.raises(ValueError, match=message):
        draw()


# Phases -----------------------------------------------------------------------------------------------------------


def test_phases_mark_the_peak_of_every_run():
    figure = PICTURES["phases"]()
    assert {"ZeRO-1, peak 6.0 MB", "ZeRO-2, peak 4.0 MB", *PHASES} <= set(words(figure))
    dots = [line.get_xydata()[0].tolist() for line in figure.axes[0].lines if line.get_marker() == "o"]
    assert dots == [pytest.approx([2 / 3, 6]), pytest.approx([1.5, 4])]


def test_phases_are_as_wide_in_every_run():
    figure = PICTURES["phases"]()
    (total,) = [line for line in figure.axes[0].lines if line.get_drawstyle() == "steps-post"]
    assert total.get_xdata() == pytest.approx([0, 2 / 3, 1.5, 3])  # 0, 2, 4 and 6 of phases that end at 3, 5 and 6
    assert total.get_ydata() == pytest.approx([3, 6, 5, 3])


def test_only_the_last_run_of_phases_is_stacked_by_kind():
    figure = PICTURES["phases"]()
    bands = [to_hex(band.get_facecolor()[0]) for band in figure.axes[0].collections]
    assert bands == [plots.COLOURS[kind].lower() for kind in ("params", "grads", "activations")]
    tops = [band.get_paths()[0].vertices[:, 1].max() for band in figure.axes[0].collections]
    assert tops == [1, 2, 4]


def test_phases_that_do_not_fit_their_run_are_refused():
    times, by_kind, ends = RUNS["ZeRO-1"]
    with pytest.raises(ValueError, match="'ZeRO-1' has 2 ends for 3 phases"):
        plots.memory_phases(PHASES, {"ZeRO-1": (times, by_kind, ends[:2])})
    with pytest.raises(ValueError, match="'params' of 'ZeRO-1' has 4 values for 3 times"):
        plots.memory_phases(PHASES, {"ZeRO-1": (times[:3], by_kind, ends)})
    with pytest.raises(ValueError, match="runs is empty"):
        plots.memory_phases(PHASES, {})


# Sheet music ------------------------------------------------------------------------------------------------------


def test_every_note_of_a_score_is_as_long_and_comes_after_the_one_before():
    figure = plots.score(MUSIC)
    notes = [p for p in figure.axes[0].patches if to_hex(p.get_facecolor()) != plots.COLOURS["params"].lower()]
    played = [unit for what, unit in MUSIC if what != "free"]
    rows = [round(note.get_y() + note.get_height() / 2) for note in notes]
    assert [(note.get_x(), note.get_width()) for note in notes] == [(i, 1) for i in range(len(played))]
    assert rows == [["root", "blocks.0", "blocks.1"].index(unit) for unit in played]


def test_a_unit_is_underlined_from_gather_to_free():
    bars = boxes(plots.score(MUSIC), plots.COLOURS["params"])
    spans = sorted((round(bar.get_y()), bar.get_x(), bar.get_x() + bar.get_width()) for bar in bars)
    assert spans == [(0, 0, 7), (0, 7, 17), (1, 2, 4), (1, 12, 15), (2, 4, 6), (2, 9, 12)]


def test_weights_that_nobody_frees_stay_to_the_end():
    (bar,) = boxes(plots.score([("gather", "a"), ("forward", "a"), ("forward", "b")]), plots.COLOURS["params"])
    assert (bar.get_x(), bar.get_width()) == (0, 3)


def test_an_event_that_is_no_note_is_refused():
    with pytest.raises(ValueError, match=r"unknown events: \['step'\]; choose from gather, forward, back"):
        plots.score([("step", "root")])
    with pytest.raises(ValueError, match="events is empty"):
        plots.score([])


# Prediction -------------------------------------------------------------------------------------------------------


def test_a_measurement_is_a_dot_in_its_lines_colour_and_inside_the_picture():
    figure = plots.predicted([1, 2], {"a": [1, 1], "b": [1, 2]}, [1, 2], {"b": [1.5, 7]}, "N", "s")
    _, line, dots = figure.axes[0].lines
    assert dots.get_xydata().tolist() == [[1, 1.5], [2, 7]]
    assert (dots.get_linestyle(), dots.get_color()) == ("None", line.get_color())
    assert figure.axes[0].get_ylim()[1] > 7
    low, high = (text.get_window_extent() for text in figure.axes[0].texts)
    assert high.y0 > low.y1


def test_a_measurement_without_its_prediction_or_its_place_is_refused():
    with pytest.raises(ValueError, match=r"measured \['c'\], which no line predicts"):
        plots.predicted([1], {"a": [1]}, [1], {"c": [1]}, "N", "s")
    with pytest.raises(ValueError, match="'a' has 1 measurements at 2 points"):
        plots.predicted([1], {"a": [1]}, [1, 2], {"a": [1]}, "N", "s")
