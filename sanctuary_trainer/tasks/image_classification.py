"""`ImageClassification`: one class per image, with any model that gives logits.

    ImageClassification("timm:resnet18", class_names=["cat", "dog"])
    ImageClassification("transformers:google/vit-base-patch16-224", class_names=["cat", "dog"])
    ImageClassification(torchvision.models.resnet18(num_classes=10))

A batch is (images, labels), or a mapping as Hugging Face's image processors and data sets make it:
{"pixel_values": images, "labels": labels}.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch.nn.functional as F
from torch import Tensor, nn

from sanctuary_trainer.errors import SettingsError, TaskError
from sanctuary_trainer.task import VisionTask
from sanctuary_trainer.tasks.batch_fields import images_of, labels_of
from sanctuary_trainer.tasks.fitting import adamw_with_warm_up, check_rates, count_classes, name_classes
from sanctuary_trainer.tasks.model_inputs import inputs_of
from sanctuary_trainer.tasks.named_models import make_model
from sanctuary_trainer.tasks.processors import image_processor_of

MANY = 10  # classes, from which on the accuracy among the five best tells something too


@final
class ImageClassification(VisionTask):
    """Trains with cross-entropy, evaluates `loss` and `accuracy`, predicts probabilities.

    From 10 classes on there is also `accuracy_top5`. Optimizes with AdamW. The learning rate rises over the first
    twentieth of the steps and falls to zero along a cosine; where the number of steps is not known, it stays at `lr`.

    Args:
        model: "timm:NAME", "torchvision:NAME" or "transformers:FOLDER_OR_HUB_NAME"; or a module, called with images
            (B, C, H, W) as the loader gives them, that returns logits (B, K), or something whose `.logits` they are.
        class_names: what the K classes are called; kept with the hyper-parameters and in a transformers model's config.
        num_classes: K, where the classes have no names. Neither: as many as a named model has by itself.
        pretrained: whether a named model has its library's weights, or random ones. Loading a checkpoint needs none:
            `load_from_checkpoint(path, pretrained=False)`.
        image_processor: of a transformers model that comes as a module; one that is named brings its own.
        lr: highest learning rate.
        weight_decay: of AdamW.
        label_smoothing: share of the target in [0, 1) that is spread over all classes, in training.

    Attributes:
        inputs: the size and transforms that the model wants its images with; None where nothing is known of them.
        image_processor: saved beside the weights of a transformers model; None of others.

    Raises:
        SettingsError: a number is outside its range, or the model cannot be made.
    """

    def __init__(
        self,
        model: str | nn.Module,
        *,
        class_names: Sequence[str] | None = None,
        num_classes: int | None = None,
        pretrained: bool = True,
        image_processor: Any = None,
        lr: float = 1e-3,
        weight_decay: float = 0.01,
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__()
        check_rates(lr, weight_decay)
        if not 0 <= label_smoothing < 1:
            raise SettingsError(f"label_smoothing={label_smoothing}; expected a share in [0, 1).")
        from torchmetrics.classification import MulticlassAccuracy  # takes seconds, so only when a task is made

        self.save_hyperparameters(ignore=["image_processor"])
        number = count_classes(class_names, num_classes)
        self.model = make_model(model, "classification", number, pretrained)
        self.class_names = name_classes(self.model, class_names)
        self.image_processor = image_processor_of(model, self.model, image_processor)
        self.inputs = inputs_of(self.model, model if isinstance(model, str) else None, self.image_processor)
        self.lr, self.weight_decay, self.label_smoothing = lr, weight_decay, label_smoothing
        # Unchecked and by its micro average it needs no number of classes, and does not wait for the device.
        self.accuracy = MulticlassAccuracy(None, average="micro", validate_args=False)
        number = number if self.class_names is None else len(self.class_names)
        if number is not None and number >= MANY:
            self.accuracy_top5 = MulticlassAccuracy(number, top_k=5, average="micro", validate_args=False)

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
        images, labels = images_of(batch), labels_of(batch)
        return F.cross_entropy(self(images), labels, label_smoothing=self.label_smoothing)

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Logits (B, K), for callbacks that look at them."""
        images, labels = images_of(batch), labels_of(batch)
        logits: Tensor = self(images)
        self.accuracy.update(logits.argmax(1), labels)
        self.log("loss", F.cross_entropy(logits, labels))
        self.log("accuracy", self.accuracy)
        if hasattr(self, "accuracy_top5"):
            self.accuracy_top5.update(logits, labels)
            self.log("accuracy_top5", self.accuracy_top5)
        return logits

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Probabilities (B, K). The batch may also be images alone."""
        logits: Tensor = self(images_of(batch))
        return logits.float().softmax(1)

    def configure_optimizers(self) -> dict[str, Any]:
        return adamw_with_warm_up(self, self.lr, self.weight_decay)
