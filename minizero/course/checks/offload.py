"""The checks of exercises/06_offload.ipynb.

There may be no GPU, so answers run on a `_Machine`: it knows for each tensor on which side it is, device or host, and
refuses an operation that mixes the sides. What crosses does so over its link, which moves the bytes in wait(), as late as
can be; who reads or writes in between what is under way is stopped at that line.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.optim import AdamW
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode

import minizero as mz
from minizero.course import Finding, Question, bug, exercise, number
from minizero.course.expect import Expect, Outcome, differ, shorten, show

_BF16, _FP32 = torch.bfloat16, torch.float32
_MADE = "what was made on the device"

# --- a device, its host, and what is under way between them ---------------------------------------------------------


class StillUnderWay(RuntimeError):
    """What a copy or an update is busy with was read or written."""


class WrongSide(RuntimeError):
    """Something is on the device that belongs on the host, or the other way round."""


class _Machine(TorchDispatchMode):
    """Two sides in one process. Inside `with`, each operation is looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.link, self.host = SimpleNamespace(copy=self._copy), SimpleNamespace(start=self._start)
        self.events: list[str] = []  # "down grad_S", "there down grad_S", and what a check notes
        self.moves: list[tuple] = []  # (down or up, what, elements, dtype, through what) of each copy
        self.under_way: list[_Later] = []
        self.made: list[tuple[int, str]] = []  # memory that is new on the device: (elements, dtype)
        self.running = False  # inside something that was started beside
        self._on_device: dict[int, UntypedStorage] = {}  # kept, so that nothing else takes the place of one
        self._named: list[tuple[str, Tensor]] = []
        self._aside = False

    def device(self, name: str, tensor: Tensor) -> Tensor:
        """From now on it is on the device, under this name."""
        self._put_on_device(tensor)
        self._named.append((name, tensor))
        return tensor

    def on_host(self, name: str, tensor: Tensor) -> Tensor:
        self._named.append((name, tensor))
        return tensor

    def side(self, tensor: Tensor) -> str:
        return "device" if id(tensor.untyped_storage()) in self._on_device else "host"

    def name(self, tensor: Tensor) -> str:
        whole = next((name for name, known in self._named if _range(known) == _range(tensor)), "")
        return whole or next((f"part of {name}" for name, known in self._named if _overlap(known, tensor)), "")

    def names(self, way: str) -> list[str]:
        """What is under way: "down", "up", or "beside" for what was started on the host."""
        return [each.what for each in self.under_way if each.way == way]

    def aside(self, function: Callable, *args: Any) -> Any:
        """The check's own doing, which nobody looks at."""
        before, self._aside = self._aside, True
        try:
            return function(*args)
        finally:
            self._aside = before

    # --- each operation -----------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._aside:
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        like = name.endswith("_like") or name.startswith("new_")  # makes memory, and reads nothing
        schema = func._schema.arguments
        given = [*zip(schema, args, strict=False), *((arg, kwargs[arg.name]) for arg in schema if arg.name in kwargs)]
        written = [tensor for arg, value in given if arg.alias_info and arg.alias_info.is_write for tensor in _tensors(value)]
        read = [tensor for arg, value in given if not (arg.alias_info and arg.alias_info.is_write) for tensor in _tensors(value)]
        if not func.is_view and not like:
            crosses = name == "_to_copy" and kwargs.get("device") is not None
            self.look(read, written, crosses)
        result = func(*args, **kwargs)
        on_device = any(self.side(tensor) == "device" for tensor in read + written)
        if on_device and not (like and kwargs.get("device") is not None):
            for tensor in _tensors(result):
                if self.side(tensor) == "host":
                    self._put_on_device(tensor)
                    self.made += [(tensor.numel(), _dtype(tensor))] * (tensor.dim() > 0)
        return result

    def look(self, read: Sequence[Tensor], written: Sequence[Tensor], crosses: bool = False) -> None:
        sides = {self.side(tensor) for tensor in (*read, *written) if tensor.dim()}
        if len(sides) > 1 or (crosses and "device" in sides):
            raise WrongSide("Expected all tensors to be on the same device, but found at least two devices, device and host")
        for tensor in read:
            for each in self.under_way:
                each.refuse_read(tensor)
        for tensor in written:
            for each in self.under_way:
                each.refuse_write(tensor)

    def _put_on_device(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._on_device[id(storage)] = storage

    # --- what answers are given ---------------------------------------------------------------------------

    def _copy(self, to: Tensor, source: Tensor) -> _Later:
        if not isinstance(to, Tensor) or not isinstance(source, Tensor):
            raise TypeError(f"copy(to, source) takes two tensors, not {type(to).__name__} and {type(source).__name__}")
        if to.dtype != source.dtype:
            raise ValueError(f"the link moves bytes: both tensors have one dtype, and these have {_dtype(to)} and {_dtype(source)}")
        if to.shape != source.shape:
            raise ValueError(f"the link moves bytes: both tensors have one shape, and these have {tuple(to.shape)} and {tuple(source.shape)}")
        if self.side(to) == self.side(source):
            raise WrongSide(f"link.copy goes from one side to the other, and both tensors are on the {self.side(to)}")
        self.look([source], [])
        self.look([], [to])
        way = "up" if self.side(to) == "device" else "down"
        what = self.name(source if way == "down" else to) or (_MADE if way == "down" else "a new tensor of the device")
        through = self.name(to if way == "down" else source)
        # What to call the other end, in a finding.
        into, out_of = (through or f"the host's copy of {what}", what) if way == "down" else (what, through or f"what is sent to {what}")
        later = _Later(self, way, what, lambda: self.aside(to.copy_, source), into=(into, to), out_of=[(out_of, source)])
        self.aside(to.fill_, torch.nan)
        self.moves.append((way, what, source.numel(), _dtype(source), through))
        return later

    def _start(self, function: Callable, *args: Any) -> _Later:
        if not callable(function):
            raise TypeError("start(function, *args) takes the function and its arguments, without calling it")
        used = [(self.name(tensor) or "a tensor", tensor) for tensor in _tensors(args)]

        def run() -> None:
            self.running = True
            try:
                function(*args)
            finally:
                self.running = False

        return _Later(self, "beside", "the update", run, uses=used)


class _Later:
    """Something under way, which happens in wait()."""

    def __init__(self, machine: _Machine, way: str, what: str, todo: Callable[[], Any], into: tuple | None = None, out_of: Sequence[tuple] = (),
                 uses: Sequence[tuple] = ()):  # fmt: skip
        self._machine, self.way, self.what, self._todo = machine, way, what, todo
        self._into, self._out_of, self._uses = into, out_of, uses
        machine.under_way.append(self)
        machine.events.append(f"{way} {what}")

    def wait(self) -> None:
        if self in self._machine.under_way:
            self._machine.under_way.remove(self)
            self._todo()
            self._machine.events.append(f"there {self.way} {self.what}")

    def refuse_read(self, tensor: Tensor) -> None:
        if self._into and _overlap(self._into[1], tensor):
            raise StillUnderWay(f"{self._into[0]} is read, but the copy into it has not been waited for")
        self._refuse_used(tensor, "read")

    def refuse_write(self, tensor: Tensor) -> None:
        if self._into and _overlap(self._into[1], tensor):
            raise StillUnderWay(f"{self._into[0]} is overwritten, but the copy into it has not been waited for")
        for name, source in self._out_of:
            if _overlap(source, tensor):
                raise StillUnderWay(f"{name} is overwritten while it is still on its way: its copy has not been waited for")
        self._refuse_used(tensor, "overwritten")

    def _refuse_used(self, tensor: Tensor, how: str) -> None:
        for name, used in self._uses:
            if _overlap(used, tensor):
                raise StillUnderWay(f"{name} is {how} while the update that was started is at work on it")


def _range(tensor: Tensor) -> tuple[int, int]:
    """First and last byte."""
    length = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1 if tensor.numel() else 0
    return tensor.data_ptr(), tensor.data_ptr() + length * tensor.element_size()


def _overlap(a: Tensor, b: Tensor) -> bool:
    (a_start, a_stop), (b_start, b_stop) = _range(a), _range(b)
    return max(a_start, b_start) < min(a_stop, b_stop)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = tuple(value.values())
    return [tensor for each in value for tensor in _tensors(each)] if isinstance(value, (list, tuple)) else []


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


_CAUSES = {  # what torch or the machine says -> what is wrong
    "all tensors to be on the same device": "what goes from one side to the other goes over the link: link.copy(to, source), and wait() for it",
    "both tensors are on the device": "empty_like, clone and their like make memory where their example lies: torch.empty(n, dtype=…) is on the host",
    "both tensors are on the host": "the link's other end is on the device: copy into weights_S itself",
    "have one dtype": "the link neither rounds nor widens: convert on the host, so that what crosses has the device's dtype",
    "is read, but the copy": "copy() only begins to copy: wait() stands before whoever reads what arrives",
    "is overwritten, but the copy": "copy() only begins to copy: until its wait() the memory belongs to the copy",
    "is overwritten while it is still on its way": "copy() only begins to copy: until its wait() the source has to stay as it is",
    "the update that was started": "what was started beside may read and write at any time until its wait(): end it first",
    "has no attribute 'wait'": "copy() and start() return an object, and it is that which has wait()",
    "pin_memory": "memory is pinned for a GPU: here plain torch.empty will do",
    "gradient on the device": "the update belongs to the host, and so its gradient has to come down first, over the link",
    "weights of the device": "the update belongs to the host: it changes the fp32 master there, and the device gets the result",
}  # fmt: skip


def _run(expect: Expect, program: Callable, *args: Any, causes: Mapping[str, str]) -> Outcome:
    """Run it in one process. What the machine refuses has a rule of its own; `causes` come before the general ones."""
    causes = {**causes, **{piece: text for piece, text in _CAUSES.items() if piece not in causes}}
    try:
        return expect.run(program, 1, *args, causes=causes)[0]
    except Finding as finding:
        kind, _, refused = finding.got.partition(": ")
        if kind in _RULES:
            finding.rule, finding.got = _RULES[kind], refused
        raise


_RULES = {
    "StillUnderWay": "what is under way is left alone until its wait()",
    "WrongSide": "a tensor is on one side, and only the link goes across",
}


def _on_host(machine: _Machine, master_S: Tensor, grad_S: Tensor) -> None:
    """What an update was given lies on the host."""
    if not isinstance(master_S, Tensor) or not isinstance(grad_S, Tensor):
        raise TypeError(f"update takes tensors, and was given {type(master_S).__name__} and {type(grad_S).__name__}")
    if machine.side(master_S) == "device":
        raise WrongSide("update was given weights of the device in place of the master")
    if machine.side(grad_S) == "device":
        raise WrongSide("update was given a gradient on the device")
    if master_S.dtype != _FP32:
        raise ValueError(f"update was given a master in {_dtype(master_S)}: it is fp32")
    if master_S.shape != grad_S.shape:
        raise ValueError(f"update was given a gradient of shape {tuple(grad_S.shape)} for a master of shape {tuple(master_S.shape)}")


def _check_alone(expect: Expect, outcome: Outcome) -> None:
    """Nothing is sent to other ranks."""
    expect.that(not outcome.ops, "each rank offloads its own shard: nothing is sent to others", "no collective", show(outcome.count))


def _check_moves(moves: Sequence[tuple], want: Sequence[tuple], rule: str, causes: Mapping[str, str]) -> None:
    """The copies, each (way, what, elements, dtype), in any order.

    causes: "dtype", "made" (on the device, and sent), "no down", "no up", "more down", "more up", "other" -> the mistake
    """
    got = [move[:4] for move in moves]
    extra, missing = Counter(got) - Counter(want), Counter(want) - Counter(got)
    if not extra and not missing:
        return
    cause = ""
    if {move[:3] for move in extra} & {move[:3] for move in missing} or any(move[3] not in {each[3] for each in want} for move in extra):
        cause = causes.get("dtype", "")
    elif any(move[1] == _MADE for move in extra):
        cause = causes.get("made", "")
    for way in ("down", "up"):
        more = sum(move[0] == way for move in extra.elements()) - sum(move[0] == way for move in missing.elements())
        cause = cause or (causes.get(f"more {way}", "") if more > 0 else causes.get(f"no {way}", "") if more < 0 else "")
    cause = cause or causes.get("other", "")
    raise Finding(rule, _told(want), _told(got), _bytes_told(got, want), cause)


def _told(moves: Sequence[tuple]) -> str:
    counted = Counter(f"{what} {way}, {show(numel)} × {dtype}" for way, what, numel, dtype in moves)
    return shorten("; ".join(f"{count} × {text}" if count > 1 else text for text, count in counted.items())) or "no copy"


def _bytes_told(got: Sequence[tuple], want: Sequence[tuple]) -> str:
    crossed, due = (sum(numel * getattr(torch, dtype).itemsize for _, _, numel, dtype in moves) for moves in (got, want))
    return f"{show(crossed)} bytes cross the link, where {show(due)} would do" if crossed > due else ""


def _mistakes(want: Any, wrong: Mapping[str, Any], tol: float = 0) -> dict[str, Any]:
    """Those that lead to something else in this case."""
    return {text: value for text, value in wrong.items() if differ(value, want, "", tol)}


class _Suspects:
    """Mistakes, each with all the values that it leads to; those that would have shown earlier are out."""

    def __init__(self, histories: Mapping[str, Sequence]):
        self._histories = dict(histories)

    def at(self, want: Any, find: Callable[[Sequence], Any], tol: float = 0) -> dict[str, Any]:
        """Those that show here, where the value is `find(history)`."""
        shows = _mistakes(want, {text: find(history) for text, history in self._histories.items()}, tol)
        self._histories = {text: history for text, history in self._histories.items() if text not in shows}
        return shows


# --- 1. Adam on the host ---------------------------------------------------------------------------------------------

_SETTINGS = {"lr": 0.125, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}
_DEFAULTS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}


