"""Writes references.json: what the scripts `NAME_before.py` end with, for those who have not installed their packages.

pip install lightning pytorch-accelerated
python examples/migrate/references.py lightning pytorch_accelerated
"""

import contextlib
import importlib
import json
import os
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import torch

FILE = Path(__file__).resolve().with_name("references.json")
PACKAGES = {"pytorch_accelerated": "pytorch-accelerated"}


def numbers_of(weights, metrics):
    """The norm of all weights, one weight of each tensor (its middle), and the metrics, as plain numbers."""
    floats = [tensor.double().flatten() for tensor in weights.values() if tensor.is_floating_point()]
    return {
        "norm": torch.cat(floats).norm().item(),
        "weights": [tensor[len(tensor) // 2].item() for tensor in floats],
        "metrics": {name: float(value) for name, value in metrics.items()},
    }


def here():
    """What rounding depends on: where this differs, float32 training ends at slightly other weights."""
    return {"torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability()}


def main(names):
    known = json.loads(FILE.read_text()) if FILE.exists() else {}
    for name in names:
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            weights, metrics, _ = importlib.import_module(f"{name}_before").main()
        package = PACKAGES.get(name, name)
        known[name] = {package: version(package), **here(), **numbers_of(weights, metrics)}
        print(name, known[name]["norm"], known[name]["metrics"])
    FILE.write_text(json.dumps(known, indent=1, sort_keys=True) + os.linesep)


if __name__ == "__main__":
    main(sys.argv[1:])
