"""The pictures of the course, in one style: a colour means the same everywhere, and values stand where they belong.

Every function returns a Matplotlib Figure of 6 × 3.5 inches. It neither opens a window nor changes Matplotlib's
settings, and a notebook shows it once, as the value of its cell.
"""

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import wraps
from itertools import cycle

import matplotlib.style
import numpy as np
from matplotlib.artist import Artist
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Ellipse, FancyArrowPatch, Patch, Rectangle
from matplotlib.path import Path

from minizero.lens.theory import STAGES, memory
from minizero.parts.flat import Layout, cuts

# Close to Okabe and Ito's colours, shifted until their lightness differs too: from 21 (host) to 88 (other), in steps of
# at least 7 of 100. So they stay apart in grey and for colour-blind readers.
COLOURS = {
    "params": "#005A9C",
    "grads": "#E69F00",
    "optimizer": "#35AB87",
    "activations": "#9CCDEE",
    "comm": "#C94F1D",
    "host": "#4A1F5C",
    "other": "#DEDEDE",
}
NAMES = {"params": "weights", "grads": "gradients", "comm": "communication"}  # the other kinds are called what they are
INK, FAINT = "#222222", "#999999"
SIZE, TITLE_SIZE = 8.5, 9.5  # of letters, in points

STYLE = {
    "figure.figsize": (6, 3.5),
    "figure.dpi": 100,
    "font.family": "DejaVu Sans",  # comes with Matplotlib, so the pictures are the same everywhere
    "font.size": SIZE,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "lines.linewidth": 1.8,
    "hatch.linewidth": 0.6,
    "legend.frameon": False,
    "legend.borderpad": 0.2,
    "legend.handlelength": 0.9,
    "legend.handleheight": 0.9,
    "legend.handletextpad": 0.4,
    "legend.columnspacing": 1.1,
}


class Picture(Figure):
    """A Figure that a notebook can show by itself. Figures of pyplot would appear twice: as a window and as a value."""

    def _repr_png_(self):
        png, (width, height) = io.BytesIO(), self.get_size_inches() * 100
        self.savefig(png, format="png", dpi=200)
        return png.getvalue(), {"width": int(width), "height": int(height)}


def _in_style(draw):
    @wraps(draw)
    def drawn(*args, **kwargs):
        with matplotlib.style.context(STYLE, after_reset=True):
            return draw(*args, **kwargs)

    return drawn


@_in_style
def memory_bars(rows: Mapping[str, Mapping[str, float]], title: str = "") -> Figure:
    """A bar for each name, made of bytes by kind, its total at the end: `memory_bars({"DDP": m.peak, "ZeRO-1": …})`."""
    _not_empty(rows=rows)
    kinds = _kinds(*rows.values())
    totals = [sum(by_kind.values()) for by_kind in rows.values()]
    size, unit = _bytes_unit(max(totals))
    figure, ax = _axes()
    _head(figure, title)
    _rows(ax, list(rows), max(totals) / size)
    segments = []
    for y, by_kind in enumerate(rows.values()):
        start = 0.0
        for kind in kinds:
            width = by_kind.get(kind, 0) / size
            ax.barh(y, width, left=start, height=0.62, color=COLOURS[kind])
            segments.append((y, start, width, kind))
            start += width
        _at_end(ax, start, y, f"{_number(start)} {unit}")
    figure.draw_without_rendering()
    for y, start, width, kind in segments:
        text = ax.text(start + width / 2, y, _number(width), ha="center", va="center", color=_ink_on(COLOURS[kind]))
        if text.get_window_extent().width + 6 > _pixels(ax, width):
            text.remove()
    _name_kinds(ax, [(start, kind) for y, start, _, kind in segments if y == 0])
    return figure


def memory_ladder(numel: float = 7.5e9, world_size: int = 64) -> Figure:
    """What one rank holds at each ZeRO stage, by arithmetic: figure 1 of Rajbhandari et al. 2020."""
    rows = {name: memory(stage, numel, world_size) for stage, name in STAGES.items()}
    count = f"{numel / 1e9:g} B" if numel >= 1e9 else f"{numel:,.0f}"
    return memory_bars(rows, f"Model states on each of {world_size} ranks, {count} parameters, mixed-precision Adam")


