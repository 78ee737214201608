"""Policies around a run: what a callback can do and when, all callbacks as one, and callbacks by name.

The hooks in the order in which they fire (the task's own hook first, then the callbacks in the order given):

    fit
      setup                                   the task is on its device; not wrapped, no optimizers yet
      on_fit_start                            all is built, nothing is trained
      evaluation                              sanity validation; not in a run that is continued
      for each epoch
        on_train_epoch_start                  not again in an epoch that is continued after a resume
        for each window
          for each batch of it on this rank
            on_train_batch_start              the batch is on the device
              forward, backward, in pieces if memory asks
            on_train_batch_end
          on_before_optimizer_step            gradients are complete and not yet clipped
            clip, optimizer step, schedulers
          on_train_step_end                   the step is counted in run.state
          on_log                              every log_every_n_steps steps
          evaluation                          where validation falls on this step
          on_save_point
        evaluation                            where validation falls on the epoch's end
        on_log                                the epoch's values
        on_train_epoch_end
        on_log, on_save_point
      on_exception                            only when something was raised
      on_fit_end                              always
      teardown                                always

    evaluation (inside fit; in validate and test between setup and teardown)
      on_evaluation_start
      for each batch of each loader: on_evaluation_batch_end
      on_log                                  inside fit
      on_evaluation_end

    predict (between setup and teardown)
      for each batch: on_predict_batch_end

Hooks fire on every rank, those of a batch on the ranks that have it: who prints or writes asks `run.is_main`.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from sanctuary_trainer.errors import CallbackError

if TYPE_CHECKING:
    from torch import Tensor

    from sanctuary_trainer.clock import Clock
    from sanctuary_trainer.run import Run


class Callback:
    """One policy. Subclass it and write the hooks you need; those you leave out cost nothing.

    `identifying` names the attributes that tell two callbacks of one class apart, e.g. `("monitor",)`: two of one
    class with equal values are refused, and each one's state is stored under both, so that order does not matter.
    """

    identifying: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        refuse_unknown_hooks(cls)

    @property
    def state_key(self) -> str:
        """The name under which this callback's state is stored, e.g. `Best(monitor='val/accuracy')`."""
        settings = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.identifying)
        return f"{type(self).__qualname__}({settings})"

    def setup(self, run: Run) -> None:
        """Every verb begins: the task is on its device, neither wrapped nor compiled; optimizers are not built."""

    def on_fit_start(self, run: Run) -> None:
        """Everything is built and nothing is trained; before sanity validation."""

    def on_train_epoch_start(self, run: Run) -> None:
        """Epoch `run.state.epoch` begins; not fired again in an epoch that a resumed run continues."""

    def on_train_batch_start(self, run: Run, batch: Any, batch_idx: int) -> None:
        """Before forward of a batch that is on the device. batch_idx: its round in the epoch, from 0."""

    def on_train_batch_end(self, run: Run, batch: Any, batch_idx: int, loss: Tensor | None) -> None:
        """After backward of the batch as loaded; once, also when it ran in pieces.

        loss: 0-d, detached, on the device, as the user returned it; None when the step left the batch out. Reading its
        value (`.item()`) waits for the device; the recorded loss is in `run.metrics["train/loss"]`.
        """

    def on_before_optimizer_step(self, run: Run) -> None:
        """The window's gradients are complete and equal on all ranks, and not yet clipped."""

    def on_train_step_end(self, run: Run) -> None:
        """An update was made and is counted in `run.state.global_step`."""

    def on_train_epoch_end(self, run: Run) -> None:
        """The epoch's last window is done, and the validation that falls on its end."""

    def on_evaluation_start(self, run: Run, stage: str) -> None:
        """An evaluation begins. stage: "sanity", "val" or "test"."""

    def on_evaluation_batch_end(
        self, run: Run, stage: str, batch: Any, outputs: Any, sample_indices: Sequence[Any] | None
    ) -> None:
        """After a batch of evaluation, not of its repeats (`run.variants`). outputs: what the step returned.

        sample_indices: the keys in the data set of the batch's samples; None where they are not known (streams).
        """

    def on_evaluation_end(self, run: Run, stage: str, metrics: dict[str, float]) -> None:
        """An evaluation ended. metrics: its values over all ranks, with their prefix (`val/accuracy`)."""

    def on_predict_batch_end(self, run: Run, batch: Any, outputs: Any, sample_indices: Sequence[Any] | None) -> None:
        """After a batch of prediction. outputs: what `predict_step` returned; sample_indices as in evaluation."""

    def on_log(self, run: Run, values: dict[str, float], step: int) -> None:
        """Values were reduced over all ranks and go to the trackers. step: the global_step they belong to."""

    def on_save_point(self, run: Run) -> None:
        """After everything else at a boundary of the run (a step, an epoch): what is saved here can be continued."""

    def saves_at(self, step: int) -> bool:
        """Whether `on_save_point` may ask for a checkpoint after this step, the same on all ranks.

        Epochs' ends, the run's end, validations and save points that are `save_asked` need not be told. Ranks tell each
        other of errors before a checkpoint: an on_save_point that does not say here when it saves costs every step.
        """
        return True

    def on_exception(self, run: Run, exception: BaseException) -> None:
        """Something was raised, KeyboardInterrupt included; it goes on to the caller after teardown."""

    def on_fit_end(self, run: Run) -> None:
        """The last hook of every fit, also of one that failed; `run.state.stop_reason` says why it ended."""

    def teardown(self, run: Run) -> None:
        """Every verb ends, also after an exception. Give back what setup took."""

    def state_dict(self) -> dict[str, Any]:
        """What a continued run needs of this callback: numbers, strings, tensors, lists and dicts of them.

        Asked on rank 0 alone, whose state goes to all ranks: no collective here.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes back what `state_dict` gave."""


