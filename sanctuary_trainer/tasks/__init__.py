"""Ready-made tasks and their data: hand them to a `Trainer`, or read them as a pattern for your own."""

from sanctuary_trainer.tasks.boxed_batch import collate_boxes
from sanctuary_trainer.tasks.detection_data import DetectionData
from sanctuary_trainer.tasks.image_classification import ImageClassification
from sanctuary_trainer.tasks.image_data import ImageData
from sanctuary_trainer.tasks.object_detection import ObjectDetection
from sanctuary_trainer.tasks.segmentation_data import SegmentationData
from sanctuary_trainer.tasks.semantic_segmentation import SemanticSegmentation

__all__ = [
    "DetectionData",
    "ImageClassification",
    "ImageData",
    "ObjectDetection",
    "SegmentationData",
    "SemanticSegmentation",
    "collate_boxes",
]