@exercise(
    "offload.cpu_adam",
    call="CpuAdam(lr, betas, eps, weight_decay)",
    hints=[
        "What does Adam remember of a unit from step to step? Which of it would be wrong if two units shared it, and one of them missed a step?",
        "A dict, from the unit's name to its m_S, v_S (torch.zeros_like(master_S): fp32) and count t. grad_S.float() first. "
        "Corrected are m / (1 − β1^t) and v / (1 − β2^t), and eps is added behind the root.",
        "t += 1; m = β1·m + (1 − β1)·g; v = β2·v + (1 − β2)·g²; master_S.mul_(1 − lr·weight_decay); then subtract lr · (m / (1 − β1^t)) / (√(v / (1 − β2^t)) + eps), in place.",
    ],
)
def cpu_adam(answer, expect):
    """equal to torch.optim.AdamW: first step, several, decay, eps, defaults, 16-bit gradients, a count for each unit; in place; 8 bytes an element; two at a time"""
    _adam(answer, expect, "one element, the first step", {"a": [1.0]}, [{"a": [0.5]}])
    _adam(answer, expect, "one element, 3 steps", {"a": [1.0]}, [{"a": [0.5]}, {"a": [-2.0]}, {"a": [0.25]}])
    _adam(answer, expect, "weight decay", {"a": [4.0, -2.0]}, [{"a": [0.5, 1.0]}, {"a": [1.0, 3.0]}], weight_decay=0.5)
    _adam(answer, expect, "gradients as small as eps", {"a": [1.0, 2.0]}, [{"a": [1e-3, -2e-3]}, {"a": [3e-3, 1e-3]}], eps=1e-3, betas=(0.5, 0.99))
    _adam(
        answer, expect, "two units, of which b misses two steps", {"a": [1.0, 2.0, 3.0], "b": [4.0, 5.0]},
        [{"a": [1.0, -2.0, 3.0], "b": [1.0, 2.0]}, {"a": [2.0, 1.0, 1.0]}, {"a": [0.5, 3.0, -1.0]}, {"b": [-3.0, 1.0], "a": [1.0, 1.0, 1.0]}],
    )  # fmt: skip
    _adam(
        answer, expect, "two units of one size, of which b misses a step", {"a": [1.0, 2.0], "b": [4.0, 5.0]},
        [{"a": [1.0, -2.0], "b": [3.0, 0.5]}, {"a": [2.0, 1.0]}, {"b": [-3.0, 1.0], "a": [1.0, 4.0]}],
    )  # fmt: skip
    _adam(answer, expect, "the defaults are AdamW's", {"a": [1.0, 20.0]}, [{"a": [0.5, -1e-7]}, {"a": [-2.0, 1e-6]}], given={}, **_DEFAULTS)
    steps = [{"a": [0.30078125, -1.703125, 0.01]}] * 40
    _adam(answer, expect, "40 steps with gradients in bf16", {"a": [1.0, 2.0, 3.0]}, steps, dtype=_BF16, betas=(0.9, 0.999))
    _adam_twice(answer, expect)
    _adam_metered(answer, expect)


def _adamw(masters: Mapping[str, Tensor], steps: Sequence[Mapping[str, Tensor]], settings: Mapping, variant: str = "") -> list[dict[str, Tensor]]:
    """Masters after each step, by torch; or with a mistake."""
    masters = {unit: master.clone() for unit, master in masters.items()}
    if not variant:
        optimizers = {unit: AdamW([master.requires_grad_()], **settings) for unit, master in masters.items()}
    state: dict[str, list] = {}
    calls, history = 0, []
    for step, grads in enumerate(steps):
        for unit, grad in grads.items():
            master, calls = masters[unit], calls + 1
            if not variant:
                master.grad = grad.float()
                optimizers[unit].step()
            else:
                mine = state.setdefault(str(len(master)) if variant == "by size" else unit, [0, 0, 0])
                if variant == "new state":
                    mine[:] = [0, 0, 0]
                _adamw_otherwise(master, grad, mine, calls, step + 1, settings, variant)
        history.append({unit: master.detach().clone() for unit, master in masters.items()})
    return history


def _adamw_otherwise(master: Tensor, grad: Tensor, state: list, calls: int, step: int, settings: Mapping, variant: str) -> None:
    lr, (beta1, beta2), eps, decay = settings["lr"], settings["betas"], settings["eps"], settings["weight_decay"]
    grad = grad.float()
    m, v, t = state
    t += 1
    state[2] = t
    t = {"count of calls": calls, "count of steps": step, "count from 0": t - 1, "count from 2": t + 1}.get(variant, t)
    if variant == "L2":
        grad = grad + decay * master
    m, v = beta1 * m + (1 - beta1) * grad, beta2 * v + (1 - beta2) * grad * grad
    if variant == "not squared":
        v = beta2 * state[1] + (1 - beta2) * grad
    if variant == "betas exchanged":
        m, v = beta2 * state[0] + (1 - beta2) * grad, beta1 * state[1] + (1 - beta1) * grad * grad
    if variant == "16 bits":
        m, v = m.to(_BF16).float(), v.to(_BF16).float()
    state[:2] = m, v
    first = 1.0 if variant in ("no correction", "v alone is corrected") else 1 - beta1**t
    second = 1.0 if variant in ("no correction", "m alone is corrected") else 1 - beta2**t
    if variant == "decay without lr":
        master.mul_(1 - decay)
    elif variant not in ("L2", "no decay", "decay last"):
        master.mul_(1 - lr * decay)
    if variant == "times t":
        first, second = 1 - beta1 * t, 1 - beta2 * t
    m, v = m / torch.tensor(first), v / torch.tensor(second)
    if variant == "eps inside":
        root = (v + eps).sqrt()
    elif variant == "eps uncorrected":
        root = ((v * second).sqrt() + eps) / second**0.5
    else:
        root = v.sqrt() if variant == "no eps" else v.sqrt() + eps
    if variant == "added":
        lr = -lr
    master.sub_(lr * m if variant == "no root" else lr * m / (v if variant == "root forgotten" else root))
    if variant == "decay last":
        master.mul_(1 - lr * decay)