@_in_style
def memory_curve(times: Sequence[float], by_kind: Mapping[str, Sequence[float]], title: str = "") -> Figure:
    """Bytes held over time, stacked by kind: times [n] in seconds, by_kind kind -> bytes [n]. The peak is marked."""
    _not_empty(times=times, by_kind=by_kind)
    for kind, values in by_kind.items():
        if len(values) != len(times):
            raise ValueError(f"{kind!r} has {len(values)} values for {len(times)} times: give one for each")
    kinds = _kinds({kind: max(values) for kind, values in by_kind.items()})
    # What changes least lies lowest, so that a comb of gathered weights does not shake all the rest.
    kinds.sort(key=lambda kind: np.abs(np.diff(by_kind[kind])).sum())
    borders = np.cumsum([np.zeros(len(times)), *(by_kind[kind] for kind in kinds)], axis=0)  # [kinds + 1, n], upwards
    size, unit = _bytes_unit(borders.max())
    borders, moments = borders / size, (np.asarray(times) - times[0]) * 1e3
    figure, ax = _axes()
    for kind, low, high in zip(kinds, borders, borders[1:], strict=False):
        # What was counted at one moment stands until the next is counted: steps, not slopes.
        ax.fill_between(moments, low, high, step="post", color=COLOURS[kind], linewidth=0)
    ax.set(xlabel="time, ms", ylabel=unit, xlim=(0, moments[-1] or 1), ylim=(0, borders.max() * 1.15 or 1))
    ax.locator_params(axis="y", nbins=6)
    peak = borders[-1].argmax()
    x, y, late = moments[peak], borders[-1, peak], moments[peak] > moments[-1] / 2
    ax.plot(x, y, "o", color=INK, markersize=4, clip_on=False)
    beside = {"xytext": (-5 if late else 5, 5), "textcoords": "offset points", "ha": "right" if late else "left"}
    ax.annotate(f"peak {_number(y)} {unit}", (x, y), weight="bold", **beside)
    figure.draw_without_rendering()
    unnamed = {}
    for kind, low, high in zip(kinds, borders, borders[1:], strict=False):
        text = ax.text(0, 0, _name(kind), ha="center", va="center", color=_ink_on(COLOURS[kind]))
        place = _room_for(text, ax, moments, low, high)
        if place:
            text.set_position(place)
        else:
            text.remove()
            unnamed[_name(kind)] = Patch(color=COLOURS[kind])
    _head(figure, title, unnamed)
    return figure


@_in_style
def traffic_bars(
    measured: Mapping[str, float], theory: Mapping[str, float] | None = None, unit: str = "bytes", title: str = ""
) -> Figure:
    """What one rank sends, a bar for each name, and a tick where theory puts it. `unit` is "bytes" or "elements"."""
    _not_empty(measured=measured)
    if unit not in ("bytes", "elements"):
        raise ValueError(f"unit={unit!r}: choose 'bytes' or 'elements'")
    theory = theory or {}
    if theory.keys() - measured.keys():
        raise ValueError(f"theory for {sorted(theory.keys() - measured.keys())}, which measured does not have")
    largest = max([*measured.values(), *theory.values()])
    size, label = _bytes_unit(largest) if unit == "bytes" else (1, "elements")
    figure, ax = _axes()
    _head(figure, title)
    _rows(ax, list(measured), largest / size)
    first = next((name for name in measured if name in theory), None)
    for y, (name, value) in enumerate(measured.items()):
        ax.barh(y, value / size, height=0.5, color=COLOURS["comm"])
        number = _number(value / size) if unit == "bytes" else f"{value:,.0f}"
        _at_end(ax, max(value, theory.get(name, 0)) / size, y, f"{number} {label}")
        if name in theory:
            x, top = theory[name] / size, y - 0.36
            ax.vlines(x, top, y + 0.36, color=INK, linewidth=2, clip_on=False)
            if name == first:
                ax.annotate("theory", (x, top), (0, 2), textcoords="offset points", ha="center", va="bottom")
    return figure


