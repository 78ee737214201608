"""The state of all optimizers and schedulers: taken, compared with a new configuration, and put back bit for bit.

    configuration   at the start of the run: classes, groups, settings as {"lr": 0.1, "StepLR.gamma": 0.5}
    take            the groups as they are by now, and what every optimizer and scheduler says of itself
    put_back        check everything -> schedulers -> groups as they were -> optimizers -> what their loading cast

Parameters go by their names in the task without those of wrappers (torch.compile), so neither their order in a new
configuration nor what is wrapped matters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any

import torch
from torch.optim import Optimizer

from sanctuary_trainer.configured import Schedule
from sanctuary_trainer.errors import CheckpointError
from sanctuary_trainer.plain import copied, is_plain, tensors_in
from sanctuary_trainer.scheduler_state import (
    check_functions,
    class_name,
    load_schedule,
    schedule_class,
    schedule_settings,
    take_schedule,
    taking_back,
    without_live,
)
from sanctuary_trainer.weights import plain_names

_Groups = list[dict[str, list[list[int]]]]  # shape and strides of the parameters of each group, by their names


def learning_rates(groups: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The learning rates that there are, by `lr`, or `lr/NAME` of a named group among several, or `lr/INDEX`."""
    with_rate = zip(_suffixes(groups), groups, strict=True)
    # transformers' Adafactor has None where it chooses its own
    return {f"lr{suffix}": float(group["lr"]) for suffix, group in with_rate if group.get("lr") is not None}


def configuration(
    optimizers: Sequence[Optimizer],
    schedules: Sequence[Schedule],
    task: torch.nn.Module,
    scaler: torch.amp.GradScaler | None,
) -> dict[str, Any]:
    """What is compared on resume: the classes, groups and settings that configure_optimizers has given."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    settings: dict[str, Any] = {}
    for suffix, group in zip(_suffixes(groups), groups, strict=True):
        rate = {"lr": group.get("initial_lr", group["lr"])} if "lr" in group else {}  # a warm-up has changed lr by now
        rest = {key: value for key, value in group.items() if key not in ("params", "param_names", "lr", "initial_lr")}
        settings |= {f"{key}{suffix}": value for key, value in (rate | rest).items()}
    for number, schedule in enumerate(schedules):
        label = type(schedule.scheduler).__name__ + (f"[{number}]" if len(schedules) > 1 else "")
        settings |= {f"{label}.{key}": value for key, value in schedule_settings(schedule).items()}
    if scaler is not None and scaler.is_enabled():
        for key in ("growth_factor", "backoff_factor", "growth_interval"):
            settings[f"GradScaler.{key}"] = getattr(scaler, f"get_{key}")()
    return {
        "optimizers": [class_name(optimizer) for optimizer in optimizers],
        "schedulers": [schedule_class(schedule) for schedule in schedules],
        "groups": [_groups(optimizer, task) for optimizer in optimizers],
        "settings": {key: copied(value) for key, value in settings.items() if _is_setting(value)},
    }


def take(optimizers: Sequence[Optimizer], schedules: Sequence[Schedule], task: torch.nn.Module) -> dict[str, Any]:
    """The state of all, as `checkpointing.encode` takes it. The tensors are those in use.

    Raises:
        CheckpointError: an optimizer holds a parameter that is not the task's, so it has no name.
    """
    return {
        "optimizers": [{"groups": _groups(o, task), "state": without_live(o.state_dict())} for o in optimizers],
        "schedules": [take_schedule(schedule) for schedule in schedules],
    }


def put_back(
    saved: Mapping[str, Any],
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    optimizers: Sequence[Optimizer],
    schedules: Sequence[Schedule],
    task: torch.nn.Module,
) -> list[str]:
    """Put a state into freshly configured optimizers and schedulers.

    Args:
        saved: from `take`.
        before: the configuration at the start of the run from which it was taken.
        now: the configuration of the fresh ones.
        optimizers: the fresh ones, and so the next.
        schedules: theirs.
        task: of the same parameters.

    Returns:
        What differs from `before`, one text each.

    Raises:
        CheckpointError: the two do not fit, and nothing was changed; or an object's own load_state_dict failed.
    """
    plain = plain_names(task)
    parameters = {plain(name): parameter for name, parameter in task.named_parameters()}
    _check(saved, before, now, parameters)
    for schedule, state in zip(schedules, saved["schedules"], strict=True):
        check_functions(schedule, state)
    texts = _differences(before["settings"], now["settings"])
    # Optimizers last: transformers' GreedyLR writes the rates that it knows into the groups.
    for schedule, state in zip(schedules, saved["schedules"], strict=True):
        texts += load_schedule(schedule, state)
    for optimizer, own in zip(optimizers, saved["optimizers"], strict=True):
        with taking_back(optimizer):
            _load_optimizer(optimizer, own["groups"], own["state"], parameters)
    return texts


def load_scaler(scaler: torch.amp.GradScaler | None, saved: Mapping[str, Any] | None) -> list[str]:
    """Put back the state of fp16's scaler; returns what is to be told when there is one on one side only."""
    scales = scaler is not None and scaler.is_enabled()
    if scaler is not None and scales and saved:
        scaler.load_state_dict(dict(saved))
    elif scales or saved:
        was, now = (state["scale"] if state else "none" for state in (saved, scaler and scaler.state_dict()))
        return [f"loss scale of fp16: {was} -> {now}"]
    return []


