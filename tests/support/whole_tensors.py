"""Optimizers over whole tensors, batches for them, and the same steps in one process."""

import torch

from tests.support.models import causal_lm, lm_loss, token_batch
from tests.support.optimizers import Normed
from tests.support.parity import Trace, assert_traces_match, make_batches


def adafactor(model):
    return [torch.optim.Adafactor(model.parameters(), lr=0.02)]


def normed(model):
    return [Normed(model.parameters())]


def muon(model):
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    ids = set(map(id, matrices))
    others = [p for p in model.parameters() if id(p) not in ids]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=1e-2)]


def mixed(model):
    """One optimizer; its vectors are stepped by slices."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    return [Normed([{"params": vectors, "elementwise": True}, {"params": matrices}])]


OPTIMIZERS = {"muon": muon, "adafactor": adafactor, "normed": normed, "mixed": mixed}
STEPS = 3


class AsOne:
    """Several optimizers as one."""

    def __init__(self, optimizers):
        self.optimizers = optimizers

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self):
        for optimizer in self.optimizers:
            optimizer.zero_grad()


def batches_of(world_size, num_steps=STEPS, num_micro_batches=2):
    return make_batches(
        token_batch,
        num_steps=num_steps,
        num_micro_batches=num_micro_batches,
        world_size=world_size,
    )


def replay(model, trace, optimizers, first=0):
    """Train a plain model with the gradients of a run; its trace."""
    found = Trace()
    for step, gradients in enumerate(trace.gradients[first:], first):
        for name, parameter in model.named_parameters():
            gradient = gradients[name]
            parameter.grad = None if gradient is None else gradient.clone()
        found.record(model)
        for optimizer in optimizers:
            optimizer.step()
        found.record_step(model, trace.losses[step])
    return found


def assert_is_one_process(trace, name, what=""):
    model = causal_lm()
    assert_traces_match(trace, replay(model, trace, OPTIMIZERS[name](model)), atol=0, what=what)


class Descent(torch.optim.Optimizer):
    """SGD that nothing is known of."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr})
        self.fails = False

    @torch.no_grad()
    def step(self, closure=None):
        if closure is not None:
            with torch.enable_grad():
                closure()
        if self.fails:
            raise ValueError("as asked")
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, group)

    def update(self, parameter, group):
        parameter.add_(parameter.grad, alpha=-group["lr"])


def backward(model, rank, step=0):
    lm_loss(model, token_batch(step, 0, rank)).backward()


def matrices_of(model):
    return [p for p in model.blocks.parameters() if p.ndim == 2]