# what -> how it looks. Compute stands in the upper lane of a rank, everything that waits for a wire in the lower one.
_COMPUTE = {
    "forward": {"facecolor": COLOURS["activations"]},
    "backward": {"facecolor": COLOURS["grads"]},
    "step": {"facecolor": COLOURS["optimizer"]},
    "wait": {"facecolor": "white", "hatch": "/////", "edgecolor": FAINT},
}
_WIRE = {
    "gather": {"facecolor": COLOURS["comm"]},
    "reduce": {"facecolor": "#EDB9A1"},  # communication, paler
    "copy": {"facecolor": COLOURS["host"]},
}
_PLAIN = {"facecolor": COLOURS["comm"]}  # a collective under its own name
_PADDING = {"facecolor": "white", "hatch": "/////", "edgecolor": FAINT, "linewidth": 0}


@_in_style
def lanes(events: Iterable, title: str = "") -> Figure:
    """Who did what when: a row for each rank, compute above communication, time runs right.

    An event has rank, unit, what, start and end (seconds). `what` is one of forward backward step wait (upper lane),
    gather reduce copy free or a collective's name (lower lane). `free` is a moment and is drawn as a tick.
    """
    events = list(events)
    _not_empty(events=events)
    ranks = sorted({event.rank for event in events})
    zero = min(event.start for event in events)
    figure, ax = _axes()
    boxes, seen = [], {}
    for event in events:
        y = ranks.index(event.rank) + (0 if event.what in _COMPUTE else 0.4)
        start, end = (event.start - zero) * 1e3, (event.end - zero) * 1e3
        if event.what == "free":
            ax.vlines(start, y - 0.2, y + 0.2, color=INK, linewidth=1.2)
            seen["free"] = Line2D([], [], color=INK, marker="|", markersize=9, linestyle="none")
            continue
        look = _COMPUTE.get(event.what) or _WIRE.get(event.what) or _PLAIN
        box = Rectangle((start, y - 0.19), end - start, 0.38, **({"edgecolor": "white", "linewidth": 0.6} | look))
        ax.add_patch(box)
        if event.what != "wait":
            boxes.append((event, box))
        seen["communication" if look is _PLAIN else event.what] = Patch(**look)
    ax.set_yticks([i + 0.2 for i in range(len(ranks))], [f"rank {rank}" for rank in ranks])
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    ax.set(xlim=(0, max(event.end - zero for event in events) * 1e3 or 1), xlabel="time, ms")
    ax.set_ylim(max(len(ranks), 2) - 0.3, -0.3)
    order = [*_COMPUTE, *_WIRE, "communication", "free"]
    _head(figure, title, {what: seen[what] for what in order if what in seen})
    figure.draw_without_rendering()
    labels = [(box, (event.unit or "") if event.what in _COMPUTE | _WIRE else event.what) for event, box in boxes]
    if not all(_write_in(ax, box, label) for box, label in labels):
        for text in list(ax.texts):
            text.remove()
        for box, label in labels:
            _write_in(ax, box, label.rpartition(".")[2])  # "3" for "blocks.3"
    return figure