_ADAM_VARIANTS = {
    "no correction": "the bias correction is missing: m and v begin at zero, and are too small by 1 − β^t",
    "m alone is corrected": "the bias correction of v is missing: it is 1 − β2^t",
    "v alone is corrected": "the bias correction of m is missing: it is 1 − β1^t",
    "count from 0": "the count begins at 0, and 1 − β^0 is 0: it is raised before the bias correction",
    "count from 2": "the count is one too high: the first step's is 1",
    "times t": "the bias correction is 1 − β to the power of t, not times t",
    "not squared": "v is the mean of the gradient's square",
    "added": "the update is added: it is subtracted",
    "new state": "moments and count begin anew in each step: they belong to the object, under the unit's name",
    "by size": "two units of one size share moments: does each have moments of its own?",
    "count of calls": "one count for all units: it says how often step() was called, and not how many gradients are in this unit's moments",
    "count of steps": "one count for all units: a unit that had no gradient in a step has fewer of them in its moments",
    "L2": "the decay is added to the gradient, and Adam divides it away again (that is L2): AdamW's is decoupled, and shrinks the master itself",
    "no decay": "the weight decay is missing",
    "decay without lr": "the decay is not multiplied by lr: the master shrinks by 1 − lr · weight_decay",
    "decay last": "the decay comes after the update: the master shrinks first",
    "eps inside": "eps is added under the root: it is added to the root",
    "eps uncorrected": "eps is added before the bias correction of v: correct v first, then take its root, then add eps",
    "no eps": "eps is missing",
    "16 bits": "the moments are in 16 bits, as the gradient is: zeros_like(grad_S) takes over its dtype, and what is added to v is lost in rounding",
    "betas exchanged": "the betas are exchanged: β1 is m's, β2 is v's",
    "root forgotten": "the root of v is missing",
}


def _adam(answer, expect: Expect, text: str, masters: Mapping, steps: Sequence[Mapping], dtype: torch.dtype = _FP32, given: Mapping | None = None, **settings) -> None:
    """given: the settings that the answer gets, where it does not get them all."""
    settings = _SETTINGS | settings
    masters = {unit: torch.tensor(values) for unit, values in masters.items()}
    steps = [{unit: torch.tensor(values).to(dtype) for unit, values in grads.items()} for grads in steps]
    first = {f"{unit}'s master": master for unit, master in masters.items()} | {f"{unit}'s first gradient": grad for unit, grad in steps[0].items()}
    expect.case(text, **first, **settings)
    causes = {
        "result type Float can't be cast": "an operation works in place in 16 bits: turn grad_S into fp32 first",
        "KeyError": "a unit's state is made when it is first met",
        "size of tensor": "two units have different sizes: does each have moments of its own?",
    }
    outcome = expect.run(_adam_program, 1, answer, masters, steps, settings if given is None else given, causes=causes)[0]
    value = outcome.value
    by_hand = "the point is what an optimizer does: use the formulas"
    expect.that(not value["optimizers"], "the step is written by hand", "no torch.optim", f"{value['optimizers']} at work", cause=by_hand)
    suspects = _Suspects({cause: _adamw(masters, steps, settings, variant) for variant, cause in _ADAM_VARIANTS.items()})
    for i, (got, want) in enumerate(zip(value["masters"], _adamw(masters, steps, settings), strict=True)):
        expect.that(
            value["moved"][i], "step() updates master_S in place", "other values in the same memory", f"master_S as it was before step {i + 1}",
            cause="the result is returned, or master_S is bound to a new tensor, which the caller does not see: work on it with mul_, sub_, copy_",
        )  # fmt: skip
        for unit in want:
            of = f"{unit}'s master after step {i + 1}" if len(want) > 1 or len(steps) > 1 else "the master after one step"
            known = suspects.at(want[unit], lambda history, i=i, unit=unit: history[i][unit], 1e-6)
            expect.equal(got[unit], want[unit], of=of, rule="the step is torch.optim.AdamW's", mistakes=known)
    expect.that(value["grads kept"], "grad_S stays as it is", "the values that came in", "others", "what was summed up for other uses is changed", "an operation on grad_S works in place")
    _check_alone(expect, outcome)


def _adam_program(rank, answer, masters, steps, settings):
    masters = {unit: master.clone() for unit, master in masters.items()}
    stepped, history, moved, kept = [], [], [], True
    handle = register_optimizer_step_post_hook(lambda optimizer, *_: stepped.append(type(optimizer).__name__))
    adam, memory = answer(**settings), []
    try:
        for grads in steps:
            memory.append(masters)
            masters = {unit: master.clone() for unit, master in masters.items()}  # elsewhere: the name is what counts
            before = {unit: master.clone() for unit, master in masters.items()}
            for unit, grad in grads.items():
                mine = grad.clone()
                adam.step(unit, masters[unit], mine)
                kept &= torch.equal(mine, grad)
            moved.append([unit for unit in masters if not torch.equal(masters[unit], before[unit])])
            history.append({unit: master.clone() for unit, master in masters.items()})
    finally:
        handle.remove()
    return {"masters": history, "optimizers": ", ".join(dict.fromkeys(stepped)), "moved": moved, "grads kept": kept}


def _adam_twice(answer, expect: Expect) -> None:
    expect.case("two objects, each with a unit of this name")
    master, grad, other = torch.tensor([1.0, 2.0]), torch.tensor([1.0, -3.0]), torch.tensor([0.5, 2.0])
    steps = [{"a": grad}, {"a": other}]
    got = expect.run(_adam_twice_program, 1, answer, master, steps)[0].value
    want = _adamw({"a": master}, steps, _SETTINGS)[-1]["a"]
    for each, which in zip(got, ("first", "second"), strict=True):
        cause = "the state belongs to the class, or to the module: make it in __init__, for each object"
        expect.that(
            not differ(each, want, "", 1e-6), "each object has its own state", f"the {which} one's master is {show(want)}", show(each),
            "two trainings in one process disturb each other", cause,
        )  # fmt: skip


def _adam_twice_program(rank, answer, master, steps):
    adams, masters = [answer(**_SETTINGS) for _ in range(2)], [master.clone() for _ in range(2)]
    for grads in steps:
        for adam, mine in zip(adams, masters, strict=True):
            adam.step("a", mine, grads["a"].clone())
    return masters


def _adam_metered(answer, expect: Expect) -> None:
    numel = {"a": 5_000, "b": 3_000}
    expect.case("two units, bytes held after two steps", a=numel["a"], b=numel["b"])
    held = expect.run(_adam_meter_program, 1, answer, numel)[0].value
    for (when, got), due in zip(held.items(), (8 * numel["a"], 8 * sum(numel.values())), strict=True):
        cause = ""
        if got > due:
            cause = "m and v are all there is to keep: has a gradient, a copy of the master or a result in between stayed?"
        elif got <= due // 2 + 64:
            cause = "m and v are two fp32 tensors for each unit"
        expect.that(
            abs(got - due) <= 64 * len(numel), "the state is m and v, in fp32, of the units that were updated: 8 bytes an element", f"{due:,} bytes {when}", f"{got:,}", cause=cause
        )  # fmt: skip


def _adam_meter_program(rank, answer, numel):
    masters = {unit: torch.ones(n) for unit, n in numel.items()}
    grad = {unit: torch.ones(n, dtype=_BF16) for unit, n in numel.items()}
    with mz.record_memory() as memory:
        adam = answer(**_SETTINGS)
        gc.collect()
        before, held = memory.total, {}
        for _ in range(2):
            adam.step("a", masters["a"], grad["a"])
        gc.collect()
        held["after a's steps"] = memory.total - before
        adam.step("b", masters["b"], grad["b"])
        gc.collect()
        held["after b's, too"] = memory.total - before
    assert adam is not None
    return held


# --- 2. copy and wait ------------------------------------------------------------------------------------------------


@exercise(
    "offload.copy_and_wait",
    call="offload_step(link, weights_S, grad_S, master_S, update)",
    hints=[
        "Write down what each line reads and what it writes. Which of them may run while a copy is under way, and which have to come after its wait()?",
        "torch.empty(grad_S.shape, dtype=grad_S.dtype) is memory on the host; link.copy(…).wait(); master_S.to(weights_S.dtype) rounds on the host. What is copied has one dtype on both sides.",
        "Copy grad_S into host memory and wait; grad_S.zero_(); update(master_S, that memory); copy master_S.to(weights_S.dtype) into weights_S and wait.",
    ],
)
def copy_and_wait(answer, expect):
    """gradient down, update on the host, weights up, in fp32 and bf16; each copy waited for, nothing read or written while it is under way"""
    _stepped(answer, expect, "fp32, one element", [1.0], [[2.0]], _FP32)
    _stepped(answer, expect, "bf16, two steps", [1.0, 2.0, 3.0], [[0.25, -1.0, 0.5], [1.5, 0.0, -1.0]], _BF16)
    # 1 + 2^-10 is 1 in bf16, and four times 2^-9 is more than its last digit: who rounds the master loses them.
    _stepped(answer, expect, "bf16, steps smaller than its last digit", [1.0, -1.0], [[-(2.0**-9), 2.0**-9]] * 8, _BF16)


