"""A function whose backward is not the derivative of its forward, which an exported graph would lose."""

import torch


class Triple(torch.autograd.Function):
    """Doubles, with another gradient than that."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 3 * gradient