@_in_style
def ring(world_size: int, step: int) -> Figure:
    """Step `step` of a ring all-reduce: what each rank holds before it, and the chunk that each rank sends in it.

    In every step rank r sends chunk (r − step − 1) mod N to rank r + 1. In steps 0 to N − 2 (reduce-scatter) the
    receiver adds, and rank r ends with the sum of chunk r; in steps N − 1 to 2N − 3 (all-gather) the receiver copies.
    Step 2N − 2 is the end, when nothing moves. A chunk is filled as far as it is summed. Drawn for 2 to 6 ranks.
    """
    n, last = world_size, 2 * (world_size - 1)
    if not 2 <= n <= 6:
        raise ValueError(f"world_size={n}: a ring is drawn for 2 to 6 ranks")
    if not 0 <= step <= last:
        raise ValueError(f"step={step}: an all-reduce among {n} ranks has steps 0 to {last - 1}, and {last} is its end")
    filled = f"filled 1/{n} for each rank in the sum"
    if step == last:
        title, legend = "The end: every rank holds every sum", filled
    else:
        title = "reduce-scatter: the receiver adds" if step < n - 1 else "all-gather: the receiver copies"
        title = f"Step {step}, {title}"
        legend = f"rank r sends chunk (r − {step + 1}) mod {n}\n{filled}"
    figure, ax = _axes()
    _head(figure, title)
    ax.set_axis_off()
    ax.set(xlim=(-3, 3), ylim=(-1.6, 1.55), aspect="equal")
    radius_x, radius_y, cell = 2.15, 1.12, min(0.26, 1.12 / n)
    ax.add_patch(Ellipse((0, 0), 2 * radius_x, 2 * radius_y, fill=False, edgecolor=COLOURS["other"]))
    ax.text(0, 0, legend, ha="center", va="center", linespacing=1.6)

    def place(turn):  # on the ellipse; rank r stands at turn r, rank 0 at the top, and it goes round like a clock
        angle = math.pi / 2 - 2 * math.pi * turn / n
        return radius_x * math.cos(angle), radius_y * math.sin(angle)

    def outside(point, x, y):  # of a rank's chunks and of its name, which stands on the outer side
        up, down = (0.5, 0.25) if y > -0.1 else (0.25, 0.5)
        return abs(point[0] - x) > n * cell / 2 + 0.1 or not -down < point[1] - y < up

    for rank in range(n):
        x, y = place(rank)
        moving = (rank - step - 1) % n if step < last else None
        _chunks(ax, x, y, cell, [_contributions(n, step, rank, chunk) for chunk in range(n)], moving)
        side, align = (1, "bottom") if y > -0.1 else (-1, "top")
        ax.text(x, y + side * (cell / 2 + 0.07), f"rank {rank}", ha="center", va=align, weight="bold")
        if moving is not None:
            way = [place(rank + i / 200) for i in range(201)]
            _send(ax, [p for p in way if outside(p, x, y) and outside(p, *place(rank + 1))], moving)
    return figure


def _contributions(n: int, step: int, rank: int, chunk: int) -> int:
    """How many ranks' gradients are summed in a rank's copy of a chunk before `step`."""
    hops = (rank - chunk - 1) % n  # a chunk starts at rank chunk + 1, and after n - 1 hops it is whole, at rank chunk
    if hops < step - (n - 1):
        return n
    return hops + 1 if hops <= step else 1


def _chunks(ax, x, y, cell, filled, moving):
    left, n = x - len(filled) * cell / 2, len(filled)
    for chunk, parts in enumerate(filled):
        corner = (left + chunk * cell, y - cell / 2)
        ax.add_patch(Rectangle(corner, cell, cell, facecolor="white", edgecolor=FAINT, linewidth=0.6))
        ax.add_patch(Rectangle(corner, cell, cell * parts / n, facecolor=COLOURS["grads"], linewidth=0))
        ax.text(corner[0] + cell / 2, y, str(chunk), ha="center", va="center", fontsize=min(SIZE, 40 * cell))
    for chunk in range(n):  # after all cells, so that no neighbour hides the frame
        if chunk == moving:
            frame = {"fill": False, "edgecolor": COLOURS["comm"], "linewidth": 2}
            ax.add_patch(Rectangle((left + chunk * cell, y - cell / 2), cell, cell, **frame))


