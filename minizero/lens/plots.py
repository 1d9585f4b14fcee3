"""The pictures of the course, in one style: the same colour always means the same thing, and values stand where they belong.

Every function returns a Matplotlib Figure of 6 × 3.5 inches. It neither opens a window nor changes Matplotlib's settings,
and a notebook shows it once, as the value of its cell.
"""

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import wraps

import matplotlib.style
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Ellipse, FancyArrowPatch, Patch, Rectangle

from minizero.lens import theory

# Close to Okabe and Ito's colours, shifted until their lightness differs too: from 26 (host) to 88 (other), in steps of at
# least 8 of 100. So they stay apart in grey and for colour-blind readers.
COLOURS = {
    "params": "#0067A8",
    "grads": "#E69F00",
    "optimizer": "#2C9C7C",
    "activations": "#9CCDEE",
    "comm": "#CC5420",
    "host": "#5A2A6B",
    "other": "#DDDDDD",
}
NAMES = {"params": "weights", "grads": "gradients", "comm": "communication"}  # the other kinds are called what they are
INK, FAINT = "#222222", "#999999"

STYLE = {
    "figure.figsize": (6, 3.5),
    "figure.dpi": 100,
    "font.family": "DejaVu Sans",  # comes with Matplotlib, so the pictures are the same everywhere
    "font.size": 8.5,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.titlepad": 8,
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
            figure = draw(*args, **kwargs)
            figure.draw_without_rendering()  # ticks are made at the first drawing, from the settings of that moment
            return figure

    return drawn


@_in_style
def memory_bars(rows: Mapping[str, Mapping[str, float]], title: str = "") -> Figure:
    """A bar for each name, made of bytes by kind, its total at the end: `memory_bars({"DDP": m.peak, "ZeRO-1": …})`."""
    _not_empty(rows=rows)
    kinds = _kinds(*rows.values())
    totals = [sum(by_kind.values()) for by_kind in rows.values()]
    size, unit = _bytes_unit(max(totals))
    figure, ax = _axes(title)
    _rows(ax, list(rows), max(totals) / size)
    segments = []
    for y, by_kind in enumerate(rows.values()):
        start = 0.0
        for kind in kinds:
            width = by_kind.get(kind, 0) / size
            ax.barh(y, width, left=start, height=0.62, color=COLOURS[kind], edgecolor="white", linewidth=0.8)
            segments.append((y, start, width, kind))
            start += width
        ax.annotate(f"{start:.1f} {unit}", (start, y), (4, 0), textcoords="offset points", va="center", weight="bold")
    figure.draw_without_rendering()
    for y, start, width, kind in segments:
        text = ax.text(start + width / 2, y, f"{width:.1f}", ha="center", va="center", color=_ink_on(COLOURS[kind]))
        if text.get_window_extent().width + 6 > _pixels(ax, width, 0)[0] - _pixels(ax, 0, 0)[0]:
            text.remove()
    _name_kinds(ax, [(start, kind) for y, start, _, kind in segments if y == 0])
    return figure


def memory_ladder(numel: float = 7.5e9, world_size: int = 64) -> Figure:
    """What one rank holds at each ZeRO stage, by arithmetic: figure 1 of Rajbhandari et al. 2020."""
    rows = {name: theory.memory(stage, numel, world_size) for stage, name in theory.STAGES.items()}
    return memory_bars(rows, f"Model states on each of {world_size} ranks, {numel / 1e9:g} B parameters, Adam in bf16")


@_in_style
def memory_curve(times: Sequence[float], by_kind: Mapping[str, Sequence[float]], title: str = "") -> Figure:
    """Bytes held over time, stacked by kind: times [n] in seconds, by_kind kind -> bytes [n]. The peak is marked."""
    _not_empty(times=times, by_kind=by_kind)
    for kind, values in by_kind.items():
        if len(values) != len(times):
            raise ValueError(f"{kind!r} has {len(values)} values for {len(times)} times: give one for each")
    kinds = _kinds({kind: max(values) for kind, values in by_kind.items()})
    totals = [sum(values) for values in zip(*by_kind.values(), strict=True)]
    size, unit = _bytes_unit(max(totals))
    figure, ax = _axes(title)
    moments = [(t - times[0]) * 1e3 for t in times]
    edges = [[0.0] * len(times)]  # the bands' borders, from the bottom up
    for kind in kinds:
        edges.append([below + value / size for below, value in zip(edges[-1], by_kind[kind], strict=True)])
        # What was counted at one moment stands until the next is counted: steps, not slopes.
        ax.fill_between(moments, edges[-2], edges[-1], step="post", color=COLOURS[kind], linewidth=0)
    ax.set(xlabel="time, ms", ylabel=unit, xlim=(0, moments[-1] or 1), ylim=(0, max(totals) / size * 1.15))
    peak = totals.index(max(totals))
    ax.plot(moments[peak], totals[peak] / size, "o", color=INK, markersize=4, clip_on=False)
    late = moments[peak] > moments[-1] / 2
    ax.annotate(
        f"peak {totals[peak] / size:.1f} {unit}",
        (moments[peak], totals[peak] / size),
        (-5 if late else 5, 5),
        textcoords="offset points",
        ha="right" if late else "left",
        weight="bold",
    )
    figure.draw_without_rendering()
    unnamed = []
    for kind, low, high in zip(kinds, edges, edges[1:], strict=False):
        text = ax.text(0, 0, _name(kind), ha="center", va="center", color=_ink_on(COLOURS[kind]))
        place = _room_for(text, ax, moments, low, high)
        if place:
            text.set_position(place)
        else:
            text.remove()
            unnamed.append(kind)
    _key(figure, {_name(kind): Patch(color=COLOURS[kind]) for kind in unnamed})
    return figure


@_in_style
def traffic_bars(
    measured: Mapping[str, float], theory: Mapping[str, float] | None = None, unit: str = "bytes", title: str = ""
) -> Figure:
    """What one rank sends, a bar for each name, and a tick where arithmetic puts it. `unit` is "bytes" or "elements"."""
    _not_empty(measured=measured)
    if unit not in ("bytes", "elements"):
        raise ValueError(f"unit={unit!r}: choose 'bytes' or 'elements'")
    theory = theory or {}
    if theory.keys() - measured.keys():
        raise ValueError(f"theory for {sorted(theory.keys() - measured.keys())}, which measured does not have")
    largest = max([*measured.values(), *theory.values()])
    size, label = _bytes_unit(largest) if unit == "bytes" else (1, "elements")
    figure, ax = _axes(title)
    _rows(ax, list(measured), largest / size)
    for y, (name, value) in enumerate(measured.items()):
        ax.barh(y, value / size, height=0.5, color=COLOURS["comm"])
        number = f"{value / size:.1f} {label}" if unit == "bytes" else f"{value:,.0f} {label}"
        end = max(value, theory.get(name, 0)) / size
        ax.annotate(number, (end, y), (6, 0), textcoords="offset points", va="center", weight="bold")
        if name in theory:
            ax.vlines(theory[name] / size, y - 0.36, y + 0.36, color=INK, linewidth=2, clip_on=False)
    for y, name in enumerate(measured):
        if name in theory:
            ax.annotate(
                "theory", (theory[name] / size, y - 0.36), (0, 2), textcoords="offset points", ha="center", va="bottom"
            )
            break
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


@_in_style
def lanes(events: Iterable, title: str = "") -> Figure:
    """Who did what when: a row for each rank, compute above communication, time runs right.

    An event has rank, unit, what, start and end (seconds). `what` is one of forward backward step wait (upper lane), gather
    reduce copy free or a collective's name (lower lane). `free` is a moment and is drawn as a tick.
    """
    events = list(events)
    _not_empty(events=events)
    ranks = sorted({event.rank for event in events})
    zero = min(event.start for event in events)
    figure, ax = _axes(title)
    boxes, seen = [], {}
    for event in events:
        y = ranks.index(event.rank) + (0 if event.what in _COMPUTE else 0.4)
        start, end = (event.start - zero) * 1e3, (event.end - zero) * 1e3
        if event.what == "free":
            ax.vlines(start, y - 0.2, y + 0.2, color=INK, linewidth=1.2)
            continue
        look = _COMPUTE.get(event.what) or _WIRE.get(event.what) or _PLAIN
        box = Rectangle((start, y - 0.19), end - start, 0.38, **({"edgecolor": "white", "linewidth": 0.6} | look))
        ax.add_patch(box)
        boxes.append((event, box))
        seen["communication" if look is _PLAIN else event.what] = Patch(**look)
    ax.set_yticks([i + 0.2 for i in range(len(ranks))], [f"rank {rank}" for rank in ranks])
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    ax.set(xlim=(0, max(event.end - zero for event in events) * 1e3 or 1), xlabel="time, ms")
    ax.set_ylim(max(len(ranks), 3) - 0.3, -0.3)
    order = [*_COMPUTE, *_WIRE, "communication"]
    _key(figure, {what: seen[what] for what in order if what in seen})
    figure.draw_without_rendering()
    for event, box in boxes:
        full = str(event.what if event.what not in _COMPUTE | _WIRE else event.unit or "")
        for label in (full, full.rpartition(".")[2]):  # "blocks.3", or where that is too long, "3"
            x, y = box.get_x() + box.get_width() / 2, box.get_y() + box.get_height() / 2
            text = ax.text(x, y, label, ha="center", va="center", fontsize=7, color=_ink_on(box.get_facecolor()))
            if text.get_window_extent().width + 4 <= box.get_window_extent().width:
                break
            text.remove()
    return figure


@_in_style
def ring(world_size: int, step: int) -> Figure:
    """Step `step` of a ring all-reduce: what each rank holds before it, and the chunk that each rank sends in it.

    In every step rank r sends chunk (r − step − 1) mod N to rank r + 1. In steps 0 to N − 2 (reduce-scatter) the receiver
    adds, and rank r ends with the sum of chunk r; in steps N − 1 to 2N − 3 (all-gather) the receiver copies. Step 2N − 2 is
    the end, when nothing moves. A chunk is filled as far as it is summed. Drawn for 2 to 8 ranks.
    """
    n, last = world_size, 2 * (world_size - 1)
    if not 2 <= n <= 8:
        raise ValueError(f"world_size={n}: a ring is drawn for 2 to 8 ranks")
    if not 0 <= step <= last:
        raise ValueError(f"step={step}: an all-reduce among {n} ranks has steps 0 to {last - 1}, and {last} is its end")
    if step == last:
        title = "The end: every rank holds every sum"
    elif step < n - 1:
        title = f"Step {step} · reduce-scatter: the receiver adds the chunk to its own"
    else:
        title = f"Step {step} · all-gather: the receiver keeps the finished chunk"
    figure, ax = _axes(title)
    ax.set_axis_off()
    ax.set(xlim=(-3, 3), ylim=(-1.6, 1.55), aspect="equal")
    radius_x, radius_y, cell = 2.15, 1.12, min(0.26, 1.12 / n)

    def place(turn):  # on an ellipse; turn 0 is at the top, and it goes round like a clock
        angle = math.pi / 2 - 2 * math.pi * turn / n
        return radius_x * math.cos(angle), radius_y * math.sin(angle)

    ax.add_patch(Ellipse((0, 0), 2 * radius_x, 2 * radius_y, fill=False, edgecolor=COLOURS["other"], linewidth=1))
    for rank in range(n):
        x, y = place(rank)
        moving = (rank - step - 1) % n if step < last else None
        _chunks(ax, x, y, cell, [_contributions(n, step, rank, chunk) for chunk in range(n)], moving)
        ax.text(x, y + cell / 2 + 0.07, f"rank {rank}", ha="center", va="bottom", weight="bold")
        if moving is not None:
            _send(ax, place, rank, moving)
    return figure
