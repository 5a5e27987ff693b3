"""The models that the workloads in this directory run, cut into parts of at most 2 ms on an H200.

Each has `data` to train on and `loss`, which hands every part's output to `mark`. The sizes stay
within a container with 3 GiB and keep the GPU busy (an H100 99.9 % of the time for ResNet18, 98.8 %
for the Transformer), except for the GRU: its chunks are as short as the stamps need, and an H100 is
idle a quarter of the time (`torch_workload.py --selftest`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

MarkFn = Callable[[Tensor, str], Tensor]
WrapFn = Callable[[nn.Module], Any]


class Half(nn.Module):
    """Half a residual block: convolution and normalisation; the second half adds the shortcut."""

    def __init__(self, wide: int, out: int, stride: int, *, shortcut: nn.Module | None) -> None:
        super().__init__()
        self.conv = nn.Conv2d(wide, out, 3, stride, 1, bias=False)
        self.norm = nn.BatchNorm2d(out)
        self.shortcut = shortcut

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        y: Tensor = self.norm(self.conv(x))
        if self.shortcut is not None and skip is not None:
            y = y + self.shortcut(skip)
        return functional.relu(y, inplace=True)


class ResidualBlock(nn.Module):
    """A residual block.

    It is one part, so that a step of a compiled job calls a dozen parts: with two dozen, an H200
    waited for the host one twelfth of the time.
    """

    def __init__(self, wide: int, out: int, stride: int, shortcut: nn.Module) -> None:
        super().__init__()
        self.first = Half(wide, out, stride, shortcut=None)
        self.second = Half(out, out, 1, shortcut=shortcut)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x), x)
        return y


class ResNet18(nn.Module):
    """ResNet-18 for 128 x 128 images, in single precision with TF32 convolutions."""

    batch = 192
    dtype = torch.float32

    def __init__(self, wrap: WrapFn, *, tiny: bool) -> None:
        super().__init__()
        self.side, widths = (32, (8, 16, 16, 16)) if tiny else (128, (64, 128, 256, 512))
        stem = widths[0]
        parts: list[tuple[str, nn.Module]] = [
            ("stem convolution", nn.Conv2d(3, stem, 7, 2, 3, bias=False)),
            ("stem normalisation", nn.Sequential(nn.BatchNorm2d(stem), nn.ReLU(inplace=True))),
            ("stem pool", nn.MaxPool2d(3, 2, 1)),
        ]
        wide = stem
        for stage, out in enumerate(widths, start=1):
            for block in (1, 2):
                stride = 2 if stage > 1 and block == 1 else 1
                same = stride == 1 and wide == out
                shortcut = (
                    nn.Identity()
                    if same
                    else nn.Sequential(
                        nn.Conv2d(wide, out, 1, stride, bias=False), nn.BatchNorm2d(out)
                    )
                )
                parts.append(
                    (f"stage {stage} block {block}", ResidualBlock(wide, out, stride, shortcut))
                )
                wide = out
        head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(wide, 1000))
        parts.append(("head", head))
        self.names = [name for name, _ in parts]
        self.parts = nn.ModuleList(wrap(part) for _, part in parts)

    def data(self, batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
        x = torch.randn(batch, 3, self.side, self.side, device=device)
        return x, torch.randint(1000, (batch,), device=device)

    def loss(self, x: Tensor, target: Tensor, mark: MarkFn) -> Tensor:
        for name, part in zip(self.names, self.parts, strict=True):
            x = mark(part(x), name)
        return functional.cross_entropy(x, target)


class Attention(nn.Module):
    """Causal self-attention with its norm and residual."""

    def __init__(self, wide: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(wide)
        self.qkv = nn.Linear(wide, 3 * wide)
        self.out = nn.Linear(wide, wide)

    def forward(self, x: Tensor) -> Tensor:
        n, length, wide = x.shape
        shape = (n, length, 3, self.heads, wide // self.heads)
        q, k, v = self.qkv(self.norm(x)).view(shape).permute(2, 0, 3, 1, 4).unbind(0)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        update: Tensor = self.out(y.transpose(1, 2).reshape(n, length, wide))
        return x + update


class FeedForward(nn.Module):
    """The feed-forward half of a layer with its norm and residual."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(wide)
        self.up = nn.Linear(wide, 4 * wide)
        self.down = nn.Linear(4 * wide, wide)

    def forward(self, x: Tensor) -> Tensor:
        update: Tensor = self.down(functional.relu(self.up(self.norm(x)), inplace=True))
        return x + update


