"""VGG-19 with batch normalisation (Simonyan and Zisserman, arXiv 1409.1556, configuration E), and
generated images of learnable classes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

CLASSES = 10
_BLOCK_WIDTHS = (2 * (64,), 2 * (128,), 4 * (256,), 4 * (512,), 4 * (512,))
_NOISE_STDDEV = 0.5


class Vgg19(nn.Module):
    """Mean cross-entropy of a batch of images.

    Args:
        pixels: height and width of the images, a multiple of 32.
        divisor: divisor of the widths of all convolutions.
        hidden: width of the two hidden layers after them.
    """

    def __init__(self, pixels: int, divisor: int, hidden: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        in_channels = 3
        for block in _BLOCK_WIDTHS:
            for out_channels in (width // divisor for width in block):
                layers += [nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False)]
                layers += [nn.BatchNorm2d(out_channels), nn.ReLU(inplace=True)]
                in_channels = out_channels
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Linear(in_channels * (pixels // 32) ** 2, hidden),
            nn.ReLU(inplace=True),
            nn.Linear(hidden, hidden),
            nn.ReLU(inplace=True),
            nn.Linear(hidden, CLASSES),
        )

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the loss, a scalar, of images [batch, 3, pixels, pixels] with labels [batch]."""
        logits: Tensor = self.classifier(self.features(images).flatten(1))
        return functional.cross_entropy(logits, labels)


def draw_images(pixels: int, batch: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Draw images [batch, 3, pixels, pixels] and their classes [batch]. An image is the coarse
    pattern of its class, which is the same in every batch, with noise.
    """
    patterns = torch.randn(CLASSES, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(CLASSES, (batch,), generator=generator)
    coarse = functional.interpolate(patterns[labels], size=(pixels, pixels), mode="nearest")
    return {
        "images": coarse + _NOISE_STDDEV * torch.randn(coarse.shape, generator=generator),
        "labels": labels,
    }
