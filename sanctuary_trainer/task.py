"""`VisionTask`: what a user writes.

class Classifier(VisionTask):
    training_step(batch, batch_idx)   -> loss                                 (required)
    predict_step(batch, batch_idx)    -> outputs, one item per sample         (required)
    validation_step, test_step        -> anything; call self.log
    configure_optimizers()            -> optimizers, schedulers
    any hook of `Callback`            (self, run, ...)
"""

from __future__ import annotations

import difflib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never, Self

import torch
from torch import nn

from sanctuary_trainer import batch as batches
from sanctuary_trainer.callback import refuse_unknown_hooks
from sanctuary_trainer.checkpoint_folder import check_whole
from sanctuary_trainer.checkpointing import WEIGHTS, read_state
from sanctuary_trainer.errors import CallbackError, TaskError
from sanctuary_trainer.foreign import refuse_unknown
from sanctuary_trainer.weights import load_weights, save_weights

if TYPE_CHECKING:
    from sanctuary_trainer.run import Run


# What a task may define and is called by its name: a misspelt one would be passed over without a word.
_OPTIONAL = (
    "training_step",
    "validation_step",
    "test_step",
    "predict_step",
    "configure_optimizers",
    "train_dataloader",
    "val_dataloader",
    "test_dataloader",
    "predict_dataloader",
    "split_batch",
    "train_mode",
)


