"""The network of `sanctuary demo`."""

from __future__ import annotations

from torch import Tensor, nn

WIDTH = 32  # channels of the first convolution


class SmallCNN(nn.Module):
    """Five convolutions for images from 8 x 8 to about 64 x 64 pixels.

    Args:
        channels: of the images.
        side: their shorter side in pixels; from 16 on the first convolution looks at every second place only.
        num_classes: K.
    """

    def __init__(self, channels: int, side: int, num_classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.BatchNorm2d(channels, affine=False),  # brings any images to mean 0 and variance 1
            _convolution(channels, WIDTH, stride=1 if side < 16 else 2),
            nn.MaxPool2d(2, ceil_mode=True),
            _convolution(WIDTH, 2 * WIDTH),
            _convolution(2 * WIDTH, 2 * WIDTH),
            nn.MaxPool2d(2, ceil_mode=True),
            _convolution(2 * WIDTH, 4 * WIDTH),
            _convolution(4 * WIDTH, 4 * WIDTH),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(4 * WIDTH, num_classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, K) of images (B, C, H, W) uint8."""
        logits: Tensor = self.layers(images.float() / 255)
        return logits


def _convolution(channels_in: int, channels_out: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(),
    )
