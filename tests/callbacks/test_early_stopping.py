"""Early stopping: every fresh value counts once, on whatever axis, and the fit ends where the patience does."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from sanctuary_trainer import Callback, CallbackError, SettingsError
from sanctuary_trainer.callbacks import EMA, Checkpoint, EarlyStopping
from sanctuary_trainer.checkpointing import decode, encode
from tests.small_tasks import Line, floats, loader, quiet_trainer

NAN, INF = math.nan, math.inf


class Scripted(Line):
    """Logs the next of these values as "val/score" in each validation, the last one for ever; None logs nothing."""

    def __init__(self, values: Iterable[float | None], learning_rate: float = 1.0) -> None:
        super().__init__(learning_rate)
        self.values = list(values)
        self.validations = 0

    @property
    def value(self) -> float | None:
        return self.values[min(max(self.validations, 1), len(self.values)) - 1]

    def on_evaluation_start(self, run: Any, stage: str) -> None:
        self.validations += stage == "val"

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        if self.value is not None:
            self.log("score", self.value)
        self.log("other", 0.0)


def fit(task: Any, *callbacks: Callback, batches: int = 2, val: Any = True, **settings: Any) -> Any:
    """Fits on `batches` batches of 1 sample an epoch."""
    trainer = quiet_trainer(callbacks=callbacks, **{"max_epochs": 20, **settings})
    validation = loader(floats([1, 2]), 1) if val is True else val
    return trainer.fit(task, loader(floats([1] * batches), 1), validation)


def epochs(values: Iterable[float | None], *callbacks: Callback, **settings: Any) -> int:
    """How many epochs are trained when validation, at each epoch's end, gives these values."""
    steps = fit(Scripted(values), *callbacks, **settings).global_step
    assert steps % 2 == 0
    return int(steps) // 2


def stopper(**settings: Any) -> EarlyStopping:
    return EarlyStopping(**{"monitor": "val/score", "mode": "min", "patience": 2, **settings})


# What counts


def test_a_constant_metric_ends_after_1_good_and_3_bad_values() -> None:
    task = Scripted([1.0])
    result = fit(task, EarlyStopping("val/score", "min", patience=3))
    assert result.global_step == 4 * 2 and task.validations == 4
    assert result.stop_reason == (
        "EarlyStopping: val/score has not improved on 1; values without improvement: 3, the last of them 1 (patience 3)"
    )


@pytest.mark.parametrize("patience", [1, 2, 5])
def test_patience_is_the_number_of_values_without_improvement(patience: int) -> None:
    assert epochs([1.0], stopper(patience=patience)) == 1 + patience


def test_epochs_without_validation_count_nothing() -> None:
    assert epochs([1.0], stopper(), check_val_every_n_epoch=2) == 6


def test_validation_inside_an_epoch_counts_there() -> None:
    task = Scripted([1.0])
    assert fit(task, stopper(), batches=8, val_check_interval=0.25).global_step == 6
    assert task.validations == 3


def test_validation_every_so_many_steps_counts_across_epochs() -> None:
    assert fit(Scripted([1.0]), stopper(), batches=4, val_check_interval=3).global_step == 9


def test_an_improvement_starts_the_count_anew() -> None:
    early = stopper()
    assert epochs([5, 4, 6, 3, 3, 3, 0], early) == 6
    assert (early.best, early.bad_values) == (3, 2)


def test_the_mode_says_which_way_is_better() -> None:
    assert epochs([1, 2, 3, 4, 5, 6, 7], stopper(mode="max"), max_epochs=7) == 7
    assert epochs([1, 2, 3, 4, 5, 6, 7], stopper(mode="min"), max_epochs=7) == 3


def test_only_a_change_of_more_than_min_delta_is_an_improvement() -> None:
    values = [10.0, 9.0, 8.0, 7.0, 6.0]
    assert epochs(values, stopper(min_delta=2.0), max_epochs=5) == 3  # 8.0 is better by 2 and not by more
    early = stopper(min_delta=1.5)
    assert epochs(values, early, max_epochs=5) == 5
    assert early.best == 6.0  # 10, 8, 6: each of 9 and 7 is one bad value


