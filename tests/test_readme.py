"""The README's code runs as it stands there."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
launched, measured, under_torchrun = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train.py").write_text(launched)
    (tmp_path / "train_with_torchrun.py").write_text(under_torchrun)
    return tmp_path


def run(folder, *command):
    result = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr
    return list(map(float, re.findall(r"\d\.\d+", result.stdout)))


def test_its_two_examples_train_the_same_model(folder):
    losses = run(folder, "train.py")
    assert len(losses) == 2 and max(losses) < 3.2
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert run(folder, *torchrun, "train_with_torchrun.py") == pytest.approx(losses[:1], abs=1e-3)


def test_it_measures_inside_a_rank(folder):
    (folder / "measure.py").write_text(measured)
    result = subprocess.run([sys.executable, "measure.py"], cwd=folder, capture_output=True, text=True, timeout=100)
    assert "'params': 875000000, 'grads': 875000000, 'optimizer': 5250000000} 19687500000" in result.stdout, result.stderr
    assert all(json.loads((folder / f"trace-{rank}.json").read_text())["traceEvents"] for rank in range(2))


def test_its_links_lead_somewhere():
    links = re.findall(r"\]\((?!http)([^)]+)\)", README.read_text(encoding="utf-8"))
    assert links and [link for link in links if not (README.parent / link).exists()] == []
