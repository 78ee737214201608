"""Rank 0 shows progress and results, the others show nothing."""

import re
from typing import Any

from tests.distributed.workers import Ranks
from tests.small_tasks import Net, classes, loader, quiet_trainer


class Talks(Net):
    def on_train_epoch_end(self, run: Any) -> None:
        run.message(f"a message at the end of epoch {run.state.epoch}")


def every_verb() -> None:
    trainer = quiet_trainer(max_epochs=2, default_callbacks=True, num_sanity_val_steps=2)
    task = Talks()
    trainer.fit(task, loader(classes(16)), loader(classes(11)))
    trainer.validate(task, loader(classes(11)))
    trainer.test(task, loader(classes(1)))
    trainer.predict(task, loader(classes(11)))


def test_only_rank_0_shows_anything_in_every_verb(two_ranks: Ranks) -> None:
    first, second = two_ranks(every_verb).outputs
    assert second == ""
    assert "\r" not in first and "\x1b" not in first
    lines = first.splitlines()
    numbers = r"[\d.e+-]+"
    results = rf"val/(loss|accuracy)={numbers}, val/(loss|accuracy)={numbers}"
    expected = [
        r"Talks on cpu, full precision, 2 ranks",
        r" .*",  # the table's head, the net and the total
        r" .*",
        r" .*",
        r"a message at the end of epoch 0",
        rf"epoch 1/2: 100%, 2/2 batches, 00:0\d, {numbers} samples/s, loss={numbers}, {results}",
        r"a message at the end of epoch 1",
        rf"epoch 2/2: 100%, 2/2 batches, 00:0\d, {numbers} samples/s, loss={numbers}, {results}",
        r"Ended after 4 steps, 2 epochs: max_epochs",
        *[r" .*"] * sum(line.startswith("  ") for line in lines[9:]),
        rf"val: 100%, 2/2 batches, 00:0\d, {numbers} batches/s, {results}",
        rf"test: 100%, 1/1 batches, 00:0\d, {numbers} batches/s, {results.replace('val/', 'test/')}",
        rf"predict: 100%, 2/2 batches, 00:0\d, {numbers} batches/s",
    ]
    assert len(lines) == len(expected), first
    for line, pattern in zip(lines, expected, strict=True):
        assert re.fullmatch(pattern, line), (line, pattern)