HOOKS: tuple[str, ...] = tuple(
    name for name in vars(Callback) if name.startswith("on_") or name in ("setup", "teardown")
)

# Every hook of these fires in every callback even if the one before it raised: files and bars must be closed.
# At a save point all ranks must know whether checkpoints follow.
_ALWAYS = ("on_save_point", "on_exception", "on_fit_end", "teardown")

# The hooks of training whose time can be told by class, and the lap in which they stand.
_TIMED = {
    "on_train_epoch_start": "callbacks",
    "on_train_batch_start": "callbacks",
    "on_train_batch_end": "callbacks",
    "on_before_optimizer_step": "callbacks",
    "on_train_step_end": "callbacks",
    "on_train_epoch_end": "callbacks",
    "on_log": "logging",
    "on_save_point": "checkpoint",
}

# What to write instead of hooks of Lightning and transformers that have another name here.
_ELSEWHERE = {
    "on_after_batch_to_device": "on_after_batch_transfer",
    "setup": "on_predict_start on_predict_epoch_start on_init_end",
    "on_fit_start": "on_train_start on_train_begin",
    "on_train_epoch_start": "on_epoch_begin on_epoch_start",
    "on_train_batch_start": "on_before_backward on_before_batch_transfer on_after_batch_transfer on_step_begin",
    "on_train_batch_end": "on_after_backward on_substep_end",
    "on_before_optimizer_step": "on_pre_optimizer_step",
    "on_train_step_end": "on_before_zero_grad on_optimizer_step on_step_end",
    "on_evaluation_start": "on_sanity_check_start on_validation_start on_validation_epoch_start "
    "on_validation_batch_start on_validation_model_eval on_test_start on_test_epoch_start on_test_batch_start",
    "on_evaluation_batch_end": "on_validation_batch_end on_test_batch_end on_prediction_step",
    "on_evaluation_end": "on_sanity_check_end on_validation_end on_validation_epoch_end on_validation_model_train "
    "on_test_end on_test_epoch_end on_evaluate",
    "on_predict_batch_end": "on_predict_batch_start",
    "on_save_point": "on_save",
    "on_exception": "on_keyboard_interrupt",
    "on_fit_end": "on_train_end",
    "teardown": "on_predict_epoch_end on_predict_end on_predict",
    "state_dict": "on_save_checkpoint",
    "load_state_dict": "on_load_checkpoint",
}


