"""ResNet-18 for images of 32x32 pixels.

The blocks and stages are those of the ImageNet model: four stages of two blocks, each stage with
twice the channels and half the resolution of the one before. The stem is that of the CIFAR models:
one 3x3 convolution at full resolution and no pooling, because a 7x7 one with stride 2 and a pooling
would leave 8x8 pixels of the 32x32 before the first block.

Source: He, Zhang, Ren, Sun, "Deep Residual Learning for Image Recognition", arXiv:1512.03385, 2015:
table 1 for the stages, section 4.2 for the stem.
"""

import torch.nn.functional as F
from torch import nn


def convolution(channels_in, channels_out, size, stride=1):
    """Return a convolution that keeps the resolution (with stride 1), and its batch norm."""
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, size, stride, padding=size // 2, bias=False),
        nn.BatchNorm2d(channels_out),
    )


class Block(nn.Module):
    """Two 3x3 convolutions and a way around them."""

    def __init__(self, channels_in, channels_out, stride):
        super().__init__()
        self.first = convolution(channels_in, channels_out, 3, stride)
        self.second = convolution(channels_out, channels_out, 3)
        self.around = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            self.around = convolution(channels_in, channels_out, 1, stride)

    def forward(self, x):
        """Map (n, channels_in, h, w) to (n, channels_out, h / stride, w / stride)."""
        y = self.second(F.relu(self.first(x)))
        return F.relu(y + self.around(x))


class ResNet18(nn.Module):
    """Images, shape (n, 3, 32, 32), to logits, shape (n, num_classes)."""

    def __init__(self, num_classes=10, width=64):
        super().__init__()
        self.stem = convolution(3, width, 3)
        blocks, channels = [], width
        for stage in range(4):
            wider = width * 2**stage
            blocks += [Block(channels, wider, 1 if stage == 0 else 2), Block(wider, wider, 1)]
            channels = wider
        self.blocks = nn.Sequential(*blocks)
        self.classify = nn.Linear(channels, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images):
        """Return the logits."""
        features = self.blocks(F.relu(self.stem(images)))
        return self.classify(features.mean(dim=(2, 3)))
