"""Models by name, from the library that has them: "timm:resnet18", "torchvision:resnet18", "transformers:FOLDER".

    make_model("timm:resnet18", "classification", 10)   -> an nn.Module with 10 outputs

The same word before the colon means the same library in every task. A pretrained model keeps what fits: a head of
another number of classes begins anew.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from torch import nn

from sanctuary_trainer.errors import SettingsError

Kind = Literal["classification", "segmentation", "detection"]
LIBRARIES = ("timm", "torchvision", "transformers")
AUTO = {
    "classification": "AutoModelForImageClassification",
    "segmentation": "AutoModelForSemanticSegmentation",
    "detection": "AutoModelForObjectDetection",
}


def make_model(model: str | nn.Module, kind: Kind, num_classes: int | None, pretrained: bool) -> nn.Module:
    """Make the model that a string names; a module is returned as it is.

    Args:
        model: LIBRARY:NAME, or a module.
        kind: what it is for.
        num_classes: how many classes it tells apart; None: as many as the library's model.
        pretrained: with the library's weights; else with random ones.

    Raises:
        SettingsError: the string names nothing, its library is not installed, or the weights cannot be had.
    """
    if isinstance(model, nn.Module):
        return model
    library, colon, name = str(model).partition(":")
    if not colon or library not in LIBRARIES or not name:
        raise SettingsError(
            f"model={model!r} names no model: give LIBRARY:NAME, the library being timm, torchvision or transformers "
            '("timm:resnet18"), or a module.'
        )
    make = {"timm": _of_timm, "torchvision": _of_torchvision, "transformers": _of_transformers}[library]
    try:
        made: nn.Module = make(name, kind, num_classes, pretrained)
    except SettingsError:
        raise
    except (OSError, ValueError, RuntimeError, KeyError) as error:  # what the three raise for a name or a network
        raise _not_made(str(model), pretrained, error) from error
    return made


def library_of(name: str, needed_by: str, extra: str = "vision") -> Any:
    """Import a library that is not among the package's own.

    Raises:
        SettingsError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise SettingsError(
            f"{needed_by} needs {name}, which cannot be imported ({error}). "
            f"Run: pip install 'sanctuary_trainer[{extra}]'"
        ) from error


def check_known(name: str, known: Iterable[str], what: str) -> None:
    """Refuse a name that is not among the known ones, and propose the nearest.

    Raises:
        SettingsError: it is not.
    """
    names = list(known)
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        raise SettingsError(f"There is no {what} {name!r}." + (f" Did you mean {near[0]!r}?" if near else ""))


def _not_made(model: str, pretrained: bool, error: Exception) -> SettingsError:
    first_line = str(error).strip().partition("\n")[0]
    reason = f"{type(error).__name__}: {first_line}"
    if not isinstance(error, OSError):
        return SettingsError(f"model={model!r} cannot be made: {reason}")
    if model.startswith("transformers:"):
        advice = "The name is neither a folder with a config.json on this machine nor was the hub's model to be had"
        return SettingsError(f"model={model!r} cannot be read: {reason}\n{advice}: check the name and the network.")
    advice = "Check the network, or give pretrained=False for random weights." if pretrained else ""
    return SettingsError(f"The weights of model={model!r} cannot be had: {reason} {advice}".rstrip())


def _of_timm(name: str, kind: Kind, num_classes: int | None, pretrained: bool) -> nn.Module:
    if kind != "classification":
        raise SettingsError(f"timm has no models for {kind}: take one of torchvision or transformers.")
    timm = library_of("timm", f"model='timm:{name}'")
    if not name.startswith(("hf-hub:", "hf_hub:", "local-dir:")):
        check_known(name.partition(".")[0], timm.list_models(), "model of timm")
    sized = {} if num_classes is None else {"num_classes": num_classes}
    made: nn.Module = timm.create_model(name, pretrained=pretrained, **sized)
    return made


def _of_torchvision(name: str, kind: Kind, num_classes: int | None, pretrained: bool) -> nn.Module:
    models = library_of("torchvision", f"model='torchvision:{name}'").models
    place = {"classification": models, "segmentation": models.segmentation, "detection": models.detection}[kind]
    check_known(name, models.list_models(module=place), f"{kind} model of torchvision")
    weights = models.get_model_weights(name).DEFAULT if pretrained else None
    if kind == "detection" and num_classes is not None:
        num_classes += 1  # torchvision's class 0 is the background
    if weights is not None and num_classes in (None, len(weights.meta["categories"])):
        whole: nn.Module = models.get_model(name, weights=weights)
        return whole
    sized = {} if num_classes is None else {"num_classes": num_classes}
    if weights is not None and num_classes is not None and kind != "detection":
        return _with_head_of(models, name, weights, num_classes)
    # A detector that is told of no weights at all trains all layers, with batch norm awake, as if it began from
    # nothing: so its backbone is loaded although what it holds is replaced.
    backbone = {} if kind == "classification" or weights is not None else {"weights_backbone": None}
    made: nn.Module = models.get_model(name, weights=None, **backbone, **sized)
    if weights is not None:
        own_state = made.state_dict()
        saved = weights.get_state_dict(progress=False, check_hash=True)
        fitting = {key: value for key, value in saved.items() if _shape(own_state.get(key)) == value.shape}
        made.load_state_dict(fitting, strict=False)
    return made


def _with_head_of(models: Any, name: str, weights: Any, num_classes: int) -> nn.Module:
    """A pretrained model whose last layers, of each of its heads, are new ones for so many classes."""
    whole: nn.Module = models.get_model(name, weights=weights)
    known, settings = len(weights.meta["categories"]), dict[str, Any]()
    if hasattr(whole, "aux_classifier"):
        settings = {"weights_backbone": None, "aux_loss": whole.aux_classifier is not None}
    elif hasattr(whole, "backbone"):
        settings = {"weights_backbone": None}
    fresh = models.get_model(name, weights=None, num_classes=num_classes, **settings)
    for path, layer in list(whole.named_modules()):
        if isinstance(layer, nn.Linear | nn.Conv2d) and layer.weight.shape[0] == known:
            new = fresh.get_submodule(path)
            if new.weight.shape != layer.weight.shape:
                parent, _, last = path.rpartition(".")
                setattr(whole.get_submodule(parent), last, new)
    return whole


def _shape(tensor: Any) -> Any:
    return None if tensor is None else tensor.shape


def _of_transformers(name: str, kind: Kind, num_classes: int | None, pretrained: bool) -> nn.Module:
    import transformers

    folder = Path(name)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise SettingsError(f"The folder {folder} holds no config.json, so no model of transformers.")
    auto = getattr(transformers, AUTO[kind])
    sized = {} if num_classes is None else {"num_labels": num_classes}
    if pretrained:
        made: nn.Module = auto.from_pretrained(name, ignore_mismatched_sizes=True, **sized)
    else:
        made = auto.from_config(transformers.AutoConfig.from_pretrained(name, **sized))
    return made
