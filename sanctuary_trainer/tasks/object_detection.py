"""`ObjectDetection`: boxes, each with a class and a score, with models of torchvision or of transformers (DETR's kind).

    ObjectDetection("torchvision:retinanet_resnet50_fpn_v2", class_names=["cat", "dog"])
    ObjectDetection("transformers:facebook/detr-resnet-50", class_names=["cat", "dog"])
    ObjectDetection(my_detector)                called as torchvision's are

A batch is (images, targets), as `collate_boxes` makes it of samples (image, target): images (3, H, W) float in [0, 1]
of any size, a target {"boxes": (n, 4) left, top, right, bottom in pixels, "labels": (n,)}; n may be 0. Labels count
from 0 for every model: that torchvision's call the background 0 is taken care of. "iscrowd" (n,) marks COCO's boxes
around many, which are no aim of training and no mistake in evaluation. A mapping as transformers' image
processors make it is a batch too: {"pixel_values", "pixel_mask", "labels"}.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn

from sanctuary_trainer.errors import NotSupportedError, SettingsError, TaskError
from sanctuary_trainer.task import VisionTask
from sanctuary_trainer.tasks.boxed_batch import images_in, targets_in, without_crowds
from sanctuary_trainer.tasks.detectors import Target, detector_of
from sanctuary_trainer.tasks.fitting import adamw_with_warm_up, check_rates, count_classes, name_classes
from sanctuary_trainer.tasks.named_models import library_of, make_model
from sanctuary_trainer.tasks.processors import image_processor_of

if TYPE_CHECKING:
    from sanctuary_trainer.run import Run

JOINS_RANKS = ("lw_detr", "rf_detr")  # their losses call a collective, which uneven ranks would wait in for ever


@final
class ObjectDetection(VisionTask):
    """Trains with the model's own loss, evaluates COCO's `map`, `map_50`, `map_75` and `mar_100`, predicts boxes.

    An image is resized and normalised inside: by torchvision's models themselves, for transformers' by their image
    processor; boxes are always in pixels of the images of the batch. Optimizes as `ImageClassification` does.

    Args:
        model: "torchvision:NAME" or "transformers:FOLDER_OR_HUB_NAME"; or a module of either's convention.
        class_names: what the K classes are called; kept with the hyper-parameters and in a transformers model's config.
        num_classes: K, where the classes have no names. Neither: as many as a named model has by itself.
        pretrained: whether a named model has its library's weights, or random ones.
        image_processor: of a transformers model that comes as a module; one that is named brings its own.
        least_score: of a box that `predict` returns, in [0, 1]; evaluation looks at all.
        lr: highest learning rate.
        weight_decay: of AdamW.

    Raises:
        SettingsError: a number is outside its range, the model cannot be made, or pycocotools is not installed.
    """

    def __init__(
        self,
        model: str | nn.Module,
        *,
        class_names: Sequence[str] | None = None,
        num_classes: int | None = None,
        pretrained: bool = True,
        image_processor: Any = None,
        least_score: float = 0.05,
        lr: float = 1e-4,
        weight_decay: float = 1e-4,
    ) -> None:
        super().__init__()
        check_rates(lr, weight_decay)
        if not 0 <= least_score <= 1:
            raise SettingsError(f"least_score={least_score}; expected a score in [0, 1].")
        library_of("pycocotools", "ObjectDetection")
        from sanctuary_trainer.tasks.box_precision import BoxPrecision  # takes seconds, so only when a task is made

        self.save_hyperparameters(ignore=["image_processor"])
        number = count_classes(class_names, num_classes)
        self.model = make_model(model, "detection", number, pretrained)
        self.num_classes = number or getattr(getattr(self.model, "config", None), "num_labels", None)
        self.class_names = name_classes(self.model, class_names)
        self.image_processor = image_processor_of(model, self.model, image_processor)
        self.least_score, self.lr, self.weight_decay = least_score, lr, weight_decay
        self.precision: Any = BoxPrecision()
        self._detector = detector_of(self.model)

    def on_fit_start(self, run: Run) -> None:
        """Refuse a loss that ranks would wait in for each other."""
        kind = getattr(getattr(self.model, "config", None), "model_type", None)
        if run.world_size > 1 and kind in JOINS_RANKS:
            raise NotSupportedError(
                f"The loss of a {kind} model needs all ranks at every batch, so that it cannot train on "
                f"{run.world_size}. Train on one, or take another model, RT-DETR or DETR."
            )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, targets = images_in(batch), targets_in(batch)
        if batch_idx == 0:  # a look waits for the device, so that it is taken once an epoch
            self._check_labels(targets)
        loss, parts = self._detector.losses(self.model, images, without_crowds(targets), self._processor(batch))
        self.log_dict({name: part.detach() for name, part in parts.items()})
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> list[Target]:
        """What was found, all of it, for callbacks that look at it."""
        found = self._detector.detect(self.model, images_in(batch), self._processor(batch))
        self.precision.update(found, targets_in(batch))
        self.log_dict(self.precision)
        return found

    def predict_step(self, batch: Any, batch_idx: int) -> list[Target]:
        """Of each image the boxes (n, 4) in its pixels, scores (n,) and labels (n,), the best first."""
        found = self._detector.detect(self.model, images_in(batch), self._processor(batch))
        kept = [of_image["scores"] >= self.least_score for of_image in found]
        return [
            {name: of_image[name][rows] for name in ("boxes", "scores", "labels")}
            for of_image, rows in zip(found, kept, strict=True)
        ]

    def cost(self, batch: Any) -> float:
        """The numbers in the images once they are padded to the largest."""
        if isinstance(batch, Mapping):
            return float(batch["pixel_values"].numel())
        images = images_in(batch)
        height, width = (max(image.shape[side] for image in images) for side in (1, 2))
        return float(len(images) * images[0].shape[0] * height * width)

    def configure_optimizers(self) -> dict[str, Any]:
        return adamw_with_warm_up(self, self.lr, self.weight_decay)

    def _check_labels(self, targets: Sequence[Target]) -> None:
        """Refuse labels that are no class: a model would take one below or above for "no object"."""
        labels = torch.cat([target["labels"] for target in targets])
        least, most = (int(labels.min()), int(labels.max())) if len(labels) else (0, 0)
        if least < 0 or (self.num_classes is not None and most >= self.num_classes):
            raise TaskError(f"The labels go from {least} to {most}; expected 0 to {self.num_classes or 'K'} - 1.")

    def _processor(self, batch: Any) -> Any:
        """What the images still have to go through: nothing, where a processor made the batch."""
        return None if isinstance(batch, Mapping) else self.image_processor
