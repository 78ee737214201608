"""Segmentation where most pixels bear no label: the loss is a mean over labelled pixels, so they are its weight.

    python examples/segmentation.py

Batches hold very different numbers of labelled pixels. A step that returns its weight makes accumulated batches, and
the batches of several processes, count pixel for pixel, as in one big batch. A batch without any label has weight 0,
and its loss, which is not a number, is not looked at.
"""

import os

import torch
import torch.nn.functional as F
from shapes import CLASSES, draw_scene
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MulticlassJaccardIndex

from sanctuary_trainer import Trainer, VisionTask

UNLABELLED = 255


class PartlyLabelled(Dataset):
    """Scenes in which only some columns of pixels are labelled: in some scenes all of them, in every sixth none."""

    def __init__(self, seed: int, length: int, fully: bool = False) -> None:
        self.seed, self.length, self.fully = seed, length, fully

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        scene = draw_scene(self.seed, index)
        if not self.fully:
            columns = torch.rand(
                scene.mask.shape[1]
            )  # anew in every epoch; the trainer seeds it, with workers or without
            scene.mask[:, columns >= index % 6 / 5] = UNLABELLED
        return scene.image, scene.mask


def convolution(channels_in: int, channels_out: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, stride, 1, bias=False), nn.BatchNorm2d(channels_out), nn.ReLU()
    )


class SmallUNet(nn.Module):
    """(B, 3, H, W) to (B, classes, H, W); H and W are multiples of 4."""

    def __init__(self, classes: int, width: int = 24) -> None:
        super().__init__()
        self.fine = convolution(3, width, stride=2)
        self.coarse = nn.Sequential(
            convolution(width, 2 * width, stride=2), *(convolution(2 * width, 2 * width) for _ in range(4))
        )
        self.both = convolution(3 * width, width)
        self.classify = nn.Conv2d(width, classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        fine = self.fine(images)
        coarse = F.interpolate(self.coarse(fine), scale_factor=2)
        logits = self.classify(self.both(torch.cat([fine, coarse], 1)))
        return F.interpolate(logits, scale_factor=2, mode="bilinear")


class Segmentation(VisionTask):
    def __init__(self, lr: float = 5e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.model = SmallUNet(1 + len(CLASSES))
        self.overlap = MulticlassJaccardIndex(1 + len(CLASSES), ignore_index=UNLABELLED)

    def training_step(self, batch, batch_idx):
        images, masks = batch  # (B, 3, H, W) float in [0, 1], (B, H, W) int64
        loss = F.cross_entropy(self.model(images), masks, ignore_index=UNLABELLED)
        return {"loss": loss, "weight": (masks != UNLABELLED).sum()}

    def validation_step(self, batch, batch_idx):
        images, masks = batch
        found = self.model(images).argmax(1)
        self.overlap.update(found, masks)
        self.log("overlap", self.overlap, prog_bar=True)  # intersection over union, mean over the classes
        if batch_idx == 0:
            self.log_image("scenes", images[:8])
            self.log_image("found", found[:8, None] / len(CLASSES))

    def predict_step(self, batch, batch_idx):
        return self.model(batch[0]).argmax(1).to(torch.uint8)  # (B, H, W)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        steps = self.run.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.lr, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main(max_epochs: int = 8, scenes: int = 1024) -> None:
    torch.manual_seed(0)
    task = Segmentation()
    train = DataLoader(PartlyLabelled(0, scenes), batch_size=8, shuffle=True)
    test = DataLoader(PartlyLabelled(1, scenes // 8, fully=True), batch_size=32)
    trainer = Trainer(max_epochs=max_epochs, gradient_accumulation_steps=2, seed=0)
    trainer.fit(task, train, test)
    masks = trainer.predict(task, test)
    fullest = max(masks, key=lambda mask: mask.count_nonzero())
    if os.environ.get("RANK", "0") != "0":
        return  # every process has the results, one prints them
    print("The scene with the most shapes in it:")
    for row in fullest[::2]:
        print("".join(".Oo"[pixel] for pixel in row))


if __name__ == "__main__":
    main()