def refuse_unknown_hooks(cls: type, also: Sequence[str] = ()) -> None:
    """Refuses a class with an `on_...` method that no loop would ever call.

    also: names that this kind of class may define besides the hooks.
    Raises CallbackError, which names the method and the hook to use instead.
    """
    known = (*HOOKS, *also)
    for base in cls.__mro__:
        for name, value in vars(base).items():
            method = callable(value) or isinstance(value, classmethod | functools.partialmethod)
            if name.startswith("on_") and method and name not in known:
                raise CallbackError(
                    f"{base.__qualname__}.{name} is not a hook and would never be called. {_instead_of(name, also)}"
                )


def _instead_of(name: str, also: Sequence[str]) -> str:
    """What to write instead of the unknown hook `name`, as a sentence."""
    known = (*HOOKS, *also)
    usable = (*known, "state_dict", "load_state_dict")
    renamed = (ours for ours, theirs in _ELSEWHERE.items() if ours in usable and name in theirs.split())
    instead = next(iter([*renamed, *difflib.get_close_matches(name, known, n=1)]), None)
    if instead is None:
        return f"The hooks are {', '.join(known)}."
    if instead.endswith("state_dict") and also:
        return "What is registered as a buffer of the task is saved and loaded with it."
    return f"Use {_signature(instead)}." if hasattr(Callback, instead) else f"Use {instead}."


def _signature(hook: str) -> str:
    """How `hook` is written, e.g. `on_log(self, run, values, step)`."""
    return f"{hook}({', '.join(inspect.signature(getattr(Callback, hook)).parameters)})"


class Callbacks:
    """A task's own hooks and all callbacks as one: each hook is an attribute to call.

    The attribute is made once, here: nothing, the one bound method or a chain of them, since four of them are called in
    every step. Iterating gives the callbacks, without the task.

    task: a VisionTask; of its methods those count that are named as a hook, `setup` excepted (a task's takes the verb).
    callbacks: instances or registered names.
    Raises CallbackError for two callbacks of one state_key and for a hook that cannot take its arguments.
    """

    setup: Callable[[Run], None]
    on_fit_start: Callable[[Run], None]
    on_train_epoch_start: Callable[[Run], None]
    on_train_batch_start: Callable[[Run, Any, int], None]
    on_train_batch_end: Callable[[Run, Any, int, Tensor | None], None]
    on_before_optimizer_step: Callable[[Run], None]
    on_train_step_end: Callable[[Run], None]
    on_train_epoch_end: Callable[[Run], None]
    on_evaluation_start: Callable[[Run, str], None]
    on_evaluation_batch_end: Callable[[Run, str, Any, Any, Sequence[Any] | None], None]
    on_evaluation_end: Callable[[Run, str, dict[str, float]], None]
    on_predict_batch_end: Callable[[Run, Any, Any, Sequence[Any] | None], None]
    on_log: Callable[[Run, dict[str, float], int], None]
    on_save_point: Callable[[Run], None]
    on_exception: Callable[[Run, BaseException], None]
    on_fit_end: Callable[[Run], None]
    teardown: Callable[[Run], None]

    def __init__(self, task: object, callbacks: Iterable[Callback | str] = ()) -> None:
        self._callbacks = tuple(get_callback(callback) for callback in callbacks)
        keys: set[str] = set()
        for callback in self._callbacks:
            if callback.state_key in keys:
                raise CallbackError(
                    f"Two callbacks are {callback.state_key}: their states could not be told apart. Leave one out, or "
                    f"name the settings that differ in {type(callback).__qualname__}.identifying."
                )
            keys.add(callback.state_key)
        self._calls: dict[str, list[Callable[..., None]]] = {}
        for hook in HOOKS:
            calls = [getattr(owner, hook) for owner in (task, *self._callbacks) if _overrides(owner, hook)]
            for call in calls:
                _refuse_wrong_signature(hook, call)
            self._calls[hook] = calls
            setattr(self, hook, _as_one(calls, always=hook in _ALWAYS))
        self._savers = [callback for callback in self._callbacks if _overrides(callback, "on_save_point")]
        if task is not None and _overrides(task, "on_save_point"):
            self._savers.append(Callback())  # of a task it is not known

    def saves_at(self, step: int) -> bool:
        """Whether somebody may ask for a checkpoint after this step."""
        return any(saver.saves_at(step) for saver in self._savers)

    def has(self, hook: str) -> bool:
        """Whether somebody overrides `hook`; lets a loop leave out what is gathered for that hook alone."""
        return bool(self._calls[hook])

    def time_with(self, clock: Clock) -> None:
        """From now on count the time of the training hooks by the class they belong to: lap "callbacks:EMA"."""
        for hook, lap in _TIMED.items():
            calls = [_timed(call, clock, lap) for call in self._calls[hook]]
            setattr(self, hook, _as_one(calls, always=hook in _ALWAYS))

    def __iter__(self) -> Iterator[Callback]:
        return iter(self._callbacks)


