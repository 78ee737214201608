"""How a model wants its images: the size and the transforms that belong to it, whichever library it is of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from sanctuary_trainer.tasks.named_models import library_of

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SHOWN = 224 / 256  # of the shorter side, in evaluation: what most models were measured with


@dataclass(frozen=True)
class ModelInputs:
    """What the images of a model go through.

    Attributes:
        size: height and width in pixels.
        transform: a PIL image of any size to a float tensor (3, H, W), as in evaluation.
        normalize: a PIL image that has the size already to a float tensor; for training, after its own cropping.
    """

    size: tuple[int, int]
    transform: Callable[[Any], Tensor]
    normalize: Callable[[Any], Tensor]

    def augment(self) -> Callable[[Any], Tensor]:
        """For training: a random part of the image, resized, and flipped in half of the cases."""
        v2 = library_of("torchvision.transforms.v2", "Augmentation")
        crop = v2.RandomResizedCrop(self.size, scale=(0.35, 1.0), antialias=True)
        augmented: Callable[[Any], Tensor] = v2.Compose([crop, v2.RandomHorizontalFlip(), self.normalize])
        return augmented


def inputs_of(model: nn.Module, name: str | None, processor: Any) -> ModelInputs | None:
    """What a model says of its images; None where nothing is known of it.

    Args:
        model: the module.
        name: what it was made from, LIBRARY:NAME; None when it came as a module.
        processor: an image processor of transformers, which comes before all else.
    """
    if processor is not None:
        return _of_processor(processor)
    if name is not None and name.startswith("torchvision:"):
        return _of_weights(model, name.partition(":")[2])
    if getattr(model, "pretrained_cfg", None) and hasattr(model, "num_features"):
        return _of_timm(model)
    side = getattr(getattr(model, "config", None), "image_size", None)  # a transformers model without a processor
    return plain_inputs(side) if isinstance(side, int) else None


def plain_inputs(side: int) -> ModelInputs:
    """Squares of so many pixels, cut from the middle, normalised by ImageNet's mean and deviation."""
    v2 = library_of("torchvision.transforms.v2", "ImageData")
    normalize = _normalize(IMAGENET_MEAN, IMAGENET_STD)
    resize = v2.Resize(round(side / SHOWN), antialias=True)
    return ModelInputs((side, side), v2.Compose([resize, v2.CenterCrop(side), normalize]), normalize)


def _normalize(mean: Any, std: Any) -> Any:
    import torch

    v2 = library_of("torchvision.transforms.v2", "ImageData")
    return v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(list(mean), list(std))])


def _of_timm(model: nn.Module) -> ModelInputs:
    data = library_of("timm.data", "A model of timm")
    config = data.resolve_model_data_config(model)
    _, height, width = config["input_size"]
    transform = data.create_transform(**config, is_training=False)
    return ModelInputs((height, width), transform, _normalize(config["mean"], config["std"]))


def _of_weights(model: nn.Module, name: str) -> ModelInputs | None:
    models = library_of("torchvision", "A model of torchvision").models
    preset = models.get_model_weights(name).DEFAULT.transforms()
    if not hasattr(preset, "crop_size"):
        return None  # detection and segmentation leave the size to the data
    side = preset.crop_size[0]
    own = getattr(model, "image_size", side)  # of a vision transformer, which some weights came to be larger than
    if own != side:
        return plain_inputs(own)
    return ModelInputs((side, side), preset, _normalize(preset.mean, preset.std))


def _of_processor(processor: Any) -> ModelInputs:
    from PIL import Image

    transform: Any = Processed(processor)
    _, height, width = transform(Image.new("RGB", (64, 64))).shape  # `size` has a form of its own in each processor
    if transform(Image.new("RGB", (96, 64))).shape[1:] != (height, width):  # it keeps the ratio of the sides
        v2 = library_of("torchvision.transforms.v2", "An image processor without a size of its own")
        transform = v2.Compose([v2.Resize((height, width), antialias=True), transform])
    steps = {step: False for step in ("do_resize", "do_center_crop") if getattr(processor, step, None)}
    return ModelInputs((height, width), transform, Processed(processor, **steps))


class Processed:
    """One image through an image processor of transformers; picklable, for workers.

    Args:
        processor: called as `processor(images=image, return_tensors="pt")`.
        options: of the call.
    """

    def __init__(self, processor: Any, **options: bool) -> None:
        self.processor, self.options = processor, options

    def __call__(self, image: Any) -> Tensor:
        pixels: Tensor = self.processor(images=image, return_tensors="pt", **self.options)["pixel_values"][0]
        return pixels