def _stepped(answer, expect: Expect, text: str, start: list[float], grads: list[list[float]], dtype: torch.dtype) -> None:
    expect.case(text)
    outcome = _run(expect, _step_program, answer, start, grads, dtype, causes=_STEP_CAUSES)
    master = torch.tensor(start)
    for i, (this, grad) in enumerate(zip(outcome.value, grads, strict=True)):
        before, grad = master.clone(), torch.tensor(grad)
        master = master - grad
        step = f" after step {i + 1}" if len(grads) > 1 else ""
        S, name = len(master), _dtype(torch.empty(0, dtype=dtype))
        _check_finished(expect, this["under way"], "when offload_step returns, nothing is under way", "the next forward would read weights that have not arrived")
        expect.that(this["updates"] == 1, "update() is called once in a step", "1 call", f"{this['updates']}", cause="" if this["updates"] else "nobody calls update(master_S, grad)")
        _check_moves(
            this["moves"], [("down", "grad_S", S, name), ("up", "weights_S", S, name)], "the gradient goes down, and the weights go up",
            {
                "no down": "the gradient has to reach the host, over the link",
                "no up": "the new weights have to reach the device, over the link",
                "more down": "the master is on the host already: only the gradient goes down",
                "more up": "only the new weights go up",
                "other": "what goes down is grad_S, and what arrives above is weights_S, each in full",
            },
        )  # fmt: skip
        order = ["down grad_S", "there down grad_S", "update", "up weights_S", "there up weights_S"]
        expect.that(
            this["events"] == order, "gradient down, update, weights up, in this order", ", ".join(order), ", ".join(this["events"]),
            cause="the weights go up before they are updated" if this["events"].index("up weights_S") < this["events"].index("update") else "",
        )  # fmt: skip
        expect.equal(
            this["master"], master, of=f"master_S{step}", rule="the master gets this step's gradient", tol=0,
            mistakes=_mistakes(master, {
                "the master was rounded to 16 bits: round a copy of it": (before.to(dtype).float() - grad).to(dtype).float(),
            }),
        )  # fmt: skip
        rounded = master.to(dtype)
        expect.equal(
            this["weights"], rounded, of=f"weights_S{step}", rule="the weights on the device are the rounded master", tol=0,
            mistakes=_mistakes(rounded, {"these are the weights of before the update": before.to(dtype), "the gradient was sent up in place of the weights": grad.to(dtype)}),
        )  # fmt: skip
        expect.equal(
            this["grad"], torch.zeros(S, dtype=dtype), of=f"grad_S{step}", rule="grad_S is zero, for the next backward", so="the next gradient would be added to this one", tol=0,
            mistakes={"it has not been cleared": grad.to(dtype)},
        )  # fmt: skip
    _check_alone(expect, outcome)


_STEP_CAUSES = {
    "grad_S is overwritten while": "grad_S is cleared before its copy has arrived: copy() only begins to copy, so clear it after wait()",
    "the host's copy of grad_S is read": "the update reads the gradient before it has arrived: wait() stands before update()",
}


def _check_finished(expect: Expect, under_way: list[str], rule: str, so: str) -> None:
    expect.that(not under_way, rule, "all waited for", f"still under way: {', '.join(under_way)}", so, "its wait() is missing")


def _step_program(rank, answer, start, grads, dtype):
    machine, found = _Machine(), []
    weights_S = machine.device("weights_S", torch.tensor(start, dtype=dtype))
    grad_S = machine.device("grad_S", torch.zeros(len(start), dtype=dtype))
    master_S = machine.on_host("master_S", torch.tensor(start))

    def update(master, grad):
        _on_host(machine, master, grad)
        if _range(master) != _range(master_S):
            raise ValueError("update was given another tensor than master_S")
        machine.events.append("update")
        master.sub_(grad)

    for values in grads:
        machine.aside(grad_S.add_, torch.tensor(values, dtype=dtype))
        machine.events.clear()
        machine.moves.clear()
        with machine:
            answer(machine.link, weights_S, grad_S, master_S, update)
        this = {"events": [*machine.events], "moves": [*machine.moves], "updates": machine.events.count("update"), "under way": [f"{each.what} {each.way}" for each in machine.under_way]}
        found.append(this | {"master": master_S.clone(), "weights": weights_S.clone(), "grad": grad_S.clone()})
        if this["under way"]:
            found.extend(found[-1:] * (len(grads) - len(found)))
            break
    return found


# --- 3. overlap --------------------------------------------------------------------------------------------------------


@exercise(
    "offload.overlap",
    call="Overlap(link)",
    points=2,
    hints=[
        "For each copy: which is the first line that needs what it brings? What can happen above that line, and which copies would then be under way?",
        "on_gradient appends (unit, host memory, copy) to a list, and waits for nothing. step waits for each gradient right before its update, and for a copy up only before a third would begin, or at the end.",
        "For each (unit, grad, down) of the list: down.wait(); update(unit, grad); if two copies are going up, wait for the older one; begin to copy unit.master_S.to(dtype) into unit.weights_S. Wait for the rest; clear the list.",
    ],
)
def overlap(answer, expect):
    """values and copies of two steps; gradients leave in backward; at each update the later gradients and the weights of the unit before are under way"""
    _overlapped(answer, expect, "one unit", [2], [[0]])
    _overlapped(answer, expect, "two units", [2, 3], [[1, 0]] * 2)
    _overlapped(answer, expect, "four units, of which two have no gradient in step 2", [4, 2, 5, 3], [[3, 2, 1, 0], [3, 1], [3, 2, 1, 0]])
    _overlapped(answer, expect, "three units in fp32", [4, 2, 5], [[2, 1, 0]] * 2, _FP32)
    _overlapped(answer, expect, "six units, some of one size, of which none has a gradient in step 2", [2, 3, 2, 2, 3, 2], [[5, 4, 3, 2, 1, 0], [], [5, 4, 3, 2, 1, 0]])


def _overlapped(answer, expect: Expect, text: str, sizes: list[int], steps: list[list[int]], dtype: torch.dtype = _BF16) -> None:
    expect.case(text)
    causes = {
        "'s grad_S is read": "update() is given a gradient that has not arrived: its wait() comes right before",
        "is overwritten, but the copy": "one piece of memory for all gradients: the next is on its way into it while the first is still needed. Each unit has its own on the host",
        "the host's copy of": "one piece of memory for all gradients: each unit has its own on the host",
    }
    outcome = _run(expect, _overlap_program, answer, sizes, steps, dtype, causes=causes)
    masters = [unit.master_S for unit in _units(_Machine(), sizes, dtype)]
    for t, (order, this) in enumerate(zip(steps, outcome.value, strict=False)):
        step = f" of step {t + 1}" if len(steps) > 1 else ""
        names = [f"unit {i}" for i in order]
        for i, (name, (downs, returned)) in enumerate(zip(names, this["backward"], strict=True)):
            want = [f"{each}'s grad_S" for each in names[: i + 1]]
            expect.that(
                downs == want, "a gradient leaves in backward, and nobody waits for it there", f"after on_gradient({name}){step} under way: {', '.join(want)}", ", ".join(downs) or "nothing",
                "backward stands still while it travels" if returned else "", _not_leaving(returned, want[-1], i),
            )  # fmt: skip
        expect.that(
            not this["idle"], "each object has its own state", "no update by an object that has heard of no gradient", f"updates of {', '.join(this['idle'])}",
            "two trainings in one process disturb each other", "the list belongs to the class, or to the module: make it in __init__, for each object",
        )  # fmt: skip
        updated = [name for name, *_ in this["updates"]]
        expect.that(
            updated == names, "step() updates the units that had a gradient, in this order", ", ".join(names), ", ".join(updated) or "none",
            cause=_other_order(updated, names),
        )  # fmt: skip
        for i, (name, downs, ups, begun) in enumerate(this["updates"]):
            want = [f"{each}'s grad_S" for each in names[i + 1 :]]
            expect.that(
                downs == want, "a gradient is waited for right before its own update", f"at the update of {name}{step} on their way down: {', '.join(want) or 'none'}", ", ".join(downs) or "none",
                "the first update begins when the last gradient has arrived" if not downs else "", "all gradients are waited for before the first update" if want and not downs else "",
            )  # fmt: skip
            if i:
                before = f"{names[i - 1]}'s weights_S"
                cause = "each copy up is waited for as soon as it has begun" if before in begun else "the weights are sent only when all units are updated"
                expect.that(
                    before in ups, "the new weights of a unit travel while the next is updated", f"at the update of {name}{step} on their way up: {before}", ", ".join(ups) or "nothing",
                    "host and link take turns, and the device waits for both", cause,
                )  # fmt: skip
        expect.that(
            this["most up"] <= 2, "at most two copies up are under way at a time", "2", f"{this['most up']}{step}", "as much host memory holds rounded weights at once",
            "all are waited for at the end: wait for the copy of the unit before the last before a third begins",
        )  # fmt: skip
        _check_finished(expect, this["under way"], "when step() returns, nothing is under way", "the next forward would read weights that have not arrived")
        name_of = _dtype(torch.empty(0, dtype=dtype))
        moves = [move for i in order for move in (("down", f"unit {i}'s grad_S", sizes[i], name_of), ("up", f"unit {i}'s weights_S", sizes[i], name_of))]
        _check_moves(
            this["moves"], moves, "each gradient goes down once, and each unit's weights go up once",
            {
                "more up": "only a unit that was updated has new weights",
                "more down": "a unit's gradient goes down once, when it is ready",
                "no up": "new weights of a unit are not sent",
                "other": "whole units travel",
            },
        )  # fmt: skip
        for i in order:
            masters[i] = masters[i] - _gradient(i, t, sizes[i])
        for i, master in enumerate(masters):
            of = f"unit {i}'s master{step or ' after the step'}"
            expect.equal(this["masters"][i], master, of=of, rule="each unit is updated with its own gradient", tol=0)
            expect.equal(this["weights"][i], master.to(dtype), of=f"unit {i}'s weights_S after the step", rule="the weights on the device are the rounded master", tol=0)
    _check_alone(expect, outcome)