def _overrides(owner: object, hook: str) -> bool:
    """Whether `owner`, a callback or a task, brings a hook of its own."""
    if isinstance(owner, Callback):
        return getattr(type(owner), hook) is not getattr(Callback, hook)
    return hook != "setup" and callable(getattr(type(owner), hook, None))


def _refuse_wrong_signature(hook: str, call: Callable[..., None]) -> None:
    """A hook that cannot take what the loop gives would fail hours into a run; here it fails before."""
    taken = inspect.signature(call)
    try:
        taken.bind(*list(inspect.signature(getattr(Callback, hook)).parameters)[1:])
    except TypeError:
        name = getattr(call, "__qualname__", hook)
        raise CallbackError(f"{name} takes {taken}, but the hook is {_signature(hook)}: write it so.") from None


def _nobody(*arguments: object) -> None:
    """A hook that nobody overrides."""


def _timed(call: Callable[..., None], clock: Clock, lap: str) -> Callable[..., None]:
    name = f"{lap}:{type(getattr(call, '__self__', call)).__name__}"

    def timed(*arguments: object) -> None:
        began = clock.enter()
        call(*arguments)
        clock.leave(name, began)

    return timed


def _as_one(calls: Sequence[Callable[..., None]], *, always: bool) -> Callable[..., None]:
    """All `calls` as one callable; with `always` each is made, also after an error (the last one is raised)."""
    if not calls:
        return _nobody
    if len(calls) == 1:
        return calls[0]

    def one_after_the_other(*arguments: object) -> None:
        for call in calls:
            call(*arguments)

    def each_in_any_case(*arguments: object) -> None:
        try:
            calls[0](*arguments)
        finally:
            _as_one(calls[1:], always=True)(*arguments)

    return each_in_any_case if always else one_after_the_other


# The bar comes first: it ends its line before the result table is printed.
DEFAULT_CALLBACKS = ("progress_bar", "summary", "checkpoint")

# Written out so that a name costs the import of its module only when it is used.
_BUILT_IN = {
    "checkpoint": "sanctuary_trainer.callbacks.checkpoint:Checkpoint",
    "classification_dashboard": "sanctuary_trainer.callbacks.classification_dashboard:ClassificationDashboard",
    "oom_fallback": "sanctuary_trainer.callbacks.oom_fallback:OOMFallback",
    "early_stopping": "sanctuary_trainer.callbacks.early_stopping:EarlyStopping",
    "ema": "sanctuary_trainer.callbacks.ema:EMA",
    "gradient_checkpointing": "sanctuary_trainer.callbacks.gradient_checkpointing:GradientCheckpointing",
    "load_balance": "sanctuary_trainer.callbacks.load_balance:LoadBalance",
    "progress_bar": "sanctuary_trainer.callbacks.progress_bar:ProgressBar",
    "summary": "sanctuary_trainer.callbacks.summary:Summary",
    "throughput": "sanctuary_trainer.callbacks.throughput:Throughput",
}
_registered: dict[str, type[Callback]] = {}

