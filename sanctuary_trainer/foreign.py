"""Names that are not there: what stands here for those that other trainers have, and the nearest argument else.

Who switches writes `Trainer(precision="bf16-mixed")` and `self.trainer`, and what Python says to that would not tell
where they went.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

_PRECISIONS = {"bf16": "bf16", "bf16-mixed": "bf16", "16": "fp16", "16-mixed": "fp16", "32": "no", "32-true": "no"}
_LAUNCHER = "the launcher's business here: `torchrun --nproc-per-node N`, or `accelerate launch`"
_DEFAULTS = "default_callbacks=False here, and callbacks=[...] with those that you want"

# By name of the argument, what stands here for it. The pages under docs/migrate hold the same, and more.
_INSTEAD = {
    "accumulate_grad_batches": "gradient_accumulation_steps={value} here",
    "batch_size": "said to the DataLoader",
    "benchmark": "torch.backends.cudnn.benchmark here",
    "bf16": 'mixed_precision="bf16" here',
    "ckpt_path": "resume= in fit, and checkpoint= in validate, test and predict; what fit returned stands for its best",
    "data_collator": "said to the DataLoader, as collate_fn",
    "datamodule": "data= here",
    "dataloaders": "the second argument here",
    "default_root_dir": "project_dir={value} here",
    "detect_anomaly": "torch.autograd.set_detect_anomaly(True) here",
    "devices": _LAUNCHER,
    "enable_checkpointing": _DEFAULTS,
    "enable_model_summary": _DEFAULTS,
    "enable_progress_bar": _DEFAULTS,
    "eval_dataset": "given to fit, as a loader",
    "fp16": 'mixed_precision="fp16" here',
    "logger": 'log_with= here: "tensorboard", "wandb", another tracker of accelerate\'s, or None',
    "logging_steps": "log_every_n_steps={value} here",
    "loss_func": "said in the task's training_step",
    "max_grad_norm": "gradient_clip_val={value} here",
    "num_nodes": _LAUNCHER,
    "num_train_epochs": "max_epochs={value} here",
    "optimizer": "said in the task's configure_optimizers",
    "output_dir": "project_dir={value} here",
    "rank_zero_only": "left out here: values are over all ranks",
    "reduce_fx": "reduce= here",
    "report_to": "log_with={value} here",
    "resume_from_checkpoint": "resume= of fit here",
    "strategy": "left out here: several ranks are DDP",
    "sync_dist": "left out here: values are always over all ranks",
    "train_dataloader": "the second argument of fit here",
    "train_dataloaders": "the second argument of fit here",
    "train_dataset": "given to fit, as a loader",
    "use_cpu": "cpu={value} here",
    "use_distributed_sampler": "shard_data={value} here",
    "val_dataloaders": "the third argument of fit here",
    "verbose": "left out here",
}

# By name of an attribute of Lightning's modules, what a task has instead.
_OF_A_TASK = {
    "all_gather": "self.run.gather",
    "current_epoch": "self.run.state.epoch",
    "device": "self.run.device",
    "global_rank": "self.run.rank",
    "global_step": "self.run.state.global_step",
    "logger": "self.log, self.log_dict and self.log_image",
    "lr_schedulers": "self.run.schedulers",
    "optimizers": "self.run.optimizers",
    "print": "self.run.message",
    "trainer": "self.run",
}


def explain_attribute(error: BaseException, task: Any) -> None:
    """Add to an AttributeError of the task what stands here for a name that Lightning's modules have."""
    if isinstance(error, AttributeError) and error.obj is task and error.name in _OF_A_TASK:
        error.add_note(f"{error.name} of a Lightning module is {_OF_A_TASK[error.name]} here.")


def refuse_unknown(function: Callable[..., Any], unknown: Mapping[str, Any]) -> None:
    """Refuse arguments that `function` does not have.

    function: takes them as `**unknown: Never`, so that a type checker refuses them before the run.
    Raises TypeError, as Python would, for the first: with what stands here for it, or the nearest argument.
    """
    for name, value in unknown.items():
        raise TypeError(f"{function.__qualname__} has no argument {name}={value!r}{_instead(function, name, value)}")


def _instead(function: Callable[..., Any], name: str, value: Any) -> str:
    if name == "precision" and str(value) in _PRECISIONS:
        return f'; that is mixed_precision="{_PRECISIONS[str(value)]}" here.'
    if name == "precision":
        return '; mixed_precision is "no", "bf16" or "fp16" here, and a model of other numbers is converted by itself.'
    if name in _INSTEAD:
        return f"; that is {_INSTEAD[name].format(value=repr(value))}."
    taken = [each for each in inspect.signature(function).parameters if each not in ("self", "unknown")]
    nearest = difflib.get_close_matches(name, taken, n=1)
    return f"; did you mean {nearest[0]}?" if nearest else f"; it has {', '.join(taken)}."
