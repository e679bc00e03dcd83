"""The learning rate against torch's own schedulers."""

from __future__ import annotations

import pytest
import torch
from torch.optim import lr_scheduler

from rlctl.config import Optimizer, Scheduler
from rlctl.policy.schedule import learning_rate


def rates(steps, optimizer, scheduler):
    return [learning_rate(step, optimizer=optimizer, scheduler=scheduler) for step in range(1, steps + 1)]


def torch_rates(steps, make, lr):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler = make(optimizer)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def test_constant_is_constant():
    assert rates(3, Optimizer(lr=1e-5), Scheduler()) == [1e-5] * 3


def test_warmup_then_constant_equals_linear_lr():
    scheduler = Scheduler(warmup_steps=5, warmup_init_lr=1e-6)
    want = torch_rates(12, lambda o: lr_scheduler.LinearLR(o, start_factor=0.1, total_iters=5), 1e-5)
    assert rates(12, Optimizer(lr=1e-5), scheduler) == pytest.approx(want)


def test_cosine_equals_cosine_annealing_and_stays_at_the_minimum():
    scheduler = Scheduler(decay_style="cosine", decay_steps=10)
    want = torch_rates(11, lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=10, eta_min=1e-6), 1e-5)
    got = rates(20, Optimizer(lr=1e-5, min_lr=1e-6), scheduler)
    assert got[:11] == pytest.approx(want)
    assert got[11:] == pytest.approx([1e-6] * 9)


def test_linear_decay_after_warmup():
    scheduler = Scheduler(warmup_steps=2, decay_style="linear", decay_steps=4)
    got = rates(8, Optimizer(lr=1.0, min_lr=0.2), scheduler)
    assert got == pytest.approx([0.0, 0.5, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2])
