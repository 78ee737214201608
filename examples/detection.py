"""Detection: every picture has its own number of objects, in the targets and in what is found.

    python examples/detection.py

The detector is CenterNet's idea (Zhou, Wang and Krähenbühl, Objects as Points, 2019) in its smallest form: a heat map
per class whose peaks are the objects' centres, and the distances to the four sides at each peak. So there is no
suppression of double boxes: a peak is the highest point of its neighbourhood.
"""

import os
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from shapes import CLASSES, Scene, draw_scene
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import Metric

from sanctuary_trainer import Trainer, VisionTask

STRIDE = 4  # pixels per cell of the heat map


class Scenes(Dataset):
    def __init__(self, seed: int, length: int) -> None:
        self.seed, self.length = seed, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Scene:
        return draw_scene(self.seed, index)


def collate(scenes: Sequence[Scene]) -> tuple[Tensor, list[dict[str, Tensor]]]:
    """Pictures of one size can be stacked, (B, 3, H, W); targets stay a list, one dict per picture."""
    return torch.stack([s.image for s in scenes]), [{"boxes": s.boxes, "labels": s.labels} for s in scenes]


class Detector(nn.Module):
    """(B, 3, H, W) to a heat map's logits, (B, classes, h, w), and distances to the sides in cells, (B, 4, h, w)."""

    def __init__(self, classes: int, width: int = 48) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for channels, stride in ((3, 2), (width, 2), (width, 1), (width, 1), (width, 1)):
            layers += [nn.Conv2d(channels, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        self.backbone = nn.Sequential(*layers)
        self.heat = nn.Conv2d(width, classes, 1)
        self.sides = nn.Conv2d(width, 4, 1)
        nn.init.constant_(self.heat.bias, -4.0)  # few cells are centres: 2 % at the start, or the loss begins at 100

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        features = self.backbone(images)
        return self.heat(features), self.sides(features).exp()


def encode(boxes: Tensor, labels: Tensor, height: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draws one picture's objects as the detector should see them.

    Returns:
        The heat (classes, h, w), 1 at centres and falling off around; the centres' places in it, (k, 3); their
        distances to the sides in cells, (k, 4).
    """
    boxes = boxes / STRIDE
    centres = (boxes[:, :2] + boxes[:, 2:]) / 2
    columns, rows = centres.long().unbind(1)
    y = torch.arange(height, device=boxes.device)[:, None]
    x = torch.arange(width, device=boxes.device)
    heat = torch.zeros(len(CLASSES), height, width, device=boxes.device)
    for row, column, label, box in zip(rows, columns, labels, boxes, strict=True):
        spread = (box[2] - box[0]) / 6
        bump = torch.exp(-((y - row) ** 2 + (x - column) ** 2) / (2 * spread**2))
        heat[label] = torch.maximum(heat[label], bump)
    cells = torch.stack([columns, rows], 1) + 0.5
    return heat, torch.stack([labels, rows, columns], 1), torch.cat([cells - boxes[:, :2], boxes[:, 2:] - cells], 1)


def decode(heat: Tensor, sides: Tensor, most: int = 20, least_score: float = 0.05) -> list[dict[str, Tensor]]:
    """The peaks of each picture's heat map as boxes in pixels, best first: as many as there are."""
    scores = heat.sigmoid()
    scores = scores * (scores == F.max_pool2d(scores, 3, 1, 1))
    found = []
    for picture, distances in zip(scores, sides, strict=True):
        best, places = picture.flatten().topk(most)
        best, places = best[best >= least_score], places[best >= least_score]
        labels, rows, columns = torch.unravel_index(places, picture.shape)
        cells = torch.stack([columns, rows], 1) + 0.5
        left_top, right_bottom = distances[:, rows, columns].T.split(2, 1)
        boxes = torch.cat([cells - left_top, cells + right_bottom], 1) * STRIDE
        found.append({"boxes": boxes, "scores": best, "labels": labels})
    return found


def box_overlap(a: Tensor, b: Tensor) -> Tensor:
    """Intersection over union of each of (n, 4) boxes with each of (m, 4): (n, m)."""
    left_top = torch.maximum(a[:, None, :2], b[:, :2])
    right_bottom = torch.minimum(a[:, None, 2:], b[:, 2:])
    shared = (right_bottom - left_top).clamp(min=0).prod(-1)
    areas = [(boxes[:, 2:] - boxes[:, :2]).prod(-1) for boxes in (a, b)]
    return shared / (areas[0][:, None] + areas[1] - shared)


class AveragePrecision(Metric):
    """Mean over classes of the area under the precision-recall curve; a box hits an object at an overlap of 0.5.

    Its state is a list with one tensor per picture, (boxes, 3), of any length: the trainer joins it over processes.
    """

    def __init__(self, least_overlap: float = 0.5) -> None:
        super().__init__()
        self.least_overlap = least_overlap
        self.add_state("found", [], dist_reduce_fx="cat")  # rows of label, score, whether it hit
        self.add_state("objects", torch.zeros(len(CLASSES)), dist_reduce_fx="sum")

    def update(self, found: list[dict[str, Tensor]], targets: list[dict[str, Tensor]]) -> None:
        for boxes, target in zip(found, targets, strict=True):
            self.objects += torch.bincount(target["labels"], minlength=len(CLASSES))
            overlap = box_overlap(boxes["boxes"], target["boxes"])
            overlap = overlap * (boxes["labels"][:, None] == target["labels"])
            hits = torch.zeros_like(boxes["scores"])
            if overlap.numel():
                for place in boxes["scores"].argsort(descending=True):
                    best = overlap[place].argmax()
                    if overlap[place, best] >= self.least_overlap:
                        hits[place] = 1
                        overlap[:, best] = 0  # an object is found once
            self.found.append(torch.stack([boxes["labels"].to(hits), boxes["scores"], hits], 1))

    def compute(self) -> Tensor:
        rows = torch.cat(list(self.found)) if isinstance(self.found, list) else self.found
        rows = rows[rows[:, 1].argsort(descending=True)]
        areas = []
        for label, objects in enumerate(self.objects):
            hits = rows[rows[:, 0] == label, 2]
            precision = hits.cumsum(0) / torch.arange(1, len(hits) + 1, device=hits.device)
            # The best precision at this recall or a higher one, as VOC and COCO have it.
            precision = precision.flip(0).cummax(0).values.flip(0) if len(hits) else precision
            areas.append((precision * hits).sum() / objects)
        return torch.stack(areas).mean()


class Detection(VisionTask):
    def __init__(self, lr: float = 5e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.model = Detector(len(CLASSES))
        self.average_precision = AveragePrecision()

    def training_step(self, batch, batch_idx):
        images, targets = batch
        heat, sides = self.model(images)
        encoded = [encode(t["boxes"], t["labels"], *heat.shape[2:]) for t in targets]
        wanted = torch.stack([e[0] for e in encoded])
        # Focal loss: cells that are easy count little, cells beside a centre are hardly held to be wrong.
        chance = heat.sigmoid()
        loss = torch.where(
            wanted == 1,
            (1 - chance) ** 2 * F.softplus(-heat),
            (1 - wanted) ** 4 * chance**2 * F.softplus(heat),
        ).sum()
        for picture, (_, places, distances) in zip(sides, encoded, strict=True):
            loss = loss + (picture[:, places[:, 1], places[:, 2]].T / distances).log().abs().sum()
        boxes = sum(len(t["labels"]) for t in targets)
        # A mean over boxes, whose number differs from batch to batch: it is the weight.
        return {"loss": loss / max(boxes, 1), "weight": boxes}

    def validation_step(self, batch, batch_idx):
        images, targets = batch
        self.average_precision.update(decode(*self.model(images)), targets)
        self.log("average_precision", self.average_precision, prog_bar=True)

    def predict_step(self, batch, batch_idx):
        return decode(*self.model(batch[0]))  # one dict per picture, with as many boxes as were found

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        steps = self.run.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.lr, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main(max_epochs: int = 10, scenes: int = 512) -> None:
    torch.manual_seed(0)
    task = Detection()
    train = DataLoader(Scenes(0, scenes), batch_size=16, shuffle=True, collate_fn=collate)
    test = DataLoader(Scenes(1, scenes // 4), batch_size=32, collate_fn=collate)
    trainer = Trainer(max_epochs=max_epochs, gradient_clip_val=10.0, seed=0)
    trainer.fit(task, train, test)
    predictions = trainer.predict(task, test)
    if os.environ.get("RANK", "0") != "0":
        return  # every process has the results, one prints them
    for index, found in enumerate(predictions[:4]):
        print(f"scene {index}:")
        for box, score, label in zip(found["boxes"], found["scores"], found["labels"], strict=True):
            if score >= 0.3:
                print(f"  {CLASSES[label]} {score:.2f} at {[round(side) for side in box.tolist()]}")


if __name__ == "__main__":
    main()
