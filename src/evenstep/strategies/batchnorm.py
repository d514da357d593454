"""BatchNorm over the samples of all ranks, each counted once.

torch's SyncBatchNorm runs on accelerators only, and would count the sample on which a rank without samples
keeps step. This one is plain tensor arithmetic, so it runs anywhere, and leaves that sample out: with it, N
ranks compute what one process computes.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from evenstep.errors import UserError


class EvenBatchNorm(_BatchNorm):
    """Takes the place of a BatchNorm of any dimension, parameters and buffers included."""

    counts = True
    """Whether this rank's present samples count."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"BatchNorm takes at least 2 dimensions, not {input.dim()}")

    def forward(self, input: Tensor) -> Tensor:
        """Normalise by the mean and variance over all ranks' samples that count."""
        self._check_input_dim(input)
        if not (self.training or self.running_mean is None):
            return super().forward(input)
        rows = input.transpose(0, 1).flatten(1)  # channels x everything else
        rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
        weight = 1.0 if self.counts else 0.0
        sums = torch.cat([rows.sum(1) * weight, rows.new_tensor([rows.shape[1] * weight])])
        sums = _sum_over_ranks(sums)
        count, mean = sums[-1], sums[:-1] / sums[-1]
        # a second pass for the variance: the difference of large sums would lose digits
        centred = rows - mean[:, None]
        variance = _sum_over_ranks(centred.square().sum(1) * weight) / count
        self._remember(mean.detach(), variance.detach(), count.detach())
        scale = torch.rsqrt(variance + self.eps)
        shift = torch.zeros_like(mean)
        if self.affine:
            scale, shift = scale * self.weight, self.bias
        shape = (1, -1) + (1,) * (input.dim() - 2)
        normal = (input - mean.view(shape)) * scale.view(shape) + shift.view(shape)
        return normal.to(input.dtype)

    def _remember(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        """Carry the running statistics on, with the unbiased variance, as torch does."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        with torch.no_grad():
            self.num_batches_tracked += 1
            share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            unbiased = variance * count / (count - 1).clamp(min=1)
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), share)


def _sum_over_ranks(x: Tensor) -> Tensor:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return x
    total: Tensor = _Sum.apply(x)  # type: ignore[no-untyped-call]
    return total


class _Sum(torch.autograd.Function):
    """The sum over ranks; each rank's gradient is the sum of the gradients that the ranks have for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004 - the signature is torch's
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:  # noqa: ARG004
        total = gradients[0].clone()
        dist.all_reduce(total)
        return total


def even(model: nn.Module) -> nn.Module:
    """The model with each BatchNorm replaced, in place where that is possible."""
    if isinstance(model, _BatchNorm) and not isinstance(model, EvenBatchNorm):
        if type(model).forward not in (_BatchNorm.forward, nn.SyncBatchNorm.forward):
            raise UserError(
                f"--sync-batchnorm cannot stand in for a {type(model).__name__}, which does more than a "
                "BatchNorm; leave the option out, or take a model with plain BatchNorms"
            )
        norm = EvenBatchNorm(
            model.num_features, model.eps, model.momentum, model.affine, model.track_running_stats
        )
        norm.weight, norm.bias = model.weight, model.bias
        norm.running_mean, norm.running_var = model.running_mean, model.running_var
        norm.num_batches_tracked = model.num_batches_tracked
        norm.train(model.training)
        return norm
    for name, child in list(model.named_children()):
        replaced = even(child)
        if replaced is not child:
            setattr(model, name, replaced)
    return model