class _Hyperparameters(dict[str, Any]):
    """Values by name, also as attributes where a dictionary has none of that name."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(
                f"There is no hyper-parameter {name!r}; there are {', '.join(self) or 'none'}."
            ) from None


class VisionTask(nn.Module, ABC):
    """A model together with what it learns from: subclass it, and hand it to a `Trainer`.

    It is an `nn.Module` with any submodules and any `forward`. A hook of `Callback` that it defines is called like a
    callback's, before theirs.

    Raises:
        TypeError: when a class lacks one of the abstract steps and is instantiated.
        CallbackError: when a class defines an `on_...` method that is no hook, or misspells what it may define.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        refuse_unknown_hooks(cls, also=("on_after_batch_to_device",))
        for name, value in vars(cls).items():
            near = difflib.get_close_matches(name, _OPTIONAL, n=1, cutoff=0.9)
            if callable(value) and near and name not in _OPTIONAL:
                raise CallbackError(f"{cls.__qualname__}.{name} would never be called. Did you mean {near[0]}?")

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        missing = sorted(getattr(cls, "__abstractmethods__", ()))
        if missing:
            raise TypeError(
                f"{cls.__name__} cannot be instantiated: it does not define {' and '.join(missing)}. "
                f"Every task needs training_step(self, batch, batch_idx) and predict_step(self, batch, batch_idx)."
            )
        task = super().__new__(cls)
        # Kept here, so that save_hyperparameters need not look through the caller's frames.
        object.__setattr__(task, "_arguments", (args, kwargs))
        return task

    def __init__(self) -> None:
        super().__init__()
        self._run: Run | None = None
        self._hparams = _Hyperparameters()

    def __getstate__(self) -> dict[str, Any]:
        # A copy or a pickle of the task is the task, without the run it is in.
        state = dict(super().__getstate__())  # type: ignore[no-untyped-call]  # without what torch.compile made, which cannot be copied
        state["_run"] = None
        state.pop("_arguments", None)
        return state

    # What a user writes

    @abstractmethod
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Compute the loss of one batch.

        Returns:
            A scalar tensor, the mean over the batch's samples; or `{"loss": loss, "weight": n}` when it is a mean over
            n of something else (labelled pixels, boxes); or None to leave the batch out. A weight of 0 does so too.
        """

    @abstractmethod
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        """Predict one batch of B samples.

        Returns:
            One item per sample: a tensor (B, ...), a list of length B, or a dict or tuple of these. None is allowed.
        """

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        """Evaluate one batch of a validation loader; what it returns goes to `on_evaluation_batch_end`."""
        raise TaskError(f"{type(self).__name__} has no validation_step, so it cannot be validated or tested.")

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        """Evaluate one batch of a test loader; `validation_step` unless overridden."""
        return self.validation_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        """The optimizers and learning-rate schedulers; AdamW with torch's defaults unless overridden.

        Returns:
            An optimizer; several, which step together; `(optimizers, schedulers)`; or Lightning's dict
            `{"optimizer": ..., "lr_scheduler": {"scheduler": ..., "interval": "step" or "epoch", "frequency": 1,
            "monitor": "val/loss"}}`, or a list of such dicts. A scheduler goes by epochs unless told "step".
        """
        if self._run is not None:
            self._run.message(
                f"{type(self).__name__} has no configure_optimizers: training with AdamW and a learning rate of 1e-3."
            )
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=1e-3)

    def setup(self, stage: str) -> None:
        """Called once at the start of a verb, before the task is moved to its device.

        Args:
            stage: "fit", "validate", "test" or "predict".
        """

    def train_dataloader(self) -> Any:
        """The training loader, when none is given to `fit`."""
        return None

    def val_dataloader(self) -> Any:
        """The validation loader, or a list or dict of them, when none is given."""
        return None

    def test_dataloader(self) -> Any:
        """The test loader, or a list or dict of them, when none is given."""
        return None

    def predict_dataloader(self) -> Any:
        """The loader to predict, when none is given."""
        return None

    # What a user may override

    def batch_size(self, batch: Any) -> int | None:
        """How many samples a batch holds; None when it cannot be told. Asked only where the sampler does not know."""
        return batches.batch_size(batch)

    def cost(self, batch: Any) -> float:
        """How much work a training batch is, in any unit, for `LoadBalance`; by default the numbers in its tensors.

        Override where the time of a step goes by something else: boxes, valid pixels, tokens squared. It is asked for
        on every batch, so it must not wait for the device.
        """
        return batches.count_values(batch)

    def split_batch(self, batch: Any, sizes: Sequence[int]) -> list[Any]:
        """Cut a batch into consecutive pieces of these numbers of samples."""
        return batches.split(batch, sizes)

    def on_after_batch_to_device(self, batch: Any, stage: str) -> Any:
        """Change a batch on its device: augmentation on the accelerator, MixUp.

        Args:
            batch: as loaded, on `self.device`.
            stage: "train", "sanity", "val", "test" or "predict".

        Returns:
            The batch to use, with as many samples.
        """
        return batch

    def train_mode(self) -> None:
        """Put the modules into train mode, but leave asleep what is frozen and was put to sleep.

        A module in eval mode stays there when all its parameters are frozen. A module without parameters goes by its
        nearest ancestor that has some. So a frozen backbone keeps its batch-norm statistics, while a model from
        `from_pretrained`, which comes in eval mode, wakes up with its dropout.
        """
        asleep = set(_asleep(self, False))
        before = [(name, module) for name, module in self.named_modules() if not module.training]
        self.train()  # also runs the modules' own train(), which may keep parts of them in eval mode
        for module in asleep:
            module.training = False
        woken = [name for name, module in before if module.training]
        topmost = [
            name
            for name in woken
            if not any(name.startswith(f"{other}.") or not other for other in woken if other != name)
        ]
        if topmost and self._run is not None:
            names = ", ".join(name or type(self).__name__ for name in topmost)
            self._run.message(
                f"Switched to train mode: {names}. (Freeze its parameters to keep a module in eval mode.)"
            )

    # What a user calls

    @property
    def run(self) -> Run:
        """The run that the task is in.

        Raises:
            TaskError: outside a run.
        """
        if self._run is None:
            raise TaskError(f"{type(self).__name__} is in no run: self.run exists while a Trainer works with the task.")
        return self._run

    @property
    def device(self) -> torch.device:
        """The device of the run; outside one, that of the first parameter or buffer, or the CPU."""
        if self._run is not None:
            return self._run.device
        for tensor in (*self.parameters(), *self.buffers()):
            return tensor.device
        return torch.device("cpu")

    def log(
        self,
        name: str,
        value: Any,
        *,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        prog_bar: bool = False,
        reduce: str = "mean",
        batch_size: int | torch.Tensor | None = None,
        **unknown: Never,
    ) -> None:
        """Record a value; does nothing outside a run.

        Args:
            name: gets its stage's prefix ("train/", "val/", "test/") unless it has a "/".
            value: a number, a tensor of one element (left on its device), or a torchmetrics metric of the task, which
                the trainer synchronises over all ranks, computes and resets.
            on_step: a point of the curve every `log_every_n_steps`: the value since the last point. Default: plain
                values in training.
            on_epoch: the value over the epoch or the evaluation. Default: metrics, and everything outside training.
                With both, the second series is called `name_epoch`.
            prog_bar: show it in the progress bar.
            reduce: "mean" (weighted by samples), "sum", "min" or "max", over batches and ranks.
            batch_size: the weight of this value in a mean, when it is not the batch's number of samples.
        """
        refuse_unknown(self.log, unknown)
        if self._run is not None:
            self._run.log(
                name, value, on_step=on_step, on_epoch=on_epoch, prog_bar=prog_bar, reduce=reduce, batch_size=batch_size
            )

    def log_dict(self, values: Mapping[str, Any], **settings: Any) -> None:
        """`log` each of these values, or each metric of a torchmetrics collection, with the same settings."""
        if self._run is not None:
            self._run.log_dict(values, **settings)

    def log_image(self, name: str, images: Any) -> None:
        """Show images in the tracker; does nothing outside a run.

        Args:
            name: gets its stage's prefix unless it has a "/".
            images: (N, C, H, W) or (C, H, W), C of 1 or 3, float in [0, 1] or uint8.
        """
        if self._run is not None:
            self._run.log_image(name, images)

    @property
    def hparams(self) -> _Hyperparameters:
        """The saved hyper-parameters, `hparams["lr"]` or `hparams.lr`; empty before `save_hyperparameters`."""
        return self._hparams

    def save_hyperparameters(self, *names: str, ignore: Iterable[str] = ()) -> None:
        """Keep the constructor's arguments as hyper-parameters; call it in `__init__`, after `super().__init__()`.

        Args:
            names: only these; all when none is given.
            ignore: all but these. Modules are left out unless named: they are weights, not settings.

        Raises:
            TaskError: a name is no argument of the constructor, or the arguments are gone (a copied or unpickled task).
        """
        if "_arguments" not in self.__dict__:
            raise TaskError("save_hyperparameters works in the constructor; this task is a copy or was unpickled.")
        args, kwargs = self.__dict__["_arguments"]
        bound = inspect.signature(type(self).__init__).bind(self, *args, **kwargs)
        bound.apply_defaults()
        values: dict[str, Any] = {}
        for key, parameter in list(inspect.signature(type(self).__init__).parameters.items())[1:]:
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                values.update(bound.arguments[key])
            elif parameter.kind is inspect.Parameter.VAR_POSITIONAL:
                if bound.arguments[key]:
                    values[key] = bound.arguments[key]
            else:
                values[key] = bound.arguments[key]
        ignored = (ignore,) if isinstance(ignore, str) else tuple(ignore)
        unknown = [name for name in names if name not in values]
        if unknown:
            raise TaskError(
                f"{type(self).__name__}.__init__ has no argument {', '.join(map(repr, unknown))}; "
                f"it has {', '.join(values) or 'none'}."
            )
        chosen = {key: value for key, value in values.items() if (key in names if names else key not in ignored)}
        self._hparams = _Hyperparameters(
            (key, _detached(value)) for key, value in chosen.items() if key in names or not isinstance(value, nn.Module)
        )

    def save_weights(self, path: str | Path) -> Path:
        """Write the task's parameters and buffers to a safetensors file; tied weights stay tied.

        Returns:
            The file's path.
        """
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        save_weights(self, path)
        return path

    def load_weights(self, path: str | Path, strict: bool = True) -> list[str]:
        """Read parameters and buffers from a safetensors file.

        Args:
            path: a file that `save_weights`, or anything else, wrote with this task's keys.
            strict: demand that keys and shapes agree; else load what does.

        Returns:
            The keys that were skipped: in one of the two only, or of another shape. Empty when strict.

        Raises:
            DataError: the file is missing or broken, keys or shapes differ (strict), or not one key agrees.
        """
        return load_weights(self, Path(path), strict)

    @classmethod
    def load_from_checkpoint(cls, path: str | Path, /, **overrides: Any) -> Self:
        """Make a task from a checkpoint: its saved hyper-parameters, then its weights.

        Args:
            path: a checkpoint's folder.
            overrides: arguments of the constructor; they come before the saved ones. Modules are not saved as
                hyper-parameters, so a task that takes its model as an argument is given it here.

        Raises:
            CheckpointError: the checkpoint is missing or broken.
            DataError: its weights are another task's.
            TaskError: the constructor needs an argument that was neither saved nor given.
        """
        folder = Path(path)
        check_whole(folder)
        arguments = {**read_state(folder, "hparams").get("hparams", {}), **overrides}
        try:
            inspect.signature(cls.__init__).bind(None, **arguments)
        except TypeError as error:
            raise TaskError(
                f"{cls.__qualname__} cannot be made from {folder}: {error}. Call save_hyperparameters() in __init__, "
                "or give what is missing: load_from_checkpoint(path, name=...)."
            ) from None
        task = cls(**arguments)
        task.load_weights(folder / WEIGHTS)
        return task


def _asleep(module: nn.Module, ancestor_asleep: bool) -> Iterable[nn.Module]:
    """The modules that `train_mode` leaves in eval mode."""
    parameters = list(module.parameters())
    if parameters:
        sleeps = not module.training and not any(parameter.requires_grad for parameter in parameters)
    else:
        sleeps = not module.training and ancestor_asleep
    if sleeps:
        yield module
    for child in module.children():
        yield from _asleep(child, sleeps if parameters else ancestor_asleep)


def _detached(value: Any) -> Any:
    """A copy of plain containers, so that a later change of the caller's list is not taken for the setting."""
    if type(value) is dict:
        return {key: _detached(item) for key, item in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(_detached(item) for item in value)
    return value
