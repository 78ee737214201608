"""`ImageClassification`: one class per image, with any model that gives logits.

    ImageClassification(torchvision.models.resnet18(num_classes=10))
    ImageClassification(timm.create_model("vit_tiny_patch16_224", num_classes=10))
    ImageClassification(AutoModelForImageClassification.from_config(config))

A batch is (images, labels), or a mapping as Hugging Face's image processors and data sets make it:
{"pixel_values": images, "labels": labels}.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sanctuary_trainer.errors import SettingsError, TaskError
from sanctuary_trainer.task import VisionTask

WARM_UP = 0.05  # of the run's steps
IMAGE_KEYS = ("pixel_values", "images", "image")
LABEL_KEYS = ("labels", "label")


@final
class ImageClassification(VisionTask):
    """Trains with cross-entropy, evaluates `loss` and `accuracy`, predicts probabilities.

    Optimizes with AdamW. The learning rate rises over the first twentieth of the steps and falls to zero along a
    cosine; where the number of steps is not known, it stays at `lr`.

    Args:
        model: called with images (B, C, H, W) as the loader gives them; returns logits (B, K), or something whose
            `.logits` they are, like the models of transformers.
        class_names: what the K classes are called; kept with the hyper-parameters.
        lr: highest learning rate.
        weight_decay: of AdamW.
        label_smoothing: share of the target in [0, 1) that is spread over all classes, in training.

    Raises:
        SettingsError: a number is outside its range.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        class_names: Sequence[str] | None = None,
        lr: float = 1e-3,
        weight_decay: float = 0.01,
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__()
        if lr <= 0 or weight_decay < 0 or not 0 <= label_smoothing < 1:
            raise SettingsError(
                f"lr={lr}, weight_decay={weight_decay}, label_smoothing={label_smoothing}; "
                "expected lr > 0, weight_decay >= 0 and label_smoothing in [0, 1)."
            )
        from torchmetrics.classification import MulticlassAccuracy  # takes seconds, so only when a task is made

        self.save_hyperparameters()
        self.model = model
        self.class_names = None if class_names is None else list(class_names)
        self.lr, self.weight_decay, self.label_smoothing = lr, weight_decay, label_smoothing
        # Unchecked and by its micro average it needs no number of classes, and does not wait for the device.
        self.accuracy = MulticlassAccuracy(None, average="micro", validate_args=False)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, K) of images (B, C, H, W).

        Raises:
            TaskError: the model gives no logits, or not one for each class name.
        """
        outputs = self.model(images)
        logits = getattr(outputs, "logits", outputs)
        if not isinstance(logits, Tensor) or logits.ndim != 2:
            found = f"of shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
            raise TaskError(f"{type(self.model).__name__} returned logits {found}; expected a tensor (B, K).")
        if self.class_names is not None and logits.shape[1] != len(self.class_names):
            raise TaskError(
                f"{type(self.model).__name__} tells {logits.shape[1]} classes apart, and {len(self.class_names)} have "
                "names. Give the model as many outputs as there are classes."
            )
        return logits

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = _images(batch), _labels(batch)
        return F.cross_entropy(self(images), labels, label_smoothing=self.label_smoothing)

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Logits (B, K), for callbacks that look at them."""
        images, labels = _images(batch), _labels(batch)
        logits: Tensor = self(images)
        self.accuracy.update(logits.argmax(1), labels)
        self.log("loss", F.cross_entropy(logits, labels))
        self.log("accuracy", self.accuracy)
        return logits

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Probabilities (B, K). The batch may also be images alone."""
        logits: Tensor = self(_images(batch))
        return logits.float().softmax(1)

    def configure_optimizers(self) -> dict[str, Any]:
        trainable = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trainable, lr=self.lr, weight_decay=self.weight_decay)
        steps = self.run.estimated_stepping_batches
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


def _images(batch: Any) -> Tensor:
    if isinstance(batch, Tensor):
        return batch
    return _field(batch, 0, IMAGE_KEYS, "images")


def _labels(batch: Any) -> Tensor:
    return _field(batch, 1, LABEL_KEYS, "labels")


def _field(batch: Any, place: int, keys: Sequence[str], what: str) -> Tensor:
    if isinstance(batch, Mapping):
        found = next((batch[key] for key in keys if key in batch), None)
    else:
        found = batch[place] if isinstance(batch, Sequence) and len(batch) > place else None
    if not isinstance(found, Tensor):
        has = f"with the keys {list(batch)}" if isinstance(batch, Mapping) else f"of type {type(batch).__name__}"
        raise TaskError(
            f"The batch {has} holds no tensor of {what}; expected (images, labels) or a mapping with one of "
            f"{', '.join(IMAGE_KEYS)} and one of {', '.join(LABEL_KEYS)}."
        )
    return found
