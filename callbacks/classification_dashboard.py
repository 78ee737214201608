"""How a classifier fails, in TensorBoard: confusion matrix, accuracy of each class, the images that it gets wrong.

    first batch of an epoch       some of its images, as the model sees them
    each batch of validation      counted on the device, which nobody waits for; the worst samples so far are kept
    end of validation             each rank's part comes to rank 0, which draws and logs

Sanity validation is only checked for what is needed. Weights that are validated beside the task's own (EMA) are not
looked at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor

from sanctuary_trainer import Callback, SettingsError, TaskError
from sanctuary_trainer.callbacks.class_evidence import Evidence, Found, Share, joined, tiles

if TYPE_CHECKING:
    from sanctuary_trainer import Run

Reader = Callable[[Any, Any], Any]  # (batch, outputs) -> a tensor
MOST_IMAGES = 64
GAP = 2  # pixels around an image of training


class ClassificationDashboard(Callback):
    """Shows after each validation of a classifier where it fails, over all ranks and with each sample once.

    In a fit: `val/confusion_matrix`, `val/confident_mistakes` and `val/worst_losses` as pictures, and `train/images`
    once an epoch. The accuracy of each class is the scalar `val/accuracy_of/NAME`, also of `trainer.validate`; of more
    than `max_scalars` classes it is the picture `val/accuracy_of_classes`. One of several loaders has its name after
    "val/". Cross-entropy and probabilities are computed here from the logits.

    By default a batch is (images, labels) and `validation_step` returns the logits.

    Args:
        class_names: what the K classes are called; None: the task's `class_names`, or their numbers.
        num_images: how many of the most confident mistakes and of the highest losses are shown, at most 64; 0 for none.
        num_train_images: how many images of an epoch's first batch are shown, at most 64; 0 for none.
        max_scalars: classes that may have a scalar each.
        mean: with which the images were normalised, one value or one for each channel, so that they are shown as
            `images * std + mean` in [0, 1]; None where they are in [0, 1] or uint8.
        std: the same.
        images: called with (batch, outputs) of a validation batch, and with (batch, None) of a training batch; returns
            (B, C, H, W) with 1 or 3 channels, float or uint8.
        logits: called with (batch, outputs); returns (B, K).
        labels: called with (batch, outputs); returns (B,), whole numbers. Others than 0 to K - 1 are left out.
        probabilities: whether `logits` finds probabilities.

    Raises:
        SettingsError: an argument is wrong.
        TaskError: validation does not give what is needed; sanity validation finds it before the training.

    `found` holds what the last validation showed, by the loader's name ("" for a single one), on rank 0.
    """

    def __init__(
        self,
        class_names: Sequence[str] | None = None,
        *,
        num_images: int = 16,
        num_train_images: int = 16,
        max_scalars: int = 20,
        mean: float | Sequence[float] | None = None,
        std: float | Sequence[float] | None = None,
        images: Reader | None = None,
        logits: Reader | None = None,
        labels: Reader | None = None,
        probabilities: bool = False,
    ) -> None:
        counts = {"num_images": num_images, "num_train_images": num_train_images, "max_scalars": max_scalars}
        for name, count in counts.items():
            most = None if name == "max_scalars" else MOST_IMAGES
            what = "a whole number of at least 0" + (f" and at most {most}" if most else "")
            _check(name, count, _is_count(count, most), what)
        for name, reader in (("images", images), ("logits", logits), ("labels", labels)):
            _check(name, reader, reader is None or callable(reader), "a function of (batch, outputs), or None,")
        _check("probabilities", probabilities, isinstance(probabilities, bool), "True or False")
        if (mean is None) != (std is None):
            raise SettingsError(f"ClassificationDashboard got mean={mean!r} and std={std!r}; give both or neither.")
        self.mean, self.std = _channels("mean", mean), _channels("std", std)
        self.class_names = None if class_names is None else _names(class_names)
        self.num_images, self.num_train_images, self.max_scalars = num_images, num_train_images, max_scalars
        self.images, self.logits, self.labels, self.probabilities = images, logits, labels, probabilities
        self.found: dict[str, Found] = {}
        self._evidence: dict[str, Evidence] = {}

    def on_fit_start(self, run: Run) -> None:
        if not run.plan.validates:
            run.warn("ClassificationDashboard shows validations, and this fit has nothing to validate with.")

    def on_train_batch_start(self, run: Run, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0 and self.num_train_images and run.is_main:
            images = self._images(batch, None, "a training batch")
            shown = tiles(images.detach()[: self.num_train_images], self.mean, self.std)
            run.log_image("images", F.pad(shown, (GAP, GAP, GAP, GAP), value=255))

    def on_evaluation_start(self, run: Run, stage: str) -> None:
        self._evidence = {}

    def on_evaluation_batch_end(
        self, run: Run, stage: str, batch: Any, outputs: Any, sample_indices: Sequence[Any] | None
    ) -> None:
        if stage == "test":
            return
        images, logits, labels = self._read(run, batch, outputs)
        if stage == "sanity":
            return
        evidence = self._evidence.get(run.loader_name)
        if evidence is None:
            evidence = self._evidence[run.loader_name] = Evidence(
                logits.shape[1],
                self.num_images,
                self.mean,
                self.std,
                device=logits.device,
                probabilities=self.probabilities,
                rank=run.rank,
                world_size=run.world_size,
            )
        if evidence.num_classes != logits.shape[1]:
            raise TaskError(
                f"ClassificationDashboard got logits of {logits.shape[1]} classes, and of {evidence.num_classes} in a "
                "batch before; expected as many in each."
            )
        evidence.add(images, logits, labels, sample_indices)

    def on_evaluation_end(self, run: Run, stage: str, metrics: dict[str, float]) -> None:
        evidence, self._evidence = self._evidence, {}
        if stage == "val":
            run.gather({name: each.share() for name, each in evidence.items()}, partial(self._show, run))

    def teardown(self, run: Run) -> None:
        self._evidence = {}

    def _show(self, run: Run, shares: list[dict[str, Share]]) -> None:
        """On rank 0: log and draw what all ranks have found."""
        self.found = {}
        for loader in run.evaluation_loaders:
            of_ranks = [share[loader] for share in shares if loader in share]
            if of_ranks:
                self.found[loader] = joined(of_ranks, self.num_images)
                self._show_loader(run, f"val/{loader}" if loader else "val", self.found[loader])

    def _show_loader(self, run: Run, prefix: str, found: Found) -> None:
        names = self._class_names(run, len(found.total))
        if len(names) <= self.max_scalars:
            for name, right, total in zip(names, found.right, found.total, strict=True):
                if total:
                    run.log(f"{prefix}/accuracy_of/{name}", float(right / total))
        if run.tracking is None:
            return
        from sanctuary_trainer.callbacks.class_pictures import bars_picture, confusion_picture, samples_picture

        run.log_image(f"{prefix}/confusion_matrix", confusion_picture(found, names))
        if len(names) > self.max_scalars:
            run.log_image(f"{prefix}/accuracy_of_classes", bars_picture(found, names))
        if self.num_images:
            wrong = int(found.total.sum() - found.right.sum())
            heading = f"The most confident of {wrong:,} mistakes"
            picture = samples_picture(found.confident_mistakes, names, heading, "probability", self.num_images)
            run.log_image(f"{prefix}/confident_mistakes", picture)
            picture = samples_picture(found.worst_losses, names, "The highest losses", "loss", self.num_images)
            run.log_image(f"{prefix}/worst_losses", picture)

    def _class_names(self, run: Run, num_classes: int) -> list[str]:
        names = self.class_names
        if names is None and (of_task := getattr(run.task, "class_names", None)) is not None:
            names = _names(of_task)
        if names is None:
            return [str(i) for i in range(num_classes)]
        if len(names) != num_classes:
            raise TaskError(
                f"ClassificationDashboard got logits of {num_classes} classes and {len(names)} class names; expected "
                "one name for each class."
            )
        return names

    def _read(self, run: Run, batch: Any, outputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Images, logits and labels of a validation batch, of shapes that fit each other."""
        if self.logits is None and not isinstance(outputs, Tensor):
            got = "None" if outputs is None else f"a {type(outputs).__name__}"
            raise TaskError(
                f"ClassificationDashboard needs the logits of a validation batch, and {type(run.task).__name__}."
                f"validation_step returned {got}. Return the logits (B, K) there, or give logits= a function that "
                "finds them in (batch, outputs)."
            )
        logits = outputs if self.logits is None else self.logits(batch, outputs)
        if not isinstance(logits, Tensor) or logits.ndim != 2 or logits.shape[1] < 2 or not logits.is_floating_point():
            raise TaskError(
                f"ClassificationDashboard got logits that are {_kind(logits)}; expected a float tensor (B, K) of at "
                "least 2 classes."
            )
        labels = _pair(batch, 1, "labels") if self.labels is None else self.labels(batch, outputs)
        if not isinstance(labels, Tensor) or labels.shape != logits.shape[:1] or labels.is_floating_point():
            raise TaskError(
                f"ClassificationDashboard got labels that are {_kind(labels)}, with logits {tuple(logits.shape)}; "
                f"expected a tensor ({len(logits)},) of whole numbers. Give labels= a function that makes it of "
                "(batch, outputs), for example batch[1].argmax(1) of labels that are one-hot."
            )
        images = self._images(batch, outputs, "a validation batch")
        if len(images) != len(logits):
            raise TaskError(
                f"ClassificationDashboard got {len(images)} images with logits of {len(logits)} samples; expected as "
                "many. Give images= a function that finds them in (batch, outputs)."
            )
        if run.loader_name not in self._evidence:  # once a validation
            self._class_names(run, logits.shape[1])
        # Outputs of a batch that ran in pieces (OOMFallback) lie on the host.
        return images.detach(), logits.detach().to(images.device), labels.detach().to(images.device)

    def _images(self, batch: Any, outputs: Any, where: str) -> Tensor:
        images = _pair(batch, 0, "images") if self.images is None else self.images(batch, outputs)
        if not _is_images(images):
            raise TaskError(
                f"ClassificationDashboard got images that are {_kind(images)} of {where}; expected a float or uint8 "
                "tensor (B, C, H, W) with 1 or 3 channels. Give images= a function that makes it of (batch, outputs)."
            )
        for name, values in (("mean", self.mean), ("std", self.std)):
            if values is not None and len(values) not in (1, images.shape[1]):
                raise TaskError(
                    f"ClassificationDashboard got {name}= of {len(values)} channels and images of {images.shape[1]}; "
                    "expected one value, or one for each channel."
                )
        return images