def _not_leaving(returned: bool, last: str, i: int) -> str:
    if returned:
        return "on_gradient waits for its copy: begin it there, and wait in step()"
    return "on_gradient begins the copy of its unit's gradient, and step() waits for it: here it has not begun"


def _other_order(got: list[str], want: list[str]) -> str:
    if len(got) > len(want):
        return "units of the step before are updated again: what was waited for is over and out of the list"
    if sorted(got) == sorted(want):
        return "the gradient that left first arrives first: update in the order in which on_gradient was called"
    return "a unit's update is missing" if len(got) < len(want) else ""


def _gradient(i: int, t: int, numel: int) -> Tensor:
    """Of unit i in step t: small whole numbers."""
    return torch.arange(numel) % 3 + 1.0 + i - t


@dataclass(eq=False)  # an answer may well use it as a key
class _Unit:
    name: str
    weights_S: Tensor
    grad_S: Tensor
    master_S: Tensor


def _units(machine: _Machine, sizes: Sequence[int], dtype: torch.dtype) -> list[_Unit]:
    units = []
    for i, numel in enumerate(sizes):
        master_S = torch.arange(numel) + 10.0 * i + 2.0**-9
        units.append(_Unit(
            name=f"unit {i}",
            weights_S=machine.device(f"unit {i}'s weights_S", master_S.to(dtype, copy=True)),
            grad_S=machine.device(f"unit {i}'s grad_S", torch.full((numel,), torch.nan, dtype=dtype)),
            master_S=machine.on_host(f"unit {i}'s master_S", master_S),
        ))  # fmt: skip
    return units


def _overlap_program(rank, answer, sizes, steps, dtype):
    machine, found = _Machine(), []
    units = _units(machine, sizes, dtype)
    with machine:
        offload, idle = answer(machine.link), answer(machine.link)
    for t, order in enumerate(steps):
        machine.events.clear()
        machine.moves.clear()
        this: dict = {"backward": [], "updates": []}
        updated: list[str] = []

        def update(unit, grad, this=this):
            this["updates"].append((unit.name, machine.names("down"), machine.names("up"), _begun(machine.events, "up")))
            _update_unit(machine, unit, grad)

        with machine:
            for unit in units:
                machine.look([unit.weights_S], [])  # forward
            for i in order:
                machine.look([], [units[i].grad_S])
                machine.aside(units[i].grad_S.copy_, _gradient(i, t, sizes[i]))
                offload.on_gradient(units[i])
                this["backward"].append((machine.names("down"), f"there down {units[i].name}'s grad_S" in machine.events))
            idle.step(lambda unit, grad, updated=updated: updated.append(unit.name))
            this["idle"] = [*updated]
            offload.step(update)
        this["most up"] = _most_up(machine.events)
        this["under way"] = [f"{each.what} {each.way}" for each in machine.under_way]
        this["moves"] = [*machine.moves]
        found.append(this | {"masters": [unit.master_S.clone() for unit in units], "weights": [unit.weights_S.clone() for unit in units]})
        if this["under way"]:
            break
    return found


def _update_unit(machine: _Machine, unit: _Unit, grad: Tensor) -> None:
    _on_host(machine, unit.master_S, grad)
    machine.events.append(f"update {unit.name}")
    unit.master_S.sub_(grad)


def _begun(events: Sequence[str], way: str) -> list[str]:
    return [event.removeprefix(f"{way} ") for event in events if event.startswith(f"{way} ")]


def _most_up(events: Sequence[str]) -> int:
    """So many copies up were under way at once."""
    now = most = 0
    for event in events:
        now += event.startswith("up ") - event.startswith("there up ")
        most = max(most, now)
    return most


# --- 4. the 4-byte budget ------------------------------------------------------------------------------------------------


@exercise(
    "offload.budget",
    call="Budget(link, weights_S)",
    points=2,
    hints=[
        "For each tensor that you make: on which side is it, and how many bytes has an element? Which of them crosses the link?",
        "Down: memory from torch.empty(…, dtype=grad_S.dtype), one copy, wait, then .float() on the host. The sum is fp32, and so is the master. Up: master_S.to(weights_S.dtype), made on the host.",
        "__init__: weights_S down, .float(), that is the master. on_gradient: grad_S down, wait, .float(), add it to the sum. step: update(master, sum); the sum begins at zero; the rounded master goes up, wait.",
    ],
)
def budget(answer, expect):
    """2 bytes down for each micro-batch, 2 bytes up for each step; sums and masters in fp32 on the host; no new memory on the device"""
    _budgeted(answer, expect, "one micro-batch", [1.0], [[[0.5]]])
    _budgeted(answer, expect, "two micro-batches", [1.0], [[[256.0], [1.0]]])
    _budgeted(answer, expect, "two steps of three micro-batches", [4.0, -2.0, 8.0], [[[1.0, 2.0, 3.0], [10.0, -1.0, 0.5], [100.0, 4.0, 512.0]], [[1.0, 1.0, 1.0], [2.0, 0.0, -1.0], [0.25, 1.0, 5.0]]])
    _budgeted(answer, expect, "8 steps that are smaller than the last digit of bf16", [1.0, -1.0], [[[-(2.0**-9), 2.0**-9]]] * 8)


def _budgeted(answer, expect: Expect, text: str, start: list[float], steps: list) -> None:
    S, G = len(start), len(steps[0])
    expect.case(text, S=S)
    causes = {
        "grad_S is overwritten while": "the next micro-batch writes into grad_S as soon as on_gradient returns: wait there",
        "update was given a sum in bfloat16": "in 16 bits 256 + 1 is 256: .float() what has come down, then add",
        "update was given a master in": "what comes down has 16 bits: the master is .float() of it, on the host",
        "NoneType": "the sum is None, or zero, at the beginning of each step: the first gradient begins it",
    }
    outcome = _run(expect, _budget_program, answer, start, steps, causes=causes)
    want = _budget_reference(start, steps)
    suspects = _Suspects({cause: _budget_reference(start, steps, variant) for variant, cause in _BUDGET_VARIANTS.items()})
    down, up = ("down", "grad_S", S, "bfloat16"), ("up", "weights_S", S, "bfloat16")
    extra = [move for move in outcome.value["init"] if move != ("down", "weights_S", S, "bfloat16", move[4])]
    expect.that(not extra, "to begin with, the weights come down once, in 16 bits", f"weights_S down, {S} × bfloat16", _told([move[:4] for move in extra]), cause="widen on the host, after the copy")
    _check_made(expect, outcome.value["made"], S, " in __init__")
    for t, this in enumerate(outcome.value["steps"]):
        step = f" in step {t + 1}" if len(steps) > 1 else ""
        _check_finished(expect, this["under way"], "when step() returns, nothing is under way", "the next forward would read weights that have not arrived")
        _check_moves(
            this["moves"], [down] * G + [up], f"2 bytes down for each of {G} micro-batches, 2 bytes up for the step" if G > 1 else "2 bytes down and 2 bytes up for each parameter",
            {
                "dtype": "32 bits cross the link: widen gradients after they have come down, and round the master before it goes up, on the host",
                "made": "what goes down is made on the device: each micro-batch's grad_S goes down as it is, and is added up on the host",
                "more down": "more goes down than gradients: the master stays on the host from step to step",
                "no down": "gradients are added up on the device, or not sent: each micro-batch's goes down, and the sum is the host's",
                "more up": "the weights go up once a step",
                "no up": "the new weights are not sent",
                "other": "what goes down is grad_S itself, and what arrives above is weights_S",
            },
        )  # fmt: skip
        _check_made(expect, this["made"], S, step)
        expect.that(len(this["sums"]) == 1, "update() is called once in a step", "1 call", f"{len(this['sums'])}{step}")
        for key, what, rule in (
            ("sums", "the sum", "update() gets the sum of the step's gradients, added in fp32"),
            ("masters", "the master", "the master is fp32, and keeps what 16 bits cannot"),
            ("weights", "weights_S", "the weights on the device are the rounded master"),
        ):
            got = this["sums"][0] if key == "sums" else this[key]
            known = suspects.at(want[t][key], lambda history, t=t, key=key: history[t][key])
            expect.equal(got, want[t][key], of=f"{what}{step}", rule=rule, mistakes=known, tol=0)
    _check_alone(expect, outcome)