class Transformer(nn.Module):
    """Four causal layers of width 1024 over sequences of 1024, all in bfloat16."""

    batch = 12
    dtype = torch.bfloat16

    def __init__(self, wrap: WrapFn, *, tiny: bool) -> None:
        super().__init__()
        self.length, wide, heads = (16, 64, 2) if tiny else (1024, 1024, 16)
        self.classes = 256
        parts: list[tuple[str, nn.Module]] = [("input", nn.Linear(self.classes, wide))]
        for layer in range(1, 5):
            parts.append((f"layer {layer} attention", Attention(wide, heads)))
            parts.append((f"layer {layer} feed-forward", FeedForward(wide)))
        parts.append(("head", nn.Sequential(nn.LayerNorm(wide), nn.Linear(wide, self.classes))))
        self.names = [name for name, _ in parts]
        self.parts = nn.ModuleList(wrap(part) for _, part in parts)

    def data(self, batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
        shape = (batch, self.length)
        x = torch.randn(*shape, self.classes, device=device, dtype=self.dtype)
        return x, torch.randint(self.classes, shape, device=device)

    def loss(self, x: Tensor, target: Tensor, mark: MarkFn) -> Tensor:
        for name, part in zip(self.names, self.parts, strict=True):
            x = mark(part(x), name)
        return functional.cross_entropy(x.flatten(0, 1), target.flatten())


class Gru(nn.Module):
    """A GRU with 2048 cells over sequences of 48, cut into chunks that pass their state on.

    cuDNN runs a chunk in one call, so stamps cannot be finer than a chunk. `--compile` affects the
    head alone: Dynamo leaves recurrent layers to cuDNN.
    """

    batch = 512
    dtype = torch.float32
    CHUNK = 3

    def __init__(self, wrap: WrapFn, *, tiny: bool) -> None:
        super().__init__()
        self.length, self.wide, cells = (12, 16, 32) if tiny else (48, 512, 2048)
        self.gru = nn.GRU(self.wide, cells)
        self.head = wrap(nn.Linear(cells, self.wide))

    def data(self, batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
        x = torch.randn(self.length + 1, batch, self.wide, device=device)
        return x[:-1].contiguous(), x[1:].contiguous()

    def loss(self, x: Tensor, target: Tensor, mark: MarkFn) -> Tensor:
        state: Tensor | None = None
        losses = []
        pairs = zip(torch.split(x, self.CHUNK), torch.split(target, self.CHUNK), strict=True)
        for index, (part, wanted) in enumerate(pairs, start=1):
            y, state = self.gru(part, state)
            losses.append(functional.mse_loss(self.head(y), wanted))
            state = mark(state, f"chunk {index}")
        return torch.stack(losses).mean()


class Gemm(nn.Module):
    """Products of 4096 x 4096 matrices in bfloat16, and nothing else that takes time."""

    batch = 4096
    dtype = torch.bfloat16

    def __init__(self, wrap: WrapFn, *, tiny: bool) -> None:
        super().__init__()
        self.wide = 64 if tiny else 4096
        layers = (nn.Linear(self.wide, self.wide, bias=False) for _ in range(6))
        self.parts = nn.ModuleList(wrap(layer) for layer in layers)

    def data(self, batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
        x = torch.randn(batch, self.wide, device=device, dtype=self.dtype)
        return x, torch.zeros_like(x)

    def loss(self, x: Tensor, target: Tensor, mark: MarkFn) -> Tensor:
        for index, part in enumerate(self.parts, start=1):
            x = mark(part(x), f"product {index}")
        return functional.mse_loss(x, target)


MODELS: dict[str, type[ResNet18 | Transformer | Gru | Gemm]] = {
    "resnet18": ResNet18,
    "transformer": Transformer,
    "gru": Gru,
    "gemm": Gemm,
}
