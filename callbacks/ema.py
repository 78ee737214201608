"""A moving average of the weights, validated beside them.

    on_fit_start         average = weights
    on_train_step_end    average = decay x average + (1 - decay) x weights       on the device, which nobody waits for
    validation           once more with the average: "val/accuracy_ema" beside "val/accuracy"
    after the fit        ema.apply(task), or trainer.test(task, loader) inside `with ema.swapped(task)`

Averaged are the parameters that are trained and batch norm's running mean and variance, which belong to the weights
that they were measured with. Everything else is the task's own: frozen parameters, counters (num_batches_tracked),
masks, queues. On several ranks each has the same average of the weights; running statistics differ by rank, and an
evaluation uses rank 0's, as it does without an average.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy
from torch.optim.swa_utils import get_ema_multi_avg_fn

from sanctuary_trainer import Callback, SettingsError, TaskError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from sanctuary_trainer import Run

STATISTICS = ("running_mean", "running_var")


class EMA(Callback):
    """Keeps an exponential moving average of the weights and validates it, too.

    Every value `val/x` of a validation gets a second, `val/x_ema`, to which a scheduler, a checkpoint or early stopping
    can be bound like to any other. Sanity validation has none.

    Args:
        decay: the share of the former average that remains in an update, in [0, 1).
        every_n_steps: steps from one update to the next.
        start_step: up to this step the average is a copy of the weights.
        warmup: let the share of the former average rise with the number n of updates, min(decay, (1 + n) / (10 + n)),
            so that the first weights are soon forgotten: for runs of a few times 1 / (1 - decay) steps.
        name: what is appended to the names of values; two averages need two names.

    Raises:
        SettingsError: an argument is wrong.
        TaskError: other parameters are trained than when the fit began.

    `average` holds the averaged tensors by their name in the task, 16-bit ones as float32, where steps of 1 - decay are
    not lost to rounding; `updates` counts the updates. Both outlive the fit, and the next one begins anew.
    """

    identifying = ("name",)

    def __init__(
        self,
        decay: float = 0.999,
        *,
        every_n_steps: int = 1,
        start_step: int = 0,
        warmup: bool = False,
        name: str = "ema",
    ) -> None:
        _check("decay", decay, _is_number(decay) and 0 <= decay < 1, "a number in [0, 1)")
        _check("every_n_steps", every_n_steps, _is_int(every_n_steps, 1), "a whole number of at least 1")
        _check("start_step", start_step, _is_int(start_step, 0), "a whole number of at least 0")
        _check("warmup", warmup, isinstance(warmup, bool), "True or False")
        _check("name", name, _is_name(name), "a name without '/'")
        self.decay, self.every_n_steps, self.start_step = decay, every_n_steps, start_step
        self.warmup, self.name = warmup, name
        self.average: dict[str, Tensor] = {}
        self.updates = 0
        self._release()

    def _release(self) -> None:
        self._parameters: list[Tensor] = []  # of the task, in the order of the average, which has them first
        self._statistics: list[tuple[nn.Module, str]] = []  # their owners: a module may put a new tensor there
        self._widens = False  # whether a 16-bit tensor has an average of float32
        self._checked_in = -1  # the epoch whose first step was checked

    def setup(self, run: Run) -> None:
        if run.verb == "fit":
            self.average, self.updates = {}, 0

    def on_fit_start(self, run: Run) -> None:
        if self.name in run.variants:
            raise SettingsError(f"Another callback validates with {self.name!r} already: give EMA another name=.")
        own = _tensors(run.task)
        if self.average:  # of the run that this one continues
            self._check_fits(run.task)
        else:
            self.average = {name: own[name].detach().clone() for name in _averaged(run.task)}
        self.average = {
            name: self.average[name].to(tensor.device, torch.promote_types(tensor.dtype, torch.float32))
            for name, tensor in own.items()
            if name in self.average
        }
        self._widens = any(average.dtype != own[name].dtype for name, average in self.average.items())
        parameters = dict(run.task.named_parameters())
        self._parameters = [parameters[name] for name in self.average if name in parameters]
        owners = (name.rpartition(".") for name in self.average if name not in parameters)
        self._statistics = [(run.task.get_submodule(path), leaf) for path, _, leaf in owners]
        self._check_unchanged(run.task)
        run.variants[self.name] = partial(self.swapped, run.task)

    def on_train_step_end(self, run: Run) -> None:
        if run.state.epoch != self._checked_in:
            self._checked_in = run.state.epoch
            self._check_unchanged(run.task)
        after = run.state.global_step - self.start_step
        if after <= 0:
            self._update(0.0)
        elif after % self.every_n_steps == 0:
            self._update(min(self.decay, (1 + self.updates) / (10 + self.updates)) if self.warmup else self.decay)
            self.updates += 1

    def on_evaluation_start(self, run: Run, stage: str) -> None:
        if run.verb == "fit" and stage == "val":
            self._check_unchanged(run.task)

    def teardown(self, run: Run) -> None:
        self._release()

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates, "average": dict(self.average)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updates = state["updates"]
        self.average = {name: average.clone() for name, average in state["average"].items()}

    @contextmanager
    def swapped(self, task: nn.Module) -> Iterator[None]:
        """Inside, `task` holds the average; afterwards, also after an exception, exactly what it held before.

        A copy of what it held is kept meanwhile, in the memory that gradients take in training.
        """
        own = self._check_fits(task)
        raw = [tensor.detach().clone() for tensor in own]
        try:
            _copy(self.average.values(), own)
            yield
        finally:
            _copy(raw, own)

    def apply(self, task: nn.Module) -> None:
        """Put the average into `task` for good: into the one that was trained, or into another like it, whose frozen
        parameters and counters stay its own."""
        _copy(self.average.values(), self._check_fits(task))

    def _update(self, decay: float) -> None:
        averages = list(self.average.values())
        with torch.no_grad():
            own = [*self._parameters, *(getattr(owner, leaf) for owner, leaf in self._statistics)]
            if self._widens:
                own = [tensor.to(average.dtype) for tensor, average in zip(own, averages, strict=True)]
            get_ema_multi_avg_fn(decay)(averages, own, self.updates)

    def _check_fits(self, task: nn.Module) -> list[Tensor]:
        """The task's tensors that belong to those of the average, in its order."""
        if not self.average:
            raise TaskError("EMA has no average yet: a fit makes it, or load_state_dict brings it.")
        own = _tensors(task)
        missing = [name for name in self.average if name not in own]
        if missing:
            raise TaskError(f"EMA holds an average of {_some(missing)}, which {type(task).__name__} does not have.")
        for name, average in self.average.items():
            if own[name].shape != average.shape:
                raise TaskError(
                    f"EMA's average of {name} has shape {tuple(average.shape)}, and in {type(task).__name__} it has "
                    f"{tuple(own[name].shape)}."
                )
        return [own[name] for name in self.average]

    def _check_unchanged(self, task: nn.Module) -> None:
        """Refuses to go on where the average would be of other weights than those that are trained."""
        own = _tensors(task)
        new = [name for name in _averaged(task) if name not in self.average]
        gone = [n for n, kept in zip(self.average, self._parameters, strict=False) if own.get(n) is not kept]
        if new or gone:
            what = f"{_some(new)} came later" if new else f"{_some(gone)} went or was exchanged since"
            raise TaskError(
                f"EMA averages the parameters that were trained when the fit began, and {what}. Add and thaw layers "
                "before the fit, or begin a new fit for them."
            )


def _averaged(task: nn.Module) -> list[str]:
    """Names of what is averaged: each tied tensor once, parameters first."""
    parameters = {name: tensor for name, tensor in task.named_parameters() if tensor.requires_grad}
    for name, tensor in parameters.items():
        if is_lazy(tensor):
            raise TaskError(f"EMA: {name} has no shape before a batch was seen. Give the task one before the fit.")
    buffers = (name for name, tensor in task.named_buffers() if tensor.is_floating_point())
    return [*parameters, *(name for name in buffers if name.rpartition(".")[2] in STATISTICS)]


def _tensors(task: nn.Module) -> dict[str, Tensor]:
    return {**dict(task.named_parameters()), **dict(task.named_buffers())}


@torch.no_grad()
def _copy(values: Iterable[Tensor], into: Sequence[Tensor]) -> None:
    for tensor, value in zip(into, values, strict=True):
        tensor.copy_(value)


def _check(name: str, value: object, fine: bool, expected: str) -> None:
    if not fine:
        raise SettingsError(f"EMA got {name}={value!r}; {expected} was expected.")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_int(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_name(value: object) -> bool:
    return isinstance(value, str) and value != "" and "/" not in value


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