def test_a_validation_that_logs_no_value_counts_nothing() -> None:
    early = stopper()
    assert epochs([1, None, None, 1, None, 1], early, max_epochs=20) == 6


def test_sanity_validation_does_not_count() -> None:
    early = stopper()
    assert epochs([1.0], early, num_sanity_val_steps=2) == 3


class LogsAtTheEnd(Scripted):
    """Logs its value when the validation has ended."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("other", 0.0)

    def on_evaluation_end(self, run: Any, stage: str, metrics: dict[str, float]) -> None:
        self.log("score", self.value)


class LogsTwice(Scripted):
    """Logs its value in the steps, and again when the validation has ended."""

    def on_evaluation_end(self, run: Any, stage: str, metrics: dict[str, float]) -> None:
        self.log("score", self.value)


@pytest.mark.parametrize("kind", [LogsAtTheEnd, LogsTwice])
def test_a_value_that_a_hook_logs_counts_once(kind: Any) -> None:
    assert fit(kind([1.0]), stopper()).global_step == 3 * 2
    assert fit(kind([1.0]), stopper(), batches=8, val_check_interval=0.25).global_step == 3 * 2


def test_a_value_of_one_of_several_loaders_can_be_watched() -> None:
    class Named(Line):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("score", 1.0 if self.run.loader_name == "night" else -self.run.state.epoch)

    loaders = {"day": loader(floats([1])), "night": loader(floats([1]))}
    assert fit(Named(), stopper(monitor="val/night/score"), val=loaders).global_step == 3 * 2
    assert fit(Named(), stopper(monitor="val/day/score"), val=loaders, max_epochs=5).global_step == 5 * 2
    with pytest.raises(SettingsError, match=r"'val/score', which nothing has logged.*Did you mean 'val/day/score'"):
        fit(Named(), stopper(), val=loaders)


class Trains(Line):
    """Logs 1.0 in training, on the given axes, and 1.0 at the end of the epoch; its loss stays 0."""

    def __init__(self, **axes: bool) -> None:
        super().__init__(learning_rate=0.0)
        self.axes = axes

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("score", 1.0, **self.axes)
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self, run: Any) -> None:
        self.log("late", 1.0)


@pytest.mark.parametrize("val", [None, True], ids=["alone", "beside validation"])
@pytest.mark.parametrize("monitor", ["train/loss", "train/loss_epoch", "train/score", "train/late"])
@pytest.mark.parametrize("axes", [{}, {"on_epoch": True}, {"on_step": False, "on_epoch": True}], ids=str)
def test_a_metric_of_training_counts_by_its_value_over_the_epoch(monitor: str, axes: Any, val: Any) -> None:
    result = fit(Trains(**axes), stopper(monitor=monitor), val=val, batches=5, log_every_n_steps=1)
    assert result.global_step == 3 * 5
    assert monitor in result.stop_reason


def test_a_metric_of_training_counts_without_points_within_the_epoch() -> None:
    assert fit(Trains(), stopper(monitor="train/score"), val=None, log_every_n_steps=1000).global_step == 3 * 2


# Values that are not finite


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_the_first_value_that_is_not_finite_ends_the_fit(mode: str, bad: float) -> None:
    task, early = Scripted([1.0, bad]), stopper(mode=mode)
    result = fit(task, early)
    assert result.global_step == 2 * 2
    assert result.stop_reason == f"EarlyStopping: val/score is {bad}"
    assert early.best == 1.0


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_without_the_check_such_a_value_is_one_without_improvement(mode: str, bad: float) -> None:
    early = stopper(mode=mode, check_finite=False)
    assert epochs([1.0, bad], early) == 3
    assert early.best == 1.0


def test_a_metric_that_never_is_finite_ends_the_fit_too() -> None:
    early = stopper(check_finite=False)
    result = fit(Scripted([NAN]), early)
    assert result.global_step == 2 * 2 and early.best is None
    assert "has not been finite" in result.stop_reason
    assert epochs([NAN, 1.0, 2.0, 2.0], stopper(check_finite=False)) == 4


def test_a_threshold_that_is_reached_ends_the_fit() -> None:
    early = stopper(mode="max", stopping_threshold=0.9)
    result = fit(Scripted([0.5, 0.8, 0.9, 0.95]), early)
    assert result.global_step == 3 * 2
    assert result.stop_reason == "EarlyStopping: val/score is 0.9 and has reached 0.9"
    assert epochs([5, 4, 3, 2], stopper(stopping_threshold=3.5)) == 3


# When the stop is obeyed


def test_min_epochs_holds_the_stop_back() -> None:
    assert epochs([1.0], stopper(), min_epochs=6) == 6
    assert epochs([1.0], stopper(patience=1), min_epochs=5, check_val_every_n_epoch=2) == 5
    # The last validation of an epoch lies before its end.
    assert fit(Scripted([1.0]), stopper(), batches=4, min_epochs=3, val_check_interval=0.5).global_step == 12


def test_min_steps_holds_the_stop_back_until_the_next_value_or_epoch() -> None:
    assert fit(Scripted([1.0]), stopper(), min_steps=9).global_step == 10
    assert fit(Scripted([1.0]), stopper(), batches=20, min_steps=9, val_check_interval=2).global_step == 10


def test_a_stop_that_is_held_back_is_forgotten_when_the_metric_improves() -> None:
    assert epochs([3, 3, 3, 3, 2, 1, 1, 1], stopper(), min_epochs=5) == 8


def test_of_two_the_first_that_has_had_enough_ends_the_fit() -> None:
    class Two(Line):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            self.log_dict({"flat": 1.0, "falling": -self.run.state.epoch})

    both = [stopper(monitor="val/falling"), stopper(monitor="val/flat", patience=3)]
    result = fit(Two(), *both)
    assert result.global_step == 4 * 2 and "val/flat" in result.stop_reason
    assert [early.bad_values for early in both] == [0, 3]
    assert {early.state_key for early in both} == {
        "EarlyStopping(monitor='val/falling', mode='min')",
        "EarlyStopping(monitor='val/flat', mode='min')",
    }
    with pytest.raises(CallbackError, match="Two callbacks are EarlyStopping"):
        quiet_trainer(max_epochs=1, callbacks=[stopper(), stopper(patience=9)])


# A monitor that is not there


def test_a_monitor_that_the_first_validation_did_not_log_is_an_error_with_the_nearest_name() -> None:
    task = Scripted([1.0])
    with pytest.raises(SettingsError) as caught:
        fit(task, stopper(monitor="val/skore"))
    assert str(caught.value) == (
        "EarlyStopping watches 'val/skore', which nothing has logged; there are train/loss_epoch, val/other, "
        "val/score. Did you mean 'val/score'? (strict=False goes on without it.)"
    )
    assert len(task.steps) == 2


def test_the_error_comes_with_the_first_validation_inside_an_epoch() -> None:
    task = Scripted([1.0])
    with pytest.raises(SettingsError, match="Did you mean 'val/score'"):
        fit(task, stopper(monitor="val/scores"), batches=20, val_check_interval=3)
    assert len(task.steps) == 3


def test_the_error_waits_for_the_first_validation() -> None:
    task = Scripted([1.0])
    with pytest.raises(SettingsError):
        fit(task, stopper(monitor="val/scores"), check_val_every_n_epoch=3)
    assert len(task.steps) == 3 * 2


@pytest.mark.parametrize("monitor", ["train/losss", "losses/total"])
def test_a_monitor_of_training_is_looked_for_at_the_end_of_the_first_epoch(monitor: str) -> None:
    task = Scripted([1.0])
    with pytest.raises(SettingsError, match="which nothing has logged; there are"):
        fit(task, stopper(monitor=monitor), batches=20, val_check_interval=3)
    assert len(task.steps) == 20


def test_a_series_of_steps_alone_is_named_as_such() -> None:
    with pytest.raises(SettingsError, match="'train/lr', which has values of single steps and none of an epoch"):
        fit(Scripted([1.0]), stopper(monitor="train/lr"), log_every_n_steps=1)


def test_without_strict_one_warning_is_given() -> None:
    with pytest.warns(UserWarning, match="Did you mean 'val/score'") as caught:
        result = fit(Scripted([1.0]), stopper(monitor="val/skore", strict=False), max_epochs=4)
    assert result.stop_reason == "max_epochs"
    assert len([w for w in caught if "EarlyStopping" in str(w.message)]) == 1


def test_sanity_validation_warns_with_the_nearest_name() -> None:
    with (
        pytest.warns(UserWarning, match="'val/skore', which sanity validation did not log. Did you mean 'val/score'"),
        pytest.raises(SettingsError),
    ):
        fit(Scripted([1.0]), stopper(monitor="val/skore"), num_sanity_val_steps=1)


@pytest.mark.parametrize("monitor", ["val/score", "val/score_ema", "train/loss"])
def test_sanity_validation_warns_of_nothing_that_will_come(monitor: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = fit(Scripted([1.0], 0.0), stopper(monitor=monitor), EMA(), num_sanity_val_steps=1)
    assert result.global_step == 3 * 2


def test_without_validation_a_monitor_of_it_warns_at_the_start_and_fails_after_the_first_epoch() -> None:
    task = Scripted([1.0])
    with (
        pytest.warns(UserWarning, match="'val/score', and this fit has nothing to validate with"),
        pytest.raises(SettingsError, match="which nothing has logged"),
    ):
        fit(task, stopper(), val=None)
    assert len(task.steps) == 2


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"monitor": "val_loss"}, "monitor='val_loss'; a full name with its stage"),
        ({"monitor": None}, "monitor=None"),
        ({"mode": "auto"}, 'mode=\'auto\'; "min" or "max" was expected'),
        ({"mode": None}, "mode=None"),
        ({"patience": 0}, "patience=0; a whole number of at least 1"),
        ({"patience": 2.5}, "patience=2.5"),
        ({"patience": True}, "patience=True"),
        ({"min_delta": -0.1}, "min_delta=-0.1; a number of at least 0"),
        ({"min_delta": NAN}, "min_delta=nan"),
        ({"stopping_threshold": "0.9"}, "stopping_threshold='0.9'"),
        ({"stopping_threshold": INF}, "stopping_threshold=inf"),
        ({"strict": "no"}, "strict='no'; True or False"),
    ],
    ids=str,
)
def test_a_wrong_argument_is_refused_when_it_is_made(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(SettingsError) as caught:
        stopper(**wrong)
    assert told in str(caught.value) and str(caught.value).startswith("EarlyStopping got ")


def test_the_mode_must_be_given() -> None:
    with pytest.raises(TypeError, match="mode"):
        EarlyStopping("val/loss")  # type: ignore[call-arg]


# Its state


def stored(callback: Callback) -> dict[str, Any]:
    """The callback's state as it comes back from a file, whose keys may be in any order."""
    tensors: dict[str, Any] = {}
    text = json.dumps(encode(callback.state_dict(), tensors), sort_keys=True, allow_nan=False)
    state: dict[str, Any] = decode(json.loads(text), tensors)
    return state


