"""How the ready-made tasks optimize, and what they keep of the model's classes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from sanctuary_trainer.errors import SettingsError
from sanctuary_trainer.task import VisionTask

WARM_UP = 0.05  # of the run's steps


def check_rates(lr: float, weight_decay: float) -> None:
    """Raise a SettingsError for a learning rate or weight decay outside its range."""
    if not lr > 0:
        raise SettingsError(f"lr={lr}; expected a learning rate above 0.")
    if not weight_decay >= 0:
        raise SettingsError(f"weight_decay={weight_decay}; expected at least 0.")


def adamw_with_warm_up(task: VisionTask, lr: float, weight_decay: float) -> dict[str, Any]:
    """AdamW; its learning rate rises over the first twentieth of the steps and falls to zero along a cosine.

    Where the number of steps is not known, it stays at `lr`.
    """
    trainable = [parameter for parameter in task.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=lr, weight_decay=weight_decay)
    steps = task.run.estimated_stepping_batches
    if steps is None:
        return {"optimizer": optimizer}
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(warm_up_and_cosine, steps=steps))
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def warm_up_and_cosine(step: int, steps: int) -> float:
    """The factor in (0, 1] on the learning rate of step 0 ... steps - 1: a line up, then half a cosine down to zero."""
    rise = max(round(WARM_UP * steps), 1)
    if step < rise:
        return (step + 1) / rise
    return 0.5 * (1 + math.cos(math.pi * min((step - rise + 1) / max(steps - rise + 1, 1), 1)))


def count_classes(class_names: Sequence[str] | None, num_classes: int | None) -> int | None:
    """How many classes there are, by their names or their number; None when neither was given.

    Raises:
        SettingsError: the two differ, there are fewer than one, or two have one name.
    """
    if class_names is not None and (twice := [name for name, count in Counter(class_names).items() if count > 1]):
        raise SettingsError(
            f"class_names has {', '.join(map(repr, twice))} twice; expected a name of its own for each."
        )
    named = None if class_names is None else len(class_names)
    if named is not None and num_classes not in (None, named):
        raise SettingsError(f"num_classes={num_classes}, and class_names has {named}: give one of the two.")
    number = num_classes if named is None else named
    if number is not None and number < 1:
        raise SettingsError(f"There are {number} classes; expected at least one.")
    return number


def name_classes(model: nn.Module, class_names: Sequence[str] | None) -> list[str] | None:
    """Let the model's config, where it has one, know the classes' names, or take them from there.

    A config of another number of classes is left alone: the first batch tells of it.

    Returns:
        The names, as given or as a model of transformers has them; None where nobody knows any.

    Raises:
        SettingsError: a model of transformers has names for some of its classes only.
    """
    config: Any = getattr(model, "config", None)
    if not isinstance(getattr(config, "id2label", None), dict):
        return None if class_names is None else list(class_names)
    if class_names is not None:
        if config.num_labels == len(class_names):
            config.id2label = dict(enumerate(class_names))
            config.label2id = {name: number for number, name in enumerate(class_names)}
        return list(class_names)
    if lacking := sorted(set(range(len(config.id2label))) - config.id2label.keys()):
        raise SettingsError(
            f"id2label of the model's config has no name for class {lacking[0]}; expected 0 to "
            f"{len(config.id2label) - 1}."
        )
    found = [str(config.id2label[number]) for number in range(len(config.id2label))]
    return None if found == [f"LABEL_{number}" for number in range(len(found))] else found
