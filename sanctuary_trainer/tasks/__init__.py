"""Ready-made tasks: hand one to a `Trainer`, or read it as a pattern for your own."""

from sanctuary_trainer.tasks.image_classification import ImageClassification

__all__ = ["ImageClassification"]