def in_one_run(values: Iterable[float | None], *callbacks: Callback, resume: Any = None, **settings: Any) -> Any:
    """Fits in the folder runs/one, where `resume="last"` goes on; validation gives these values from now on."""
    trainer = quiet_trainer(callbacks=[*callbacks, Checkpoint()], **{"max_epochs": 20, "run_name": "one", **settings})
    data = loader(floats([1, 1]), 1), loader(floats([1, 2]), 1)
    return trainer.fit(Scripted(values), *data, resume=resume)


def test_a_resumed_run_goes_on_counting_from_its_best_value() -> None:
    in_one_run([0.9, 1.0, 1.0], stopper(patience=3), max_epochs=3)
    early = stopper(patience=3)
    result = in_one_run([1.0], early, resume="last")
    assert result.global_step == 4 * 2
    assert (early.best, early.bad_values) == (0.9, 3)


def test_a_run_that_it_ended_stays_ended_and_goes_on_with_more_patience() -> None:
    first = in_one_run([1.0], stopper())
    again = in_one_run([0.5], stopper(), resume="last")
    assert first.global_step == again.global_step == 3 * 2
    assert first.stop_reason == again.stop_reason
    early = stopper(patience=3)
    longer = in_one_run([0.5, 0.7], early, resume="last")
    assert longer.global_step == 7 * 2 and early.best == 0.5


