"""Images of any kind side by side, as one picture of colours."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch

from sanctuary_trainer.errors import DataError

_MOST_IMAGES: Final = 64
_IMAGES_PER_ROW: Final = 8


def image_grid(name: str, images: Any) -> Any:
    """The first 64 images side by side, 8 in a row, as one (H, W, 3) uint8 array.

    images: (N, C, H, W) or (C, H, W), C = 1 or 3, or a list of (C, H, W) of one size; float in [0, 1] (clipped; NaN is
    black) or uint8. A PIL image, or a list of these. Raises `DataError`.
    """
    given = _as_tensor(name, images)
    tensor = given.unsqueeze(0) if given.dim() == 3 else given
    if tensor.dim() != 4 or tensor.shape[1] not in (1, 3) or 0 in tensor.shape:
        raise DataError(
            f"log_image({name!r}) got images of shape {tuple(given.shape)}; expected (N, C, H, W) or "
            "(C, H, W) with 1 or 3 channels."
        )
    tensor = tensor[:_MOST_IMAGES].cpu()
    if tensor.is_floating_point():
        tensor = (tensor.float().nan_to_num(nan=0.0).clamp(0, 1) * 255).round().to(torch.uint8)
    elif tensor.dtype != torch.uint8:
        raise DataError(f"log_image({name!r}) got {tensor.dtype}; expected float in [0, 1] or uint8 in [0, 255].")
    tensor = tensor.expand(-1, 3, -1, -1)
    count, _, height, width = tensor.shape
    columns = min(count, _IMAGES_PER_ROW)
    rows = -(-count // columns)
    grid = tensor.new_zeros(rows * columns, 3, height, width)
    grid[:count] = tensor
    grid = grid.reshape(rows, columns, 3, height, width).permute(0, 3, 1, 4, 2)  # rows, H, columns, W, 3
    return grid.reshape(rows * height, columns * width, 3).numpy()


def _as_tensor(name: str, images: Any) -> torch.Tensor:
    try:
        return _stacked(images).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"log_image({name!r}) got {type(images).__name__}: {error}. A tensor or array of images, a PIL image, or a "
            "list of images of one size was expected."
        ) from None


def _stacked(images: Any) -> torch.Tensor:
    if isinstance(images, (list, tuple)):
        return torch.stack([_stacked(image) for image in images[:_MOST_IMAGES]])
    if hasattr(images, "convert"):  # PIL's
        return torch.from_numpy(np.array(images.convert("RGB"))).permute(2, 0, 1)
    return torch.as_tensor(images)
