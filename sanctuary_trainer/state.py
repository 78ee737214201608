"""Where a run stands: plain numbers that count what is *done*, equal on all ranks at the same moment.

    for each epoch
      for each window of the epoch
        for each round of the window      batch += 1, samples += the round's samples over all ranks
        optimizer update                  global_step += 1, where an update was made
      end_epoch()                         epoch += 1, batch = samples = 0

Counted first and acted on afterwards: whoever reads the state between two of these lines sees a boundary at which the
run could be stopped and continued.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class RunState:
    """How far a run has come.

    epoch: epochs done, which is also the index of the running one.
    batch: rounds of the running epoch done; in a round each rank takes one batch or joins with nothing.
    global_step: optimizer updates made since the start of the run.
    samples: samples of the running epoch used, over all ranks; the position from which an epoch is continued.
    stop_reason: why the run is ending, None while it goes on.
    """

    epoch: int = 0
    batch: int = 0
    global_step: int = 0
    samples: int = 0
    stop_reason: str | None = None

    def end_epoch(self) -> None:
        """Counts the running epoch as done; the position moves to the start of the next one."""
        self.epoch += 1
        self.batch = 0
        self.samples = 0
