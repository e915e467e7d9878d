"""A module that is broken in one place at one step, and runs of it."""

import torch

from tests.support.trainer import AdamwRegressor, fit, make_loader, seeded, with_options

RANK, BATCH = 1, 3  # where something is broken; two micro-batches make a step


class Broken(AdamwRegressor):
    """One thing is not finite, once: on one rank, in one micro-batch."""

    def __init__(self, where, value=float("nan")):
        super().__init__()
        self.where = where
        self.value = value
        self.batch = -1
        self.before = self.after = None
        self.numbers = set()  # of micro-batches

    def training_step(self, batch, batch_idx):
        self.batch = batch_idx
        loss = super().training_step(batch, batch_idx)
        return loss * self.value if self._breaks("loss") else loss

    def forward(self, x):
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        if self._breaks("backward"):
            x.register_hook(lambda g: g * self.value)
        return self.head(x)

    def _breaks(self, where):
        is_last_rank = self.trainer.global_rank == self.trainer.world_size - 1
        return self.where == where and self.batch == BATCH and is_last_rank

    def on_train_start(self):
        access = self.trainer.strategy
        access.gradients.on_local(lambda name, gradient, number: self.numbers.add(number))
        if self.where == "local":
            access.gradients.on_local(self._break_local)
        if self.where == "reduced":
            access.gradients.on_reduced(self._break_reduced)

    def on_fit_start(self):
        if self.where == "activation":
            self.blocks[1].up.register_forward_hook(self._break_output)

    def _break_output(self, module, args, output):
        return output * self.value if self._breaks("activation") else None

    def _break_local(self, name, gradient, micro_batch):
        if self._breaks("local") and name == "blocks.0.up.weight":
            gradient.view(-1)[3] = self.value

    def _break_reduced(self, name, shard, micro_batch):
        if self._breaks("reduced") and name == "blocks.0.down.weight" and shard.numel():
            shard[0] = self.value

    def on_train_batch_start(self, batch, batch_idx):
        if self.where == "weight" and batch_idx == BATCH - 1:
            shard = self.trainer.strategy.weights["blocks.0.down.weight"].shard
            if self.trainer.global_rank == RANK and shard.numel():
                with torch.no_grad():
                    shard[0] = self.value
                self.trainer.strategy.engine.read_shards_again()
            else:
                self.trainer.strategy.engine.read_shards_again()

    def on_before_optimizer_step(self, optimizer):
        if self.batch == BATCH:
            self.before = self._bits(optimizer)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == BATCH:
            self.after = self._bits(self.optimizers().optimizer)

    def _bits(self, optimizer):
        weights = self.trainer.strategy.weights
        bits = {name: weight.shard.clone() for name, weight in weights.items()}
        for name, gradient in self.trainer.strategy.gradients.shards().items():
            bits[f"gradient of {name}"] = gradient.clone()
        state = self.trainer.strategy.engine.full_optimizer_state_dict(optimizer)["state"]
        return bits, {name: dict(values) for name, values in state.items()}


def run_broken(strategy, folder, where, mode, *, shard_size=None, **options):
    model = seeded(lambda: Broken(where))
    strategy = with_options(strategy, on_nonfinite=mode, shard_size=shard_size)
    options.setdefault("accumulate_grad_batches", 2)
    loader = make_loader(48)
    return model, fit(strategy, folder, model, loader, **options)