def test_two_get_their_own_state_back_in_any_order() -> None:
    def pair() -> list[EarlyStopping]:
        return [stopper(patience=9), stopper(monitor="val/other", mode="max", patience=9)]

    in_one_run([3.0, 4.0, 2.0, 5.0], *pair(), max_epochs=4)
    score, other = pair()
    in_one_run([5.0], other, score, resume="last", max_epochs=5)
    assert (score.best, score.bad_values) == (2.0, 2)
    assert (other.best, other.bad_values) == (0.0, 4)


def continued(state: dict[str, Any], **settings: Any) -> EarlyStopping:
    """A stopper that is given this state where a continued run gives it: after setup, before on_fit_start."""

    class Continued(EarlyStopping):
        def setup(self, run: Any) -> None:
            super().setup(run)
            self.load_state_dict(state)

    return Continued(**{"monitor": "val/score", "mode": "min", "patience": 2, **settings})


def after(values: list[float], **settings: Any) -> dict[str, Any]:
    """The state after a validation for each of these values."""
    early = stopper(**settings)
    fit(Scripted(values), early, max_epochs=len(values))
    return stored(early)


def test_a_continued_run_goes_on_counting() -> None:
    state = after([0.9, 1.0, 1.0], patience=3)
    early = continued({**state, "moment": None}, patience=3)
    result = fit(Scripted([1.0]), early)
    assert result.global_step == 1 * 2
    assert early.best == 0.9 and early.bad_values == 3


