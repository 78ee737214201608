"""The network of `sanctuary demo`."""

from __future__ import annotations

from torch import Tensor, nn

WIDTH = 32  # channels of the first stage; each further one has twice as many
SMALL = 16  # pixels


class SmallCNN(nn.Module):
    """Stages of two convolutions each, for images from 8 x 8 to about 64 x 64 pixels.

    Args:
        channels: of the images.
        side: their shorter side in pixels. Small images keep their resolution in the first of two stages; from 16 on
            the first convolution looks at every second place only, and there are three stages.
        num_classes: K.
    """

    def __init__(self, channels: int, side: int, num_classes: int) -> None:
        super().__init__()
        widths = [WIDTH, 2 * WIDTH] if side < SMALL else [WIDTH, 2 * WIDTH, 4 * WIDTH]
        # The first norm, without weights, brings any images to mean 0 and variance 1.
        layers: list[nn.Module] = [nn.BatchNorm2d(channels, affine=False)]
        for i, width in enumerate(widths):
            if i:
                layers.append(nn.MaxPool2d(2, ceil_mode=True))
            layers.append(_convolution(channels, width, stride=2 if i == 0 and side >= SMALL else 1))
            layers.append(_convolution(width, width))
            channels = width
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes))

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