def _check_made(expect: Expect, memory: Sequence[tuple[int, str]], S: int, when: str) -> None:
    made = [(numel, dtype) for numel, dtype in memory if numel >= S]
    told = "; ".join(f"{numel} × {dtype}" for numel, dtype in dict.fromkeys(made))
    cause = "a copy on the device is not needed: wait for the one that goes down"
    if any(dtype == "float32" for _, dtype in made):
        cause = "fp32 belongs on the host: .float() on the device makes 4 bytes a parameter there"
    expect.that(not made, "the device has its weights and its gradients, and nothing else", "no new memory", f"{told}{when}", "that is what offload was to save", cause)


_BUDGET_VARIANTS = {
    "overwrite": "each micro-batch's gradient overwrites the one before: on the host they are added up",
    "never cleared": "the sum of the step before is still in it: each step's begins at zero",
    "16 bits": "the sum is added up in 16 bits, where 256 + 1 is 256: .float() what has come down, then add",
    "mean": "the sum is divided by the number of micro-batches: scaling is the user's",
    "first": "only the first micro-batch counts: later ones are added to it",
    "rounded master": "the master is rounded, or made anew from the 16-bit weights: it stays on the host, in fp32, from step to step",
    "zero master": "the master begins at zero, and not at the weights",
}


def _budget_reference(start: list[float], steps: list, variant: str = "") -> list[dict]:
    master, total, history = torch.tensor(start), None, []
    if variant == "zero master":
        master = torch.zeros_like(master)
    for grads in steps:
        if variant != "never cleared" or total is None:
            total = torch.zeros_like(master)
        for i, grad in enumerate(map(torch.tensor, grads)):
            if variant == "overwrite" or (variant == "first" and i == 0):
                total = grad
            elif variant == "16 bits":
                total = (total.to(_BF16) + grad.to(_BF16)).float()
            elif variant != "first":
                total = total + grad / (len(grads) if variant == "mean" else 1)
        master = master - total
        weights = master.to(_BF16)
        history.append({"sums": total.clone(), "masters": master.clone(), "weights": weights})
        if variant == "rounded master":
            master = weights.float()
    return history


def _budget_program(rank, answer, start, steps):
    machine, found = _Machine(), []
    weights_S = machine.device("weights_S", torch.tensor(start, dtype=_BF16))
    grad_S = machine.device("grad_S", torch.zeros(len(start), dtype=_BF16))
    with machine:
        offload = answer(machine.link, weights_S)
    init, made, this = [*machine.moves], [*machine.made], {}

    def update(master, total):
        _on_host(machine, master, total)
        if total.dtype != _FP32:
            raise ValueError(f"update was given a sum in {_dtype(total)}: it is fp32")
        machine.look([total, master], [])
        this["sums"].append(total.clone())
        master.sub_(total)
        this["masters"] = master.clone()

    for grads in steps:
        machine.moves.clear()
        machine.made.clear()
        this.clear()
        this["sums"] = []
        with machine:
            machine.look([weights_S], [])  # forward
            for values in grads:
                machine.look([], [grad_S])  # backward
                machine.aside(grad_S.copy_, torch.tensor(values))
                offload.on_gradient(grad_S)
            offload.step(update)
        this["under way"] = [f"{each.what} {each.way}" for each in machine.under_way]
        found.append({**this, "moves": [*machine.moves], "made": [*machine.made], "weights": weights_S.clone()})
        if this["under way"]:
            break
    return {"init": init, "made": made, "steps": found}


# --- 5. the delayed update ---------------------------------------------------------------------------------------------


@exercise(
    "offload.delayed",
    call="Delayed(link, host, weights_S, master_S, update)",
    points=2,
    hints=[
        "Draw three steps, device above and host below. When does the update with the gradient of step 1 begin, when is it over, and in which forward are its weights seen for the first time?",
        "self.beside is what host.start(self.update, self.master_S, host_S) returned, or None. What ends it, wait() and then the rounded master up, is the first thing that step() does and all that finish() does.",
        "finish: if something is beside, wait for it, forget it, copy master_S.to(weights_S.dtype) into weights_S, wait. step: finish(); if sound, grad_S down into host memory, wait, and start the update with it.",
    ],
)
def delayed(answer, expect):
    """weights after each step equal to a loop with this delay; no gradient lost or used twice; skipped steps; one update beside at a time"""
    _delayed(answer, expect, "one step", [1.0], "g")
    _delayed(answer, expect, "two steps", [1.0], "gg")
    _delayed(answer, expect, "four steps", [1.0, 3.0, -2.0], "gggg")
    _delayed(answer, expect, "the second of three steps is skipped", [1.0, 3.0], "gsg")
    _delayed(answer, expect, "the last step is skipped, twice", [1.0, 3.0], "ggss")
    _delayed(answer, expect, "step 2 is skipped, as another rank's gradient has overflowed", [1.0, 3.0], "gog")
    _delayed(answer, expect, "finish() in between", [1.0, 3.0], "ggfg")
    _delayed(answer, expect, "finish() before the first step, and a skipped one first", [1.0, 3.0], "fsgg")


_DELAYED_RULES = "the weights miss the last gradient, and no other"


def _delayed(answer, expect: Expect, text: str, start: list[float], pattern: str) -> None:
    """pattern: g a step, s a step that overflows, o one that overflows elsewhere, f finish(); at the end comes finish(), twice."""
    expect.case(text)
    causes = {
        "grad_S is overwritten while": "backward writes into grad_S as soon as step() returns: its copy has to have arrived",
        "master_S is read while": "the master is read while an update is under way: wait for the update, then send the weights",
        "master_S is overwritten while": "two updates are at work on one master: the one before ends first",
        "the copy that brings it": "copy() only begins to copy: wait for the gradient before the update with it is started",
        "gradient that was skipped": "sound=False says that grad_S has overflowed: nothing begins with it",
    }
    outcome = _run(expect, _delayed_program, answer, start, pattern, causes=causes)
    calls = [*pattern, "f", "f"]
    want = _delayed_reference(start, calls)
    suspects = _Suspects({cause: _delayed_reference(start, calls, variant) for variant, cause in _DELAYED_VARIANTS.items()})
    pending = False
    for i, (call, this) in enumerate(zip(calls, outcome.value, strict=True)):
        when = f"after call {i + 1}, {'finish()' if call == 'f' else 'step(grad_S)' if call == 'g' else 'step(grad_S, sound=False)'}"
        method = "finish()" if call == "f" else "step()"
        expect.that(
            not this["in the open"], "the update runs beside, in what host.start began", "update() called there alone", f"called in {method} itself", "the device waits for the host",
            "start it: host.start(update, master_S, grad)",
        )  # fmt: skip
        S, moves = len(start), [("down", "grad_S", len(start), "bfloat16")] * (call == "g") + [("up", "weights_S", len(start), "bfloat16")] * pending
        known = suspects.at(want[i], lambda history, i=i: history[i])
        sent = any(move[0] == "up" for move in this["moves"])
        expect.equal(
            this["weights"], want[i], of=f"weights_S {when}", rule=_DELAYED_RULES if call != "f" else "after finish() the weights have all gradients", tol=0,
            mistakes={cause: value for cause, value in known.items() if sent or cause != _STALE},
        )  # fmt: skip
        if call == "f":
            expect.equal(
                this["master"], want[i], of=f"master_S {when}, rounded", rule="the updates are in the master_S that was handed over", tol=0,
                mistakes={"what is updated is a copy of master_S, and whoever saves master_S saves old weights": torch.tensor(start).to(_BF16)},
            )  # fmt: skip
        _check_finished(expect, this["copies"], f"{method} waits for its copies", "the next forward and backward read the weights and write the gradient")
        cause = "the update is waited for in the step that began it: it ends in the next" if this["started"] else "no update has begun: host.start(update, master_S, grad), in this step"
        if call != "g":
            cause = _DELAYED_VARIANTS["finite"] * (call == "o") if this["started"] else "an update is still under way: whoever ends it waits for it"
        expect.that(
            len(this["beside"]) == (call == "g"), "after a sound step one update is under way, else none", f"{int(call == 'g')} {when}", f"{len(this['beside'])}",
            "the host does not work beside the next forward and backward" if call == "g" else "", cause,
        )  # fmt: skip
        _check_moves(
            this["moves"], moves, "a sound step's gradient goes down; where an update has ended, its weights go up",
            {
                "more up": "weights go up where an update has ended, once: else they are there already",
                "more down": "a gradient goes down once, and one that is not sound need not",
                "no up": "an update has ended, and its weights are not sent",
                "no down": "the gradient is not sent",
                "other": f"what crosses is grad_S and weights_S, each of {S} elements",
            },
        )  # fmt: skip
        pending = call == "g"
    _check_alone(expect, outcome)


_STALE = "what is sent are the weights of before the update: wait for it first"
_DELAYED_VARIANTS = {
    "stale": _STALE,  # its values are those of "lost" and "two", but weights have been sent
    "finite": "sound says whether the gradient counts, on all ranks alike: this rank's may be finite and must not be used",
    "no delay": "there is no delay: the gradient of this step is in the weights already",
    "lost": "the last gradient is lost: finish() ends the update that is still under way, and sends its weights",
    "skip waits": "a skipped step does not end the update of the step before: it ends all the same, and its weights go up",
    "two": "the weights miss two gradients: the update of the step before ends at the beginning of this one",
}