def _send(ax, way, chunk):
    style = {"arrowstyle": "-|>", "mutation_scale": 12, "linewidth": 2, "capstyle": "butt"}
    ax.add_patch(FancyArrowPatch(path=Path(way), color=COLOURS["comm"], fill=False, **style))
    box = {"boxstyle": "square,pad=0.25", "facecolor": "white", "edgecolor": COLOURS["comm"], "linewidth": 1.2}
    ax.text(*way[len(way) // 2], str(chunk), ha="center", va="center", bbox=box)


@_in_style
def shards(layout: Layout, names: Sequence[str], title: str = "") -> Figure:
    """Who owns what of a flat buffer: a row for each rank, its S elements from left to right, padding hatched.

    `names` are those of the tensors, in the order of the layout. Behind a name stand the elements of the tensor that
    lie there, [from, to), and at the end of the row how many elements the rank owns. Drawn for up to 8 ranks.
    """
    n, S = layout.world_size, layout.S
    if n > 8:
        raise ValueError(f"world_size={n}: shards are drawn for up to 8 ranks")
    if len(names) != len(layout.shapes):
        raise ValueError(f"{len(names)} names for {len(layout.shapes)} tensors: give one for each")
    figure, ax = _axes()
    _head(figure, title, {"weights": Patch(color=COLOURS["params"]), "padding": Patch(**_PADDING)})
    _rows(ax, [f"rank {rank}" for rank in range(n)], S)
    boxes = []
    for rank in range(n):
        ax.add_patch(Rectangle((0, rank - 0.31), S, 0.62, **_PADDING))
        owned = 0
        for cut in cuts(layout, rank):
            start, size = cut.of_shard.start, cut.of_shard.stop - cut.of_shard.start
            look = {"facecolor": COLOURS["params"], "edgecolor": "white", "linewidth": 0.6}
            box = ax.add_patch(Rectangle((start, rank - 0.31), size, 0.62, **look))
            boxes.append((box, f"{names[cut.tensor]}\n[{cut.of_tensor.start}, {cut.of_tensor.stop})"))
            owned += size
        _at_end(ax, S, rank, f"{owned} of {S}")
    figure.draw_without_rendering()
    for box, label in boxes:
        _write_in(ax, box, label)
    return figure


# Not the colours of the kinds: a line may be anything.
_LINES = [
    (INK, "-"),
    ("#B3478A", (0, (5, 1.5))),
    ("#858585", (0, (1.5, 1))),
    ("#6B7A00", (0, (6, 1.5, 1, 1.5))),
    (INK, (0, (9, 2))),
    ("#B3478A", (0, (1, 2))),
]


@_in_style
def curve(
    xs: Sequence[float],
    series: Mapping[str, Sequence[float]],
    xlabel: str,
    ylabel: str,
    title: str = "",
    log_x: bool = False,
) -> Figure:
    """Lines over xs [n], name -> ys [n], each with its name at its right end. The vertical axis starts at 0.

    A series named after a kind of bytes has that kind's colour.
    """
    _not_empty(xs=xs, series=series)
    for name, ys in series.items():
        if len(ys) != len(xs):
            raise ValueError(f"{name!r} has {len(ys)} values for {len(xs)} points of the x axis: give one for each")
    figure, ax = _axes()
    _head(figure, title)
    ends = []
    for (name, ys), (colour, dashes) in zip(series.items(), cycle(_LINES), strict=False):
        colour = COLOURS.get(name, colour)
        ax.plot(xs, ys, color=colour, linestyle=dashes)
        at = {"xytext": (6, 0), "textcoords": "offset points", "va": "center"}
        ends.append(ax.annotate(name, (xs[-1], ys[-1]), color=colour, **at))
    highest = max(max(ys) for ys in series.values())
    ax.set(xlabel=xlabel, ylabel=ylabel, xlim=(min(xs), max(xs)) if len(set(xs)) > 1 else None)
    ax.set_ylim(0, highest * 1.08 or 1)
    if log_x:
        ax.set_xscale("log")
    elif all(x == int(x) for x in xs):
        ax.locator_params(axis="x", integer=True)  # there is no 2.5th rank
    figure.draw_without_rendering()
    wanted = [text.get_window_extent().y0 for text in ends]
    height = ends[0].get_window_extent().height
    for text, had, y in zip(ends, wanted, _spread(wanted, [height] * len(ends)), strict=True):
        text.set_position((6, (y - had) * 72 / figure.dpi))
    return figure


def _not_empty(**arguments):
    for name, value in arguments.items():
        if len(value) == 0:
            raise ValueError(f"{name} is empty: there is nothing to draw")


def _kinds(*rows: Mapping[str, float]) -> list[str]:
    """The kinds that occur, in the course's order."""
    present = {kind for by_kind in rows for kind, value in by_kind.items() if value}
    unknown = sorted({kind for by_kind in rows for kind in by_kind} - COLOURS.keys())
    if unknown:
        raise ValueError(f"unknown kind of bytes: {unknown}; choose from {', '.join(COLOURS)}")
    return [kind for kind in COLOURS if kind in present]


def _name(kind: str) -> str:
    return NAMES.get(kind, kind)


def _bytes_unit(largest: float) -> tuple[float, str]:
    """MB, unless one decimal of it would be noise (GB from 10 000 MB on) or nothing (kB below 0.1 MB)."""
    if largest >= 1e10:
        return 1e9, "GB"
    return (1e6, "MB") if largest >= 1e5 else (1e3, "kB")


def _number(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _at_end(ax, x: float, y: float, number: str):
    ax.annotate(number, (x, y), (5, 0), textcoords="offset points", va="center", weight="bold")


def _ink_on(colour) -> str:
    red, green, blue = to_rgb(colour)
    return INK if 0.3 * red + 0.59 * green + 0.11 * blue > 0.5 else "white"


def _axes():
    figure = Picture(layout="constrained")
    ax = figure.add_subplot()
    ax.tick_params(labelsize=SIZE)  # else how many ticks there are depends on the settings of the moment of drawing
    return figure, ax


def _head(figure, title: str, key: Mapping[str, Artist] | None = None):
    """The title and, below it, the key to what could not be named in the picture itself."""
    if key:
        columns = len(key) if len(key) <= 7 else (len(key) + 1) // 2  # more than 7 words need two lines
        place = {"loc": "outside upper left", "ncols": columns, "alignment": "left"}
        figure.legend(key.values(), key.keys(), title=title or None, title_fontsize=TITLE_SIZE, **place)
    elif title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=TITLE_SIZE)


def _rows(ax, names: list[str], longest: float):
    """Horizontal bars need no axis: their names stand left of them, their numbers right."""
    ax.set_yticks(range(len(names)), names)
    ax.set_xticks([])
    ax.tick_params(length=0)
    ax.spines[["left", "bottom"]].set_visible(False)
    ax.set_xlim(0, longest * 1.18 or 1)
    middle, half = (len(names) - 1) / 2, max(len(names), 3) / 2 + 0.15  # one or two bars do not get fatter
    ax.set_ylim(middle + half, middle - half)


def _pixels(ax, length: float) -> float:
    """A length along the horizontal axis, in pixels of the figure."""
    return ax.transData.transform((length, 0))[0] - ax.transData.transform((0, 0))[0]


def _spread(wanted: Sequence[float], sizes: Sequence[float], gap: float = 2, limit: float = math.inf) -> list[float]:
    """Starts for intervals of these sizes, near the wanted ones, without overlap and, if it can be, within `limit`."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    starts, free = list(wanted), -math.inf
    for i in order:
        starts[i] = max(wanted[i], free)
        free = starts[i] + sizes[i] + gap
    for i in reversed(order):
        starts[i] = min(starts[i], limit - sizes[i])
        limit = starts[i] - gap
    return starts


def _name_kinds(ax, starts: list[tuple[float, str]]):
    """Words above the first bar, each where its segment begins, or as near to it as the words before allow."""
    words = []
    for start, kind in starts:
        square = ax.annotate("■", (start, -0.37), (0, 2), textcoords="offset points", color=COLOURS[kind], va="bottom")
        name = ax.annotate(_name(kind), (1, 0), xycoords=square, va="bottom", xytext=(2, 0), textcoords="offset points")
        words.append((start, square, name))
    widths = [name.get_window_extent().x1 - square.get_window_extent().x0 for _, square, name in words]
    wanted = [_pixels(ax, start) for start, _, _ in words]
    right = ax.get_window_extent().width
    for (_, square, _), had, x in zip(words, wanted, _spread(wanted, widths, 8, right), strict=True):
        square.set_position(((x - had) * 72 / ax.figure.dpi, 2))


def _write_in(ax, box, label: str) -> bool:
    """Writes into a box what fits into it."""
    x, y = box.get_x() + box.get_width() / 2, box.get_y() + box.get_height() / 2
    text = ax.text(x, y, label, ha="center", va="center", fontsize=7, color=_ink_on(box.get_facecolor()[:3]))
    fits = text.get_window_extent().width + 4 <= box.get_window_extent().width
    if not fits:
        text.remove()
    return fits


def _room_for(text, ax, moments, low, high) -> tuple[float, float] | None:
    """The middle of the longest stretch of a band (steps from low to high) that the text fits into, or None."""
    box = text.get_window_extent()
    half = 0.6 * box.height * np.diff(ax.get_ylim())[0] / ax.get_window_extent().height
    longest, best = 0.0, None
    for i in range(0, len(moments) - 1, max(1, len(moments) // 200)):
        middle = (low[i] + high[i]) / 2
        outside = np.flatnonzero((low > middle - half) | (high < middle + half))
        after = outside.searchsorted(i)
        if after < len(outside) and outside[after] == i:
            continue
        start = moments[outside[after - 1] + 1] if after else moments[0]
        end = moments[outside[after]] if after < len(outside) else moments[-1]
        if end - start > longest:
            longest, best = end - start, ((start + end) / 2, middle)
    return best if _pixels(ax, longest) >= box.width + 4 else None


# --- the same step in two engines -------------------------------------------------------------------


@_in_style
def memory_phases(
    phases: Sequence[str],
    runs: Mapping[str, tuple[Sequence[float], Mapping[str, Sequence[float]], Sequence[float]]],
    title: str = "",
) -> Figure:
    """Bytes held during one step of several runs, on the same axes: the last run stacked by kind, the total of each
    earlier one as a line. The peaks are marked.

    phases: what happens one after the other, ("forward", "backward", "step")
    runs: name -> (times [n], kind -> bytes [n], ends [phases]), in seconds as Memory.curve() counts them; `ends` says
    when each phase was over

    No two runs take equally long, so every phase of every run is stretched to the same width.
    """
    _not_empty(phases=phases, runs=runs)
    for name, (times, by_kind, ends) in runs.items():
        _not_empty(times=times, by_kind=by_kind)
        for kind, values in by_kind.items():
            if len(values) != len(times):
                raise ValueError(
                    f"{kind!r} of {name!r} has {len(values)} values for {len(times)} times: give one for each"
                )
        if len(ends) != len(phases):
            raise ValueError(f"{name!r} has {len(ends)} ends for {len(phases)} phases: give one for each")
    totals = {name: np.sum(list(by_kind.values()), axis=0) for name, (_, by_kind, _) in runs.items()}
    highest = max(total.max() for total in totals.values())
    size, unit = _bytes_unit(highest)
    last, (_, by_kind, _) = list(runs.items())[-1]
    borders = np.arange(len(phases) + 1)
    figure, ax = _axes()
    ax.set(xlim=(0, borders[-1]), ylim=(0, highest / size * 1.15 or 1), ylabel=unit)
    ax.locator_params(axis="y", nbins=6)
    ax.set_xticks((borders[1:] + borders[:-1]) / 2, phases)
    ax.tick_params(axis="x", length=0)
    for border in borders[1:-1]:
        ax.axvline(border, color=FAINT, linewidth=0.8)
    at = {name: np.interp(times, [0, *ends], borders) for name, (times, _, ends) in runs.items()}
    kinds = _kinds({kind: max(values) for kind, values in by_kind.items()})
    kinds.sort(key=lambda kind: np.abs(np.diff(by_kind[kind])).sum())  # what changes least lies lowest
    low = np.zeros(len(at[last]))
    for kind in kinds:
        high = low + np.asarray(by_kind[kind]) / size
        ax.fill_between(at[last], low, high, step="post", color=COLOURS[kind], linewidth=0, zorder=0)
        low = high
    peaks = []
    for i, name in enumerate(runs):
        colour = INK if name == last else _LINES[1 + i % 3][0]
        if name != last:
            ax.plot(at[name], totals[name] / size, color=colour, linewidth=1.2, drawstyle="steps-post")
        x, y = at[name][totals[name].argmax()], totals[name].max() / size
        ax.plot(x, y, "o", color=colour, markersize=4, clip_on=False)
        offset, side = (-5, "right") if x > borders[-1] / 2 else (5, "left")
        above = -17 if name == last and len(runs) > 1 else 5  # in its own colours, where no other's line runs
        place = {"xytext": (offset, above), "textcoords": "offset points", "ha": side, "weight": "bold", "color": colour}
        behind = {"boxstyle": "square,pad=0.1", "facecolor": "white", "alpha": 0.8, "linewidth": 0}
        peaks.append(ax.annotate(f"{name}, peak {_number(y)} {unit}", (x, y), bbox=behind, **place))
    _head(figure, title, {_name(kind): Patch(color=COLOURS[kind]) for kind in kinds})
    figure.draw_without_rendering()
    wanted = [text.get_window_extent().y0 for text in peaks]
    heights = [text.get_window_extent().height for text in peaks]
    for text, had, y in zip(peaks, wanted, _spread(wanted, heights), strict=True):
        text.set_position((text.xyann[0], text.xyann[1] + (y - had) * 72 / figure.dpi))
    return figure


# --- what comes after what --------------------------------------------------------------------------


@_in_style
def score(events: Sequence[tuple[str, str]], title: str = "") -> Figure:
    """The order of events as sheet music: a row for each unit, every note equally long, time runs right.

    events: (what, unit) as they happened. `what` is one of gather forward backward reduce, which are notes, or free. A unit
    is underlined from gather to free: that is where its full weights have memory. The first such line is named.
    """
    _not_empty(events=events)
    looks = {what: (_COMPUTE | _WIRE).get(what) for what in ("gather", "forward", "backward", "reduce")}
    unknown = sorted({what for what, _ in events} - looks.keys() - {"free"})
    if unknown:
        raise ValueError(f"unknown events: {unknown}; choose from {', '.join(looks)}, free")
    units = list(dict.fromkeys(unit for _, unit in events))
    figure, ax = _axes()
    now, since, lines = 0, {}, []

    def underline(y: int, start: int):
        look = {"facecolor": COLOURS["params"], "edgecolor": "white", "linewidth": 0.6}  # a gap where it was freed
        ax.add_patch(Rectangle((start, y + 0.22), now - start, 0.13, **look))
        lines.append((start, y + 0.35))

    for what, unit in events:
        y = units.index(unit)
        if what == "free":
            if y in since:
                underline(y, since.pop(y))
            continue
        if what == "gather":
            since.setdefault(y, now)
        ax.add_patch(Rectangle((now, y - 0.22), 1, 0.44, **({"edgecolor": "white", "linewidth": 0.6} | looks[what])))
        now += 1
    for y, start in since.items():
        underline(y, start)
    if lines:
        look = {"textcoords": "offset points", "va": "top", "color": COLOURS["params"]}
        ax.annotate("full weights in memory", min(lines), (0, -2), **look)
    for y in range(len(units)):
        ax.axhline(y, color=COLOURS["other"], linewidth=0.8, zorder=0)
    ax.set_yticks(range(len(units)), units)
    ax.set_xticks([])
    ax.tick_params(length=0)
    ax.spines[["left", "bottom"]].set_visible(False)
    ax.set(xlim=(0, now or 1), xlabel="one event after the other; not to scale in time")
    ax.set_ylim(max(len(units), 3) - 0.4, -0.4)
    key = {what: Patch(**look) for what, look in looks.items() if any(what == each for each, _ in events)}
    _head(figure, title, key)
    return figure


# --- what was computed, and what was found ----------------------------------------------------------


@_in_style
def predicted(
    xs: Sequence[float], lines: Mapping[str, Sequence[float]], at: Sequence[float], dots: Mapping[str, Sequence[float]],
    xlabel: str, ylabel: str, title: str = "", log_x: bool = False,
) -> Figure:  # fmt: skip
    """A model beside measurements: the lines of curve(), name -> ys over xs [n], and a dot wherever it was measured. A logarithmic
    axis has its numbers there.

    dots: name -> ys over at [m]; the names are those of lines
    """
    if dots.keys() - lines.keys():
        raise ValueError(f"measured {sorted(dots.keys() - lines.keys())}, which no line predicts")
    for name, ys in dots.items():
        if len(ys) != len(at):
            raise ValueError(f"{name!r} has {len(ys)} measurements at {len(at)} points: give one for each")
    figure = curve(xs, lines, xlabel, ylabel, title, log_x)
    ax = figure.axes[0]
    for name, line in zip(lines, list(ax.lines), strict=True):
        if name in dots:
            ax.plot(at, dots[name], "o", color=line.get_color(), markersize=5, markeredgecolor="white", clip_on=False)
    if log_x:  # between powers of ten there is no other number to read
        ax.set_xticks(at, [f"{x:.2g}" for x in at])
        ax.minorticks_off()
    highest = max((y for ys in dots.values() for y in ys), default=0) * 1.08
    ax.set_ylim(0, max(highest, ax.get_ylim()[1]))
    for text in ax.texts:
        text.set_position((6, 0))
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in ax.texts]
    apart = _spread([box.y0 for box in boxes], [box.height for box in boxes])
    for text, box, y in zip(ax.texts, boxes, apart, strict=True):
        text.set_position((6, (y - box.y0) * 72 / figure.dpi))
    return figure
