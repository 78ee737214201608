"""The image processor of a transformers model: what belongs to it and is saved with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from sanctuary_trainer.errors import SettingsError

FILES = ("preprocessor_config.json", "processor_config.json")


def image_processor_of(given: str | nn.Module, model: nn.Module, processor: Any) -> Any:
    """Find the image processor of a model.

    Args:
        given: what the model was made from.
        model: the model.
        processor: the user's, which is taken as it is.

    Returns:
        The processor of the folder or hub name that the model comes from; None of a model of another library, of one
        made from a config, and where the folder holds none.

    Raises:
        SettingsError: the folder holds one that cannot be read.
    """
    if processor is not None or not callable(getattr(model, "save_pretrained", None)):
        return processor
    if isinstance(given, str) and not given.startswith("transformers:"):
        return None
    config: Any = getattr(model, "config", None)
    source = given.partition(":")[2] if isinstance(given, str) else getattr(config, "name_or_path", "")
    if not source:
        return None
    import transformers

    auto: Any = transformers.AutoImageProcessor
    try:
        return auto.from_pretrained(source)
    except (OSError, ValueError) as error:
        if found := [name for name in FILES if (Path(source) / name).is_file()]:
            raise SettingsError(f"The image processor {Path(source) / found[0]} cannot be read: {error}") from error
        return None  # there are weights alone
