"""The gradient norm where gradients lie on several devices."""

from __future__ import annotations

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from moesaic.train.grad_norm import clip_grad_norm_


def test_gradients_on_host_and_device_are_never_mixed() -> None:
    """On fake tensors, which refuse what a real accelerator would. The norm lies where the first gradient does."""
    with FakeTensorMode():
        params = [nn.Parameter(torch.ones(3, device=device)) for device in ("cuda", "cpu", "cpu", "cuda")]
        for param in params:
            param.grad = torch.ones_like(param)
        for norm_type in (2.0, float("inf")):
            assert clip_grad_norm_(params, 1.0, norm_type).device.type == "cuda"
        assert [param.grad.device.type for param in params if param.grad is not None] == ["cuda", "cpu", "cpu", "cuda"]
