"""Vision transformers that compute what torchvision's do, out of layers whose per-example gradients are known."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedcgd_simulations.models.lora import add_lora
from fedcgd_simulations.models.weights import weights_path


@dataclass(frozen=True)
class Shape:
    """The sizes of a vision transformer."""

    patch: int
    layers: int
    heads: int
    hidden: int
    mlp: int
    image: int = 224


SHAPES = {
    "vit-b-16": Shape(16, 12, 12, 768, 3072),
    "vit-l-16": Shape(16, 24, 16, 1024, 4096),
    "vit-h-14": Shape(14, 32, 16, 1280, 5120),
}


class Tokens(nn.Module):
    """Patches with the class token before them and the position added to each. A layer of its own for Opacus' sake."""

    def __init__(self, length: int, hidden: int) -> None:
        super().__init__()
        self.class_token = nn.Parameter(torch.zeros(1, 1, hidden))
        self.position = nn.Parameter(torch.empty(1, length, hidden).normal_(std=0.02))

    def forward(self, patches: Tensor) -> Tensor:
        return torch.cat([self.class_token.expand(len(patches), -1, -1), patches], dim=1) + self.position


class Attention(nn.Module):
    """Multi-head self-attention out of four linear layers; `nn.MultiheadAttention` packs three of them in one weight."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(hidden, hidden) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        query, key, value = (
            layer(x).reshape(batch, length, self.heads, hidden // self.heads).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        # Written out, because vmap has no rule for the fused form.
        mixed = functional.softmax(query @ key.transpose(2, 3) * (hidden // self.heads) ** -0.5, dim=3) @ value
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, hidden))
        return out


class Encoder(nn.Module):
    """One layer: attention and a two-layer perceptron, each after a LayerNorm and next to a shortcut."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(shape.hidden, eps=1e-6)
        self.attention = Attention(shape.hidden, shape.heads)
        self.norm2 = nn.LayerNorm(shape.hidden, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(shape.hidden, shape.mlp), nn.GELU(), nn.Linear(shape.mlp, shape.hidden))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class VisionTransformer(nn.Module):
    """Logits from images of any size, which are first scaled to the size the model is made for."""

    def __init__(self, shape: Shape, classes: int) -> None:
        super().__init__()
        self.image = shape.image
        self.patches = nn.Conv2d(3, shape.hidden, shape.patch, stride=shape.patch)
        self.tokens = Tokens((shape.image // shape.patch) ** 2 + 1, shape.hidden)
        self.encoders = nn.Sequential(*(Encoder(shape) for _ in range(shape.layers)))
        self.norm = nn.LayerNorm(shape.hidden, eps=1e-6)
        self.head = nn.Linear(shape.hidden, classes)
        nn.init.trunc_normal_(self.patches.weight, std=(3 * shape.patch**2) ** -0.5)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, images: Tensor) -> Tensor:
        if images.shape[-1] != self.image:
            images = functional.interpolate(images, size=self.image, mode="bilinear", antialias=False)
        x = self.tokens(self.patches(images).flatten(2).transpose(1, 2))
        logits: Tensor = self.head(self.norm(self.encoders(x)[:, 0]))
        return logits


def vit(name: str, *, classes: int = 10, lora_rank: int | None = None) -> nn.Module:
    """The model `name`, pretrained from torchvision's file `NAME.pth` (vit_b_16.pth, …) in $FEDCGD_WEIGHTS, else random.

    With `lora_rank` only LoRA of that rank on queries and values, and the head, are trained.
    """
    model = VisionTransformer(SHAPES[name], classes)
    path = weights_path(f"{name.replace('-', '_')}.pth")
    if path is not None:
        load_torchvision(model, torch.load(path, map_location="cpu", weights_only=True))
    if lora_rank is None:
        return model
    return add_lora(
        model,
        rank=lora_rank,
        adapt=lambda part: part.endswith(("attention.query", "attention.value")),
        train=lambda part: part.startswith("head."),
    )


def load_torchvision(model: VisionTransformer, state: Mapping[str, Tensor]) -> None:
    """Take the weights of torchvision's model of the same sizes; the head only where the number of classes agrees."""
    own = dict(model.named_parameters())
    taken = {
        "patches.weight": state["conv_proj.weight"],
        "patches.bias": state["conv_proj.bias"],
        "tokens.class_token": state["class_token"],
        "tokens.position": state["encoder.pos_embedding"],
        "norm.weight": state["encoder.ln.weight"],
        "norm.bias": state["encoder.ln.bias"],
    }
    names = {
        "ln_1": "norm1",
        "ln_2": "norm2",
        "mlp.0": "mlp.0",
        "mlp.3": "mlp.2",
        "self_attention.out_proj": "attention.out",
    }
    for i in range(len(model.encoders)):
        theirs, ours = f"encoder.layers.encoder_layer_{i}.", f"encoders.{i}."
        for kind in ("weight", "bias"):
            for old, new in names.items():
                taken[f"{ours}{new}.{kind}"] = state[f"{theirs}{old}.{kind}"]
            parts = state[f"{theirs}self_attention.in_proj_{kind}"].chunk(3)
            for part, new in zip(parts, ("query", "key", "value"), strict=True):
                taken[f"{ours}attention.{new}.{kind}"] = part
    if state["heads.head.weight"].shape == own["head.weight"].shape:
        taken |= {"head.weight": state["heads.head.weight"], "head.bias": state["heads.head.bias"]}
    with torch.no_grad():
        for name, value in taken.items():
            own[name].copy_(value)