def _delayed_reference(start: list[float], calls: Sequence[str], variant: str = "") -> list[Tensor]:
    """Weights after each call. variant: with a mistake."""
    master = torch.tensor(start) + 2.0**-9
    weights, history, pending = master.to(_BF16), [], []
    for t, call in enumerate(calls):
        grad = _delayed_gradient(weights, t)
        if call == "g" and variant == "no delay":
            pending.append(grad)
        if (call, variant) not in (("f", "lost"), ("s", "skip waits"), ("o", "skip waits")):
            before = master.to(_BF16)
            while len(pending) > (variant == "two" and call != "f"):
                master = master - pending.pop(0)
            weights = before if variant == "stale" else master.to(_BF16)
        if (call == "g" and variant != "no delay") or (call, variant) == ("o", "finite"):
            pending.append(grad)
        history.append(weights.clone())
    return history


def _delayed_gradient(weights: Tensor, t: int) -> Tensor:
    """It depends on the weights, so a wrong delay goes on to differ."""
    return (weights.float() * 0.25 + (t + 1)).to(_BF16).float()


def _delayed_program(rank, answer, start, pattern):
    machine, found, open_calls = _Machine(), [], []
    master_S = machine.on_host("master_S", torch.tensor(start) + 2.0**-9)
    weights_S = machine.device("weights_S", master_S.to(_BF16))
    grad_S = machine.device("grad_S", torch.zeros(len(start), dtype=_BF16))

    def update(master, grad):
        _on_host(machine, master, grad)
        if not bool(machine.aside(lambda: torch.isfinite(grad).all())):
            if machine.names("down"):
                raise StillUnderWay("grad_S is read on the host, but the copy that brings it has not been waited for")
            raise ValueError("update was given a gradient that was skipped")
        if not machine.running:
            open_calls.append(1)
        master.sub_(grad)

    with machine:
        delayed = answer(machine.link, machine.host, weights_S, master_S, update)
    for t, call in enumerate([*pattern, "f", "f"]):
        machine.moves.clear()
        machine.events.clear()
        open_calls.clear()
        with machine:
            if call == "f":
                delayed.finish()
            else:
                machine.look([weights_S], [grad_S])  # forward and backward
                values = machine.aside(_delayed_gradient, weights_S, t) if call in "go" else torch.full((len(start),), torch.inf)
                machine.aside(grad_S.copy_, values)
                delayed.step(grad_S) if call == "g" else delayed.step(grad_S, sound=False)
        copies = [f"{each.what} {each.way}" for each in machine.under_way if each.way != "beside"]
        this = {"beside": machine.names("beside"), "started": "beside the update" in machine.events, "in the open": bool(open_calls)}
        found.append(this | {"weights": weights_S.clone(), "master": master_S.to(_BF16), "copies": copies, "moves": [*machine.moves]})
    return found


# --- 6. say the number ---------------------------------------------------------------------------------------------------


@number(
    "offload.number",
    hints=[
        "Which states does the device still compute with? Which does only the optimizer touch? What of all that changes in a step and is needed on the other side?",
        "Of 16 bytes, 2 + 2 (weights, gradients) stay on the device and 12 (master, m, v) go; offloaded weights move 2 more. All is divided by N. "
        "Down go 2 bytes of gradient a micro-batch, up 2 bytes of weights a step.",
        "Device 4Ψ/N, or 2Ψ/N with the weights offloaded; host 12Ψ/N or 14Ψ/N. Link (2G + 2)Ψ/N, with the weights offloaded (2G + 4G)Ψ/N: each micro-batch fetches them twice. "
        "Seconds: bytes over bytes/s. Between ranks 3G × 2Ψ(N−1)/N, as before.",
    ],
)
def offload_number(rng):
    """what is on the device and on the host, what crosses the link, how long that takes, and what ranks still send each other"""
    kind = rng.choice(["host", "seconds", "device", "link", "largest", "sent"])
    psi, n = rng.choice([7, 13, 30, 70]), rng.choice([8, 32, 64])
    questions = {"device": _device_question, "host": _host_question, "link": _link_question, "seconds": _seconds_question, "largest": _largest_question, "sent": _sent_question}
    return questions[kind](psi, n, rng)


def _device_question(psi: int, n: int, rng) -> Question:
    n, params = max(n, 16), rng.random() < 0.5
    what = "the optimizer's states and the shard of the weights are" if params else "the optimizer's states are"
    two = f"2 bytes × {psi} B / {n} = {2 * psi / n:g} GB"
    mistakes = {
        "that is all 16 bytes: the optimizer's 12 are on the host": 16 * psi / n,
        "that is what lies on the host": (14 if params else 12) * psi / n,
        "offload and sharding multiply: the device holds 1/N of what is left": (2 if params else 4) * psi,
        "the fp32 master is the optimizer's, and on the host with it": (6 if params else 8) * psi / n,
        "the shard of the weights is on the host as well: what is left are gradients, 2 bytes": 4 * psi / n if params else None,
        "the weights stay on the device here, and so do the gradients": None if params else 2 * psi / n,
        "gradients have 2 bytes, not 4": None if params else 6 * psi / n,
    }
    return Question(
        text=f"{psi} B parameters, {n} ranks, ZeRO-3, mixed-precision Adam; {what} offloaded: how many GB of model states are left on one device, while no unit is gathered?",
        answer=(2 if params else 4) * psi / n,
        unit="GB",
        working=[f"weights      {'on the host' if params else two}", f"gradients    {two}", "optimizer    12 bytes, on the host"],
        mistakes={text: wrong for text, wrong in mistakes.items() if wrong is not None},
    )


def _host_question(psi: int, n: int, rng) -> Question:
    gpus = rng.choice([2, 4, 8])
    return Question(
        text=f"{psi} B parameters, ZeRO-3 on {n} ranks, mixed-precision Adam, the optimizer's states and the weights' shard offloaded; {gpus} ranks share one machine: "
        "how many GB of its memory do these states take, while nothing travels?",
        answer=14 * psi / n * gpus,
        unit="GB",
        working=[
            f"master, m, v   (4 + 4 + 4) bytes × {psi} B / {n} = {12 * psi / n:g} GB a rank",
            f"weights        2 bytes × {psi} B / {n} = {2 * psi / n:g} GB a rank",
            f"the machine    {gpus} × {14 * psi / n:g} GB = {14 * psi / n * gpus:g} GB",
        ],
        mistakes={
            "that is one rank's: the ranks of a machine share its memory": 14 * psi / n,
            "the weights' shard is missing, 2 bytes": 12 * psi / n * gpus,
            "the fp32 master is missing, 4 bytes": 10 * psi / n * gpus,
            "gradients stay on the device: 12 + 2 bytes are on the host": 16 * psi / n * gpus,
            "Adam's two moments are fp32, 4 bytes each": 10.5 * psi / n * gpus,
            "the states are sharded as before: a rank's host part has 1/N of them": 14 * psi * gpus,
        },
    )


def _link_question(psi: int, n: int, rng) -> Question:
    g, params = rng.choice([1, 4, 8]), rng.random() < 0.4
    up, what = (4 * g, "the optimizer's states and the weights' shard are") if params else (2, "the optimizer's states are")
    answer = (2 * g + up) * psi / n
    fetched = "2 bytes of weights, for each forward and each backward" if params else "new weights, once"
    batches = f"{g} micro-batches" if g > 1 else "one micro-batch"
    mistakes = {
        "that is all ranks together: each copies its own shard": answer * n,
        "gradients are 2 bytes, not 4": (4 * g + up) * psi / n,
        "the weights are fetched for forward and backward of each micro-batch, not once a step": (2 * g + 4) * psi / n if params and g > 1 else None,
        "that is one micro-batch": 6 * psi / n if params and g > 1 else None,
        "something of each micro-batch is missing: its gradient down, or its weights up for forward and again for backward": 4 * g * psi / n if params else None,
        "only the gradients: the new weights go up as well": 2 * g * psi / n,
        "only the weights: each micro-batch's gradient goes down as well": up * psi / n,
        "the moments never cross: the update is where they are": (2 * g + up + 24) * psi / n,
        "the optimizer's states stay on the host, and the update with them: they do not cross": 12 * psi / n,
        "offloaded weights are fetched for each forward and for each backward": (2 * g + 2) * psi / n if params else None,
        "the weights' shard is on the device: nothing has to be fetched for forward and backward": None if params else 6 * g * psi / n,
        "each micro-batch's gradient goes down, and is added up on the host": (2 + up) * psi / n if g > 1 else None,
        "the weights go up once a step, not for each micro-batch": None if params or g == 1 else 4 * g * psi / n,
        "weights go up in 16 bits, rounded on the host": None if params else (2 * g + 4) * psi / n,
    }
    return Question(
        text=f"{psi} B parameters, ZeRO-3 on {n} ranks, weights and gradients in 16 bits, {batches} a step; {what} offloaded: how many GB cross one rank's host link in a step, down and up together?",
        answer=answer,
        unit="GB",
        working=[
            f"down       {g} × 2 bytes × {psi} B / {n} = {2 * g * psi / n:g} GB   (gradients)",
            f"up         {up} bytes × {psi} B / {n} = {up * psi / n:g} GB   ({fetched})",
            f"together   {answer:g} GB",
        ],
        mistakes=_apart(answer, mistakes),
    )