@pytest.mark.parametrize(
    ("values", "settings"), [([1.0], {}), ([1.0, NAN], {}), ([0.1], {"stopping_threshold": 0.5})], ids=str
)
def test_whatever_the_reason_was_it_still_is_one(values: list[float], settings: dict[str, Any]) -> None:
    ended = stopper(**settings)
    reason = fit(Scripted(values), ended).stop_reason
    result = fit(Scripted([0.0]), continued(stored(ended), **settings))
    assert result.stop_reason == reason
    assert result.global_step == 0


def test_with_more_patience_it_goes_on() -> None:
    state = after([1.0, 1.0, 1.0])
    assert fit(Scripted([1.0]), continued({**state, "moment": None}, patience=4)).global_step == 2 * 2
    # Without the check, or with another threshold, it goes on too.
    state = after([1.0, NAN])
    result = fit(Scripted([0.5]), continued({**state, "moment": None}, check_finite=False), max_epochs=3)
    assert "the last of them 0.5" in result.stop_reason


def test_a_validation_that_a_continued_run_repeats_counts_once() -> None:
    state = after([1.0])
    assert state["moment"] == ["val", 0, 2]
    assert fit(Scripted([1.0]), continued(state)).global_step == 3 * 2


def test_a_second_fit_begins_anew() -> None:
    early = stopper()
    trainer = quiet_trainer(max_epochs=20, callbacks=[early])
    for value in (1.0, 5.0):
        task = Scripted([value])
        assert trainer.fit(task, loader(floats([1, 1]), 1), loader(floats([1]))).global_step == 3 * 2
        assert early.best == value
    assert trainer.validate(task, loader(floats([1]))) == {"val/score": 5.0, "val/other": 0.0}
    assert (early.best, early.bad_values) == (5.0, 2)  # what another verb evaluates does not count


def test_what_it_decides_does_not_hang_on_its_place_in_the_list() -> None:
    class Other(Callback):
        def on_evaluation_end(self, run: Any, stage: str, metrics: dict[str, float]) -> None:
            run.log("bonus", 1.0)

    make: list[Callable[[], Callback]] = [lambda: stopper(monitor="val/bonus"), Other]
    for order in (make, make[::-1]):
        assert fit(Scripted([1.0]), *(one() for one in order)).global_step == 3 * 2
