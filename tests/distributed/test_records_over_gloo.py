"""Records and metrics over a real process group: the thread ranks of `test_records` have no pickle between them."""

from typing import Any

import torch

from sanctuary_trainer.devices import Devices
from sanctuary_trainer.records import Records
from tests.distributed.workers import Ranks

# At the top, so that the process which forks the ranks imports torchmetrics once for all of them.
from tests.test_metrics import BinaryAUROC, Boxes, Task, boxes, scores


def log_unevenly() -> tuple[dict[str, float], dict[str, float]]:
    """Rank 1 logs an extra key, another order and a metric alone; the last rank has no data for the metrics."""
    devices = Devices(cpu=True)
    task = Task(BinaryAUROC)
    task.boxes = Boxes()
    records = Records(devices, task)
    names = ["a", "b"] if devices.rank == 0 else ["b", "rare", "a"]
    for name in names:
        records.add("train", name, torch.tensor({"a": 1.0, "b": 3.0, "rare": 7.0}[name]), weight=2 + devices.rank)
    stepped = records.step_values()
    shares = {1: [[0, 1, 2]], 2: [[0, 2], [1]], 3: [[0], [1, 2], []]}[devices.world_size]
    for seed in shares[devices.rank]:
        metric: Any = task.metric
        metric.update(*scores(seed, 5 + seed))
        task.boxes.update(*boxes(seed, 3 + seed))
    if devices.rank == devices.world_size - 1:
        records.add("val", "auroc", task.metric)
        records.add("val", "boxes", task.boxes)
    return stepped, records.epoch_values("val")


def test_uneven_keys_and_list_states_over_gloo(one_rank: Ranks, two_ranks: Ranks, three_ranks: Ranks) -> None:
    (alone,) = one_rank(log_unevenly)
    assert alone[0] == {"train/a": 1.0, "train/b": 3.0}
    for ranks in (two_ranks, three_ranks):
        values = ranks(log_unevenly)
        assert all(repr(value) == repr(values[0]) for value in values)
        assert values[0][0] == {"train/a": 1.0, "train/b": 3.0, "train/rare": 7.0}
        assert list(values[0][1]) == list(alone[1]) and "val/auroc" in alone[1]
        for name, value in alone[1].items():
            torch.testing.assert_close(values[0][1][name], value, equal_nan=True, rtol=1e-6, atol=1e-6)