C = TypeVar("C", bound=Callback)


def register_callback(name: str) -> Callable[[type[C]], type[C]]:
    """Gives a callback class a name by which it can be asked for: `@register_callback("my_policy")`.

    Where it is asked for by its name alone, the class must be constructible without arguments. Defining the same class
    again (a notebook cell) replaces it. Raises CallbackError when the name belongs to another class.
    """

    def register(cls: type[C]) -> type[C]:
        owner = _registered.get(name)
        same = owner is not None and (owner.__module__, owner.__qualname__) == (cls.__module__, cls.__qualname__)
        if name in _BUILT_IN or (owner is not None and not same):
            raise CallbackError(
                f"The name {name!r} belongs to {_BUILT_IN.get(name) or owner}; give {cls.__qualname__} another."
            )
        _registered[name] = cls
        return cls

    return register


def get_callback(callback: object) -> Callback:
    """The callback itself, or a new one of the class that has this name. Raises CallbackError for anything else."""
    if isinstance(callback, Callback):
        return callback
    if not isinstance(callback, str):
        hint = f"give an instance, {callback.__qualname__}()" if isinstance(callback, type) else "subclass Callback"
        raise CallbackError(f"{callback!r} is neither a Callback nor the name of one: {hint}.")
    cls = callback_class(callback)
    parameters = inspect.signature(cls).parameters.values()
    demanded = [each.name for each in parameters if each.default is each.empty and each.kind is not each.VAR_KEYWORD]
    if demanded:
        raise CallbackError(
            f"The callback {callback!r} needs {', '.join(demanded)}: give an instance, {cls.__name__}(...)."
        )
    return cls()


def callback_class(name: str) -> type[Callback]:
    """The class of this name: registered, built in (also by the class's own name), or an entry point of an installed
    package (group "sanctuary_trainer.callbacks"). Raises CallbackError for anything else."""
    cls: Any = _registered.get(name)
    if cls is None:
        own = {path.rpartition(":")[2]: path for path in _BUILT_IN.values()}
        path = _BUILT_IN.get(name) or own.get(name)
        cls = _load_entry_point(name) if path is None else pkgutil.resolve_name(path)
    if not (isinstance(cls, type) and issubclass(cls, Callback)):
        raise CallbackError(f"The callback name {name!r} leads to {cls!r}, which is not a subclass of Callback.")
    return cls


def _load_entry_point(name: str) -> object:
    from importlib.metadata import entry_points  # 20 ms, spent only on a name that is not ours

    found = {point.name: point for point in entry_points(group="sanctuary_trainer.callbacks")}
    if name in found:
        return found[name].load()
    names = sorted({*_registered, *_BUILT_IN, *found})
    nearest = difflib.get_close_matches(name, names, n=1)
    hint = f"Did you mean {nearest[0]!r}?" if nearest else f"The names are {', '.join(names)}."
    raise CallbackError(f"No callback is called {name!r}. {hint}")


def with_defaults(callbacks: Iterable[Callback | str]) -> list[Callback]:
    """The default callbacks, less those of a kind that is given, and then the given ones.

    One that watches a metric, or keeps weights only, does another work than the default of its kind and stands beside.
    """
    given = [get_callback(callback) for callback in callbacks]
    instead = [each for each in given if not (getattr(each, "monitor", None) or getattr(each, "weights_only", False))]
    defaults = [get_callback(name) for name in DEFAULT_CALLBACKS]
    return [one for one in defaults if not any(isinstance(other, type(one)) for other in instead)] + given
