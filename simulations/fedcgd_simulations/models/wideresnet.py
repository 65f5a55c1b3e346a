"""WideResNet with GroupNorm, which keeps examples apart as per-example clipping needs."""

from torch import Tensor, nn


class Block(nn.Module):
    """x + conv(act(norm(conv(act(norm(x)))))), with a 1 × 1 convolution next to it where the shape changes."""

    def __init__(self, channels: int, width: int, stride: int, groups: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(groups, channels)
        self.conv1 = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(groups, width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        same = stride == 1 and channels == width
        self.shortcut = nn.Identity() if same else nn.Conv2d(channels, width, 1, stride, bias=False)
        self.act1, self.act2 = nn.ReLU(), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        inner = self.act1(self.norm1(x))
        outer: Tensor = self.conv2(self.act2(self.norm2(self.conv1(inner))))
        shortcut: Tensor = self.shortcut(x if isinstance(self.shortcut, nn.Identity) else inner)
        return outer + shortcut


def wideresnet(depth: int = 40, widen: int = 4, classes: int = 10, groups: int = 16) -> nn.Module:
    """WRN-`depth`-`widen` (Zagoruyko and Komodakis, arXiv:1605.07146); 8.9 M weights for 40 and 4."""
    if (depth - 4) % 6:
        raise ValueError(f"depth must be 6·blocks + 4, got {depth}; 16, 22, 28, 34 and 40 are usual")
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1, bias=False)]
    channels = 16
    for stage, width in enumerate((16 * widen, 32 * widen, 64 * widen)):
        for block in range((depth - 4) // 6):
            layers.append(Block(channels, width, 2 if stage and block == 0 else 1, groups))
            channels = width
    head = [nn.GroupNorm(groups, channels), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, *head, nn.Linear(channels, classes))
