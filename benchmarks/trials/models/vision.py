"""Images, signals along one dimension, and what is drawn from them."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.trials.parts import Feed, Made, images, perceptron


class _Classifier(nn.Module):
    """A body, a mean over pixels and a head."""

    def __init__(self, body: nn.Module, width: int) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(width, 10)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": F.cross_entropy(self.head(self.body(x).mean((2, 3))), labels)}


class _Residual(nn.Module):
    def __init__(self, width: int, norm: type[nn.Module] | None) -> None:
        super().__init__()
        made = {None: nn.Identity, nn.GroupNorm: lambda: nn.GroupNorm(2, width)}
        make = made.get(norm, lambda: norm(width))  # type: ignore[misc]
        self.a, self.b = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.norm, self.norm2 = make(), make()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.norm2(self.b(F.relu(self.norm(self.a(x))))))


def _resnet(norm: type[nn.Module] | None) -> nn.Module:
    return _Classifier(nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), *[_Residual(8, norm) for _ in range(3)]), 8)


def resnet_without_norms(batch: int = 8) -> Made:
    return _resnet(None), images(batch)


def resnet_group_norm(batch: int = 8) -> Made:
    return _resnet(nn.GroupNorm), images(batch)


def resnet_batch_norm(batch: int = 8) -> Made:
    return _resnet(nn.BatchNorm2d), images(batch)


def resnet_sync_batch_norm(batch: int = 8) -> Made:
    return nn.SyncBatchNorm.convert_sync_batchnorm(_resnet(nn.BatchNorm2d)), images(batch)


class _Frozen(nn.BatchNorm2d):
    """Statistics stay, as when a backbone is fine-tuned."""

    def train(self, mode: bool = True) -> _Frozen:
        return super().train(False)


def resnet_frozen_batch_norm(batch: int = 8) -> Made:
    return _resnet(_Frozen).train(), images(batch)


def instance_norm_and_depthwise(batch: int = 8) -> Made:
    layers = [nn.Conv2d(3, 8, 1)]
    for _ in range(3):
        layers += [
            nn.Conv2d(8, 8, 3, padding=1, groups=8),
            nn.InstanceNorm2d(8, affine=True),
            nn.Hardswish(),
            nn.Conv2d(8, 8, 1),
        ]
    return _Classifier(nn.Sequential(*layers), 8), images(batch)


class _UNet(nn.Module):
    """Skips between levels; a denoiser with a time for every sample."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Conv2d(a, b, 3, 2, 1) for a, b in ((3, 8), (8, 16)))
        self.up = nn.ModuleList(nn.ConvTranspose2d(a, b, 4, 2, 1) for a, b in ((16, 8), (16, 3)))
        self.time = perceptron(8, 16, 16, act=nn.SiLU)

    def forward(self, x: torch.Tensor, noise: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        level = torch.cos(t * 1.5)[:, None, None, None]
        angles = t[:, None] * 2.0 ** torch.arange(4, device=t.device)
        a = F.silu(self.down[0](level * x + (1 - level**2).sqrt() * noise))
        b = F.silu(self.down[1](a) + self.time(torch.cat([angles.sin(), angles.cos()], 1))[:, :, None, None])
        return F.mse_loss(self.up[1](torch.cat([F.silu(self.up[0](b)), a], 1)), noise)


def unet_denoiser(batch: int = 8) -> Made:
    return _UNet(), {"x": torch.randn(batch, 3, 16, 16), "noise": torch.randn(batch, 3, 16, 16), "t": torch.rand(batch)}


class _Patches(nn.Module):
    """A mixer of patches and channels by einsum."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 32, 4, 4)
        self.mix = nn.ParameterList(nn.Parameter(torch.eye(16) + torch.randn(16, 16) / 8) for _ in range(2))
        self.feeds, self.head = nn.ModuleList(Feed() for _ in range(2)), nn.Linear(32, 10)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.patch(x).flatten(2).transpose(1, 2)
        for mix, feed in zip(self.mix, self.feeds, strict=True):
            x = feed(torch.einsum("bpc,pq->bqc", x, mix))
        return {"loss": F.cross_entropy(self.head(x.mean(1)), labels)}


def mixer_by_einsum(batch: int = 8) -> Made:
    return _Patches(), images(batch)


class _Temporal(nn.Module):
    """Dilated causal convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(4, 16, 1)
        self.layers = nn.ModuleList(nn.Conv1d(16, 32, 2, dilation=2**i) for i in range(3))
        self.out = nn.Conv1d(16, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x[..., :-1])
        for i, layer in enumerate(self.layers):
            a, b = layer(F.pad(h, (2**i, 0))).chunk(2, 1)
            h = h + a.tanh() * b.sigmoid()
        return F.smooth_l1_loss(self.out(h), x[..., 1:])


def dilated_conv1d(batch: int = 8) -> Made:
    return _Temporal(), {"x": torch.randn(batch, 4, 20)}


class _Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 6))
        self.decoder = nn.Sequential(
            nn.Linear(6, 128), nn.Unflatten(1, (8, 4, 4)), nn.Upsample(scale_factor=4), nn.Conv2d(8, 3, 3, padding=1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.decoder(self.encoder(x)), x)


def conv_autoencoder(batch: int = 8) -> Made:
    return _Autoencoder(), (torch.randn(batch, 3, 16, 16),)


class _Spectrum(nn.Module):
    """Complex weights on the lowest frequencies."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.out = nn.Linear(2, 16), nn.Linear(16, 1)
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(5, 16, 16, dtype=torch.cfloat) / 16) for _ in range(2))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.read(x)
        for weight in self.weights:
            modes = torch.einsum("bmi,mio->bmo", torch.fft.rfft(h, dim=1)[:, :5], weight)
            h = h + F.gelu(torch.fft.irfft(modes, n=h.shape[1], dim=1))
        return F.mse_loss(self.out(h), y)


def fourier_operator(batch: int = 8) -> Made:
    return _Spectrum(), {"x": torch.randn(batch, 16, 2), "y": torch.randn(batch, 16, 1)}