def _pair(batch: Any, place: int, what: str) -> Any:
    if isinstance(batch, list | tuple) and len(batch) >= 2:
        return batch[place]
    raise TaskError(
        f"ClassificationDashboard got a batch that is {_kind(batch)}; (images, labels) was expected. Give {what}= a "
        "function that finds them in (batch, outputs)."
    )


def _is_images(value: object) -> TypeGuard[Tensor]:
    return (
        isinstance(value, Tensor)
        and (value.is_floating_point() or value.dtype == torch.uint8)
        and value.ndim == 4
        and value.shape[1] in (1, 3)
        and 0 not in value.shape[2:]
    )


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {tuple(value.shape)} of {value.dtype}"
    return "None" if value is None else f"a {type(value).__name__}"


def _check(name: str, value: object, fine: bool, expected: str) -> None:
    if not fine:
        raise SettingsError(f"ClassificationDashboard got {name}={value!r:.80}; {expected} was expected.")


def _is_count(value: object, most: int | None) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0 and (most is None or value <= most)


def _channels(name: str, values: Any) -> list[float] | None:
    if values is None:
        return None
    given = values.tolist() if hasattr(values, "tolist") else values
    numbers = list(given) if isinstance(given, list | tuple) else [given]
    least = 0.0 if name == "std" else -math.inf
    fine = bool(numbers) and all(isinstance(each, Real) and least < float(each) < math.inf for each in numbers)
    _check(name, values, fine, f"a number{' above 0' if name == 'std' else ''}, or one for each channel,")
    return [float(each) for each in numbers]


def _names(names: Any) -> list[str]:
    ordered = isinstance(names, Iterable) and not isinstance(names, str | Mapping | set | frozenset)
    given = list(names) if ordered else []
    fine = bool(given) and all(isinstance(name, str) and name for name in given) and len(set(given)) == len(given)
    _check("class_names", names, fine, "a list of different names, one for each class,")
    return given