def _suffixes(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """What tells the settings of one group from another's: nothing where there is one group, else its name or index."""
    names: list[str] = []
    for index, group in enumerate(groups):
        name = str(group.get("name", index))
        if name in names:
            name = next(free for n in count(2) if (free := f"{name}_{n}") not in names)
        names.append(name)
    return [f"/{name}" if len(groups) > 1 else "" for name in names]


def _groups(optimizer: Optimizer, task: torch.nn.Module) -> _Groups:
    plain = plain_names(task)
    names = {id(parameter): plain(name) for name, parameter in task.named_parameters()}
    for parameter in (p for group in optimizer.param_groups for p in group["params"] if id(p) not in names):
        raise CheckpointError(
            f"{class_name(optimizer)} holds a parameter of shape {tuple(parameter.shape)} that is not the task's, so "
            "there is no name to store its state under. Take it out of the optimizer when it leaves the task."
        )
    return [
        {names[id(p)]: [list(p.shape), list(p.stride())] for p in group["params"]} for group in optimizer.param_groups
    ]


def _places(groups: _Groups) -> dict[str, str]:
    return {name: f"group {number}" for number, group in enumerate(groups) for name in group}


def _check(
    saved: Mapping[str, Any], before: Mapping[str, Any], now: Mapping[str, Any], parameters: Mapping[str, torch.Tensor]
) -> None:
    for what in ("optimizers", "schedulers"):
        if before[what] != now[what]:
            theirs, ours = (", ".join(side[what]) or "none" for side in (before, now))
            raise CheckpointError(
                f"The {what} that configure_optimizers returned are {ours}; the checkpoint's are {theirs}. Return "
                "those to resume, or start a new run from the checkpoint's weights."
            )
    for number, name in enumerate(now["optimizers"]):
        groups = saved["optimizers"][number]["groups"]
        expected, met = _places(before["groups"][number]), _places(now["groups"][number])
        if met not in (expected, _places(groups)):  # groups added during the run may be there again, and need not
            key = next(key for key in [*expected, *met] if expected.get(key) != met.get(key))
            raise CheckpointError(
                f"The parameter {key!r} is in {met.get(key, 'no group')} of {name}; when the checkpoint's run began "
                f"it was in {expected.get(key, 'no group')}. Return the same groups to resume."
            )
        for key, (shape, _) in (entry for group in groups for entry in group.items()):
            there = list(parameters[key].shape) if key in parameters else "missing"
            if there != shape:
                raise CheckpointError(f"The parameter {key!r} of {name} is {there}; the checkpoint's is {shape}.")


def _is_setting(value: Any) -> bool:
    """Whether it can be compared: data, of numbers rather than large tensors."""
    return is_plain(value) and all(tensor.numel() == 1 for tensor in tensors_in(value))


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    texts = []
    for key, old in before.items():
        if key in now and _shown(old) != _shown(now[key]):
            what = f"learning rate {key}" if key == "lr" or key.startswith("lr/") else key
            rule = "the new name is watched" if key.endswith(".monitor") else "the run goes on with the checkpoint's"
            texts.append(f"{what}: {_shown(old)} -> {_shown(now[key])} ({rule})")
    return texts


def _shown(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, dict):
        return {key: _shown(item) for key, item in value.items()}
    return type(value)(map(_shown, value)) if type(value) in (list, tuple) else value


def _load_optimizer(
    optimizer: Optimizer, names: _Groups, state: Mapping[str, Any], parameters: Mapping[str, torch.Tensor]
) -> None:
    """Make the groups those that there were, then load the state into them."""
    settings = state["param_groups"]
    members = [[parameters[name] for name in own] for own in names]
    del optimizer.param_groups[len(members) :]
    # Each in the order that it had, because the norm of all gradients is a sum in that order.
    for group, own in zip(optimizer.param_groups, members, strict=False):
        group["params"] = own
    for number in range(len(optimizer.param_groups), len(members)):
        optimizer.add_param_group({**copied(settings[number]), "params": members[number]})
    fresh = [dict(group) for group in optimizer.param_groups]
    strides = {id(parameters[name]): strides for own in names for name, (_, strides) in own.items()}
    # What the checkpoint lacks, functions for example, stays as it is configured.
    full = [{**group, **was} for group, was in zip(fresh, settings, strict=True)]
    _load_uncast(optimizer, {**state, "param_groups": full}, strides)
    # A tensor may be the rate of several groups, and the default of the next one: it stays, and its value changes.
    for group, was in zip(optimizer.param_groups, fresh, strict=True):
        group.update({key: _refilled(was.get(key), value) for key, value in group.items()})


def _refilled(live: Any, value: Any) -> Any:
    if not isinstance(live, torch.Tensor) or not isinstance(value, torch.Tensor):
        return value
    return live.copy_(value) if (live.shape, live.dtype) == (value.shape, value.dtype) else value.to(live.device)


def _load_uncast(optimizer: Optimizer, state: dict[str, Any], strides: Mapping[int, list[int]]) -> None:
    """The optimizer's own load_state_dict; then tensors get back the dtypes that it changed to the parameters'.

    Args:
        optimizer: with the groups of the state.
        state: for its load_state_dict.
        strides: those that the parameters had, by their ids.
    """
    given: list[dict[str, Any]] = []  # what torch was given, after all hooks that change it

    def uncast(holder: Optimizer) -> None:
        for group, was in zip(holder.param_groups, given[-1]["param_groups"], strict=True):
            for parameter, number in zip(group["params"], was["params"], strict=True):
                stored, own = given[-1]["state"].get(number, {}), holder.state.get(parameter, {})
                own.update(_uncast(stored, own, parameter, strides[id(parameter)]))

    # A wrapper such as timm's Lookahead has no hooks itself.
    holders = [o for o in (optimizer, *vars(optimizer).values()) if hasattr(o, "_optimizer_load_state_dict_pre_hooks")]
    handles = [o.register_load_state_dict_pre_hook(lambda _, loading: given.append(loading)) for o in holders]
    handles += [o.register_load_state_dict_post_hook(uncast, prepend=True) for o in holders]
    try:
        optimizer.load_state_dict(state)
    finally:
        for handle in handles:
            handle.remove()
    if not given:  # it does without torch's
        given.append(state)
        uncast(optimizer)


def _uncast(was: Any, value: Any, parameter: torch.Tensor, strides: list[int]) -> Any:
    """The loaded value with the dtype that it had, laid out as its parameter if it was, and in memory of its own."""
    alike = partial(_uncast, parameter=parameter, strides=strides)
    if isinstance(was, torch.Tensor) and isinstance(value, torch.Tensor) and was.shape == value.shape:
        like = parameter if was.shape == parameter.shape and list(was.stride()) == strides else was
        if was is value or value.dtype != was.dtype or value.stride() != like.stride():
            return torch.empty_like(like, dtype=was.dtype, device=value.device, requires_grad=False).copy_(was)
    elif isinstance(was, dict) and isinstance(value, dict):
        return {key: alike(was.get(key), item) for key, item in value.items()}
    elif type(was) is type(value) and isinstance(was, list | tuple) and len(was) == len(value):
        return type(was)(map(alike, was, value))
    elif isinstance(was, str):
        return was  # torch makes "<generator object ...>" of a text
    return value
