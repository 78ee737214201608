"""Ready-made tasks and their data: hand them to a `Trainer`, or read them as a pattern for your own."""

from sanctuary_trainer.tasks.image_classification import ImageClassification
from sanctuary_trainer.tasks.image_data import ImageData

__all__ = ["ImageClassification", "ImageData"]