def _seconds_question(psi: int, n: int, rng) -> Question:
    n, speed = max(n, 16), rng.choice([12, 25, 50])  # on 8 ranks two mistakes lead to one number
    answer = 4 * psi / n / speed
    return Question(
        text=f"{psi} B parameters, ZeRO-3 on {n} ranks, 16-bit weights and gradients, the optimizer's states offloaded, one micro-batch a step. "
        f"Each rank's PCIe link carries {speed} GB/s in each direction. First all gradients go down, then all weights up, and nothing is hidden: how many ms does that take?",
        answer=1000 * answer,
        unit="ms",
        working=[
            f"down       2 bytes × {psi} B / {n} = {2 * psi / n:g} GB, at {speed} GB/s {2000 * psi / n / speed:g} ms",
            f"up         as much, {2000 * psi / n / speed:g} ms",
            f"together   {1000 * answer:g} ms",
        ],
        mistakes={
            "that is one way: gradients down, then weights up": 500 * answer,
            "that is seconds: 1 s is 1,000 ms": answer,
            "each rank has a link of its own, and copies its shard: 1/N": 1000 * answer * n,
            "weights and gradients are 2 bytes each, not 4": 2000 * answer,
            "the optimizer's 12 bytes stay where they are": 3000 * answer,
            "GB/s are bytes, not bits": 8000 * answer,
        },
    )


def _largest_question(psi: int, n: int, rng) -> Question:
    memory = rng.choice([24, 40, 80])
    return Question(
        text=f"{n} GPUs of {memory} GB, ZeRO-3, mixed-precision Adam, the optimizer's states on hosts with room enough: "
        "of how many B parameters can a model be, if nothing but model states had to fit on the devices?",
        answer=memory * n / 4,
        unit="B parameters",
        working=[
            "on the devices   2 bytes of weights and 2 of gradients a parameter, over all ranks together",
            f"there is         {n} × {memory} GB = {n * memory:,} GB",
            f"parameters       {n * memory:,} GB / 4 bytes = {memory * n / 4:g} B",
        ],
        mistakes={
            "that is without offload: of 16 bytes the optimizer's 12 are on the host": memory * n / 16,
            "that is one GPU: ZeRO-3 shards what stays on the devices over all of them": memory / 4,
            "gradients are there as well, 2 bytes": memory * n / 2,
            "the 12 bytes of the optimizer are not on the devices": memory * n / 12,
            "the fp32 master is on the host, with the optimizer's states": memory * n / 8,
        },
    )


def _sent_question(psi: int, n: int, rng) -> Question:
    one = 2 * psi * (n - 1) / n
    return Question(
        text=f"{psi} B parameters, ZeRO-3 on {n} ranks, 16-bit weights and gradients, one micro-batch a step, the optimizer's states and the weights' shard offloaded: "
        "how many GB does one rank send to other ranks in a step?",
        answer=3 * one,
        unit="GB",
        working=[
            "all-gathers       2   (forward, backward: each host has its rank's shard, and no more)",
            "reduce-scatters   1",
            f"each              (N−1)/N × Ψ × 2 bytes = {n - 1}/{n} × {psi} B × 2 bytes = {one:g} GB",
            f"together          3 × {one:g} GB = {3 * one:g} GB",
        ],
        mistakes={
            "the weights still have to be gathered: a rank's host has its own shard, not the model": one,
            "gradients are reduced as before: a host adds up those of its own rank only": 2 * one,
            "that is what crosses the host link, which other ranks do not see": 6 * psi / n,
            "nothing is saved between ranks: offload moves what a rank has, and each rank still has 1/N": 0.0,
            "that is elements: each has 2 bytes": 1.5 * one,
            "16 bits are 2 bytes, not 4": 6 * one,
            "(N−1)/N is missing: what a rank owns it does not send to itself": 6 * psi,
        },
        tol=0.005,
    )


def _apart(answer: float, mistakes: Mapping[str, float | None]) -> dict[str, float]:
    """Those that lead to another number, one mistake for each."""
    apart: dict[str, float] = {}
    for text, wrong in mistakes.items():
        if wrong is not None and all(abs(wrong - other) > 0.03 * other for other in (answer, *apart.values())):
            apart[text] = wrong
    return apart


# --- 7. find the bug ---------------------------------------------------------------------------------------------------------


@bug(
    "offload.find_the_bug",
    call="staged_step(link, units, staging, update)",
    points=2,
    hints=[
        "Follow one staging buffer through the loop: who fills it, who reads it, and when is that reader known to be done? Try it with three units and a link that moves everything in wait().",
        "Unit 2 takes the buffer that unit 0 took. The copy of unit 0 may still be reading it when rounded_S.copy_ writes. Which line says that this copy is over, and where does it stand?",
        "A slow link sends unit 2's weights to unit 0. Move the `if i >= 2: ups[i - 2].wait()` above rounded_S.copy_(unit.master_S): a buffer is filled when the copy out of it is over.",
    ],
    options={
        "a": "on the host, a unit's master is updated with another unit's gradient",
        "b": "on a slow link, a unit on the device gets another unit's weights",
        "c": "weights go up in fp32, 4 bytes a parameter",
        "d": "when the step is over, copies are still under way",
        "e": "only one copy is ever under way: nothing overlaps",
    },
    observed="b",
    why={
        "a": "each gradient comes down into memory of its own, and is waited for right before its update",
        "c": "what travels is the staging buffer, which has the weights' dtype: copy_ rounds when it is filled",
        "d": "the loop waits for all copies up but the last two, and the last line for these",
        "e": "all gradients leave before the first update, and the weights of a unit travel while the next is updated",
    },
)
def find_the_bug(mended, expect):
    """what one would measure; values for one to six units; each buffer filled when its copy is over; two buffers, and what overlapped still does"""
    _staged(mended, expect, [3])
    _staged(mended, expect, [2, 3])
    _staged(mended, expect, [2, 3, 2])
    _staged(mended, expect, [4, 2, 5, 3, 1, 5])


def _staged(answer, expect: Expect, sizes: list[int]) -> None:
    expect.case(f"{len(sizes)} unit{'s' * (len(sizes) > 1)}")
    late = "the staging buffer is filled again before its copy was waited for: the wait has to stand above the line that fills it"
    causes = {"staging 0 is overwritten": late, "staging 1 is overwritten": late}
    outcome = _run(expect, _staged_program, answer, sizes, causes=causes)
    this, names = outcome.value, [f"unit {i}" for i in range(len(sizes))]
    updated = [name for name, *_ in this["updates"]]
    expect.that(updated == names, "each unit is updated once, in order", ", ".join(names), ", ".join(updated) or "none")
    moves = [move for i, numel in enumerate(sizes) for move in (("down", f"unit {i}'s grad_S", numel, "bfloat16"), ("up", f"unit {i}'s weights_S", numel, "bfloat16"))]
    _check_moves(
        this["moves"], moves, "each gradient goes down once, and each unit's weights go up once, in 16 bits",
        {"more up": "a unit's weights are sent twice", "no up": "a unit's weights are not sent", "dtype": "what travels is the rounded master"},
    )  # fmt: skip
    through = [through for way, _, _, _, through in this["moves"] if way == "up"]
    stray = [name for i, name in enumerate(names) if "staging" not in through[i]]
    expect.that(
        not stray, "weights travel through the two staging buffers", "staging 0 and staging 1", f"{', '.join(stray)} through other memory",
        "there is no more pinned memory than these two", "new memory for each unit has no bug, and needs as much host memory as there are weights: wait before a buffer is filled again",
    )  # fmt: skip
    alike = [name for name, here, before in zip(names[1:], through[1:], through, strict=False) if here[-1] == before[-1]]
    expect.that(
        not alike, "the two staging buffers take turns", "staging 0, staging 1, staging 0, …", f"{', '.join(alike)} through the buffer of the unit before", "each unit waits for the one before",
        "with one buffer it can be filled only when the copy of the unit before is over",
    )  # fmt: skip
    for i, (name, downs, ups, begun) in enumerate(this["updates"]):
        later = [f"{each}'s grad_S" for each in names[i + 1 :]]
        expect.that(downs == later, "gradients travel beside the updates, as before", f"at the update of {name} on their way down: {', '.join(later) or 'none'}", ", ".join(downs) or "none")
        before = f"{names[i - 1]}'s weights_S"
        expect.that(
            not i or before in ups, "the weights of one unit travel while the next is updated, as before", f"at the update of {name} on their way up: {before}", ", ".join(ups) or "nothing",
            "host and link take turns", "each copy is waited for at once: that is right and nothing overlaps; wait when its buffer is needed again, two units later" if before in begun else "",
        )  # fmt: skip
    _check_finished(expect, this["under way"], "when the step is over, nothing is under way", "the next forward would read weights that have not arrived")
    for i, numel in enumerate(sizes):
        master = _units(_Machine(), sizes, _BF16)[i].master_S - _gradient(i, 0, numel)
        expect.equal(this["masters"][i], master, of=f"unit {i}'s master", rule="each unit is updated with its own gradient", tol=0)
        expect.equal(this["weights"][i], master.to(_BF16), of=f"unit {i}'s weights_S", rule="the weights on the device are the rounded master", tol=0)
    _check_alone(expect, outcome)


def _staged_program(rank, answer, sizes):
    machine, updates = _Machine(), []
    units = _units(machine, sizes, _BF16)
    staging = [machine.on_host(f"staging {i}", torch.full((max(sizes),), torch.nan, dtype=_BF16)) for i in range(2)]
    for i, unit in enumerate(units):
        unit.grad_S.copy_(_gradient(i, 0, sizes[i]))

    def update(unit, grad):
        updates.append((unit.name, machine.names("down"), machine.names("up"), _begun(machine.events, "up")))
        _update_unit(machine, unit, grad)

    with machine:
        answer(machine.link, units, staging, update)
    under_way = [f"{each.what} {each.way}" for each in machine.under_way]
    return {
        "updates": updates, "moves": machine.moves, "under way": under_way,
        "masters": [unit.master_S.clone() for unit in units], "weights": [unit.weights_S.clone() for unit in units],
    }  # fmt: skip
