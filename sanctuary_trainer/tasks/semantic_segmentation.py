"""`SemanticSegmentation`: one class per pixel, with any model that gives a map of logits.

    SemanticSegmentation("transformers:nvidia/segformer-b0-finetuned-ade-512-512", class_names=["road", "grass"])
    SemanticSegmentation("torchvision:deeplabv3_mobilenet_v3_large", class_names=["road", "grass"])
    SemanticSegmentation(my_unet, num_classes=2)

A batch is (images, masks), or a mapping as Hugging Face's image processors make it: {"pixel_values": images, "labels":
masks}. Masks are (B, H, W) int64, the number of a class or `ignore_index`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sanctuary_trainer.errors import SettingsError, TaskError
from sanctuary_trainer.task import VisionTask
from sanctuary_trainer.tasks.batch_fields import images_of, labels_of
from sanctuary_trainer.tasks.fitting import adamw_with_warm_up, check_rates, count_classes, name_classes
from sanctuary_trainer.tasks.model_inputs import inputs_of
from sanctuary_trainer.tasks.named_models import make_model
from sanctuary_trainer.tasks.processors import image_processor_of

AUXILIARY = 0.5  # weight of the loss of a second head, as in torchvision's own training


@final
class SemanticSegmentation(VisionTask):
    """Trains with cross-entropy over the labelled pixels, evaluates `loss`, `mean_iou` and `accuracy`, predicts maps.

    Each labelled pixel counts alike, whatever batch, window or rank it is in: a step's weight is their number. Maps of
    logits that are smaller than the images are enlarged. Optimizes as `ImageClassification` does.

    Args:
        model: "transformers:FOLDER_OR_HUB_NAME" or "torchvision:NAME"; or a module, called with images (B, C, H, W),
            that returns logits (B, K, h, w), or something whose `.logits` or `["out"]` they are; those of a second
            head in `["aux"]` are trained with.
        class_names: what the K classes are called; kept with the hyper-parameters and in a transformers model's config.
        num_classes: K, where the classes have no names. Neither: as many as a named model has by itself.
        ignore_index: what a pixel without a label has in a mask.
        pretrained: whether a named model has its library's weights, or random ones.
        image_processor: of a transformers model that comes as a module; one that is named brings its own.
        lr: highest learning rate.
        weight_decay: of AdamW.

    Raises:
        SettingsError: a number is outside its range, the model cannot be made, or how many classes it has is not known.
    """

    def __init__(
        self,
        model: str | nn.Module,
        *,
        class_names: Sequence[str] | None = None,
        num_classes: int | None = None,
        ignore_index: int = 255,
        pretrained: bool = True,
        image_processor: Any = None,
        lr: float = 3e-4,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__()
        check_rates(lr, weight_decay)
        from torchmetrics.classification import MulticlassAccuracy, MulticlassJaccardIndex  # takes seconds

        self.save_hyperparameters(ignore=["image_processor"])
        number = count_classes(class_names, num_classes)
        self.model = make_model(model, "segmentation", number, pretrained)
        self.class_names = name_classes(self.model, class_names)
        if hasattr(self.model, "config") and isinstance(head := getattr(self.model, "auxiliary_head", None), nn.Module):
            head.requires_grad_(False)  # transformers does not give its maps: ranks would wait for its gradients
        number = number or getattr(getattr(self.model, "config", None), "num_labels", None) or _outputs(self.model)
        if number is None:
            raise SettingsError("How many classes the model tells apart is not known: give class_names or num_classes.")
        self.num_classes: int = number
        self.image_processor = image_processor_of(model, self.model, image_processor)
        self.inputs = inputs_of(self.model, model if isinstance(model, str) else None, self.image_processor)
        self.ignore_index, self.lr, self.weight_decay = ignore_index, lr, weight_decay
        settings: dict[str, Any] = {"ignore_index": ignore_index, "validate_args": False}  # checks wait for the device
        self.mean_iou = MulticlassJaccardIndex(number, **settings)
        self.accuracy = MulticlassAccuracy(number, average="micro", **settings)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, K, H, W) of images (B, C, H, W).

        Raises:
            TaskError: the model gives no map of logits, or not one for each class.
        """
        return _enlarged(self._maps(images)[0], images)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        images, masks = images_of(batch), labels_of(batch)
        logits, auxiliary = self._maps(images)
        loss = self._loss(logits, masks)
        if auxiliary is not None:
            loss = loss + AUXILIARY * self._loss(auxiliary, masks)
        return {"loss": loss, "weight": (masks != self.ignore_index).sum()}

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Maps of classes (B, H, W), for callbacks that look at them."""
        images, masks = images_of(batch), labels_of(batch)
        logits = _enlarged(self._maps(images)[0], masks)
        found = logits.argmax(1)
        labelled = (masks != self.ignore_index).sum()
        loss = F.cross_entropy(logits.float(), masks, ignore_index=self.ignore_index, reduction="sum")
        self.mean_iou.update(found, masks)
        self.accuracy.update(found, masks)
        self.log("loss", loss / labelled.clamp(min=1), batch_size=labelled)
        self.log("mean_iou", self.mean_iou)
        self.log("accuracy", self.accuracy)
        return found

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Maps of classes (B, H, W) of the images' size, uint8 up to 256 classes. The batch may be images alone."""
        found: Tensor = self(images_of(batch)).argmax(1)
        return found.to(torch.uint8) if self.num_classes <= 256 else found

    def configure_optimizers(self) -> dict[str, Any]:
        return adamw_with_warm_up(self, self.lr, self.weight_decay)

    def _loss(self, logits: Tensor, masks: Tensor) -> Tensor:
        """The mean over the labelled pixels; without any it is no number, and its weight is 0."""
        return F.cross_entropy(_enlarged(logits, masks), masks, ignore_index=self.ignore_index)

    def _maps(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits as the model gives them, and those of its second head."""
        outputs = self.model(images)
        is_mapping = isinstance(outputs, Mapping)
        logits = outputs["out"] if is_mapping and "out" in outputs else getattr(outputs, "logits", outputs)
        if not isinstance(logits, Tensor) or logits.ndim != 4 or logits.shape[1] != self.num_classes:
            found = f"of shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
            raise TaskError(
                f"{type(self.model).__name__} returned logits {found}; expected (B, {self.num_classes}, h, w), one map "
                f"for each of the {self.num_classes} classes."
            )
        return logits, outputs.get("aux") if is_mapping else None


def _enlarged(logits: Tensor, to: Tensor) -> Tensor:
    """Logits (B, K, H, W) of the size of images (..., H, W)."""
    if logits.shape[-2:] == to.shape[-2:]:
        return logits
    return F.interpolate(logits, size=to.shape[-2:], mode="bilinear", align_corners=False)


def _outputs(model: nn.Module) -> int | None:
    """How many maps the last convolution of torchvision's `classifier` gives."""
    layers = [layer for layer in getattr(model, "classifier", nn.Module()).modules() if isinstance(layer, nn.Conv2d)]
    return layers[-1].out_channels if layers else None
