"""Models in which several units, or one and what is around it, call a module or read a weight."""

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH = 6


class _Block(nn.Module):
    """Calls what it is given as its gate three times."""

    def __init__(self, gate=None):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH)
        self.gate = gate

    def forward(self, x):
        if self.gate is None:
            return x + self.up(self.norm(x)).tanh()
        x = x + self.up(self.gate(self.norm(x))).tanh()
        return x + 0.1 * self.gate(x) + 0.1 * self.gate(x.sin())


class _Net(pl.LightningModule):
    units = None

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inlet = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList(_Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 3)
        self.losses, self.gradients = [], []
        self.share()

    def share(self):
        raise NotImplementedError

    def forward(self, x):
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.mse_loss(self(x), y)
        self.losses.append(loss.detach().clone())
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.losses.append(F.mse_loss(self(x), y))

    def on_before_optimizer_step(self, optimizer):
        self.gradients.append(dict(self.trainer.strategy.gradients.full()))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class OfABlockToo(_Net):
    """A layer of a block, which the model around it calls before and after the blocks."""

    def share(self):
        self.blocks[1].gate = self.gate = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.gate(self.inlet(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x + self.gate(x))


class RegisteredFirst(OfABlockToo):
    """The same, which the model has before it has blocks; the last block has it."""

    def share(self):
        gate, blocks = nn.Linear(WIDTH, WIDTH), self.blocks
        del self.blocks
        self.gate, self.blocks = gate, blocks
        blocks[2].gate = gate


class CalledBetween(_Net):
    """All blocks have it, and the model calls it between them."""

    def share(self):
        self.gate = nn.Linear(WIDTH, WIDTH)
        for block in self.blocks:
            block.gate = self.gate

    def forward(self, x):
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x) + self.gate(x)
        return self.head(x)


class OfTwoBlocks(_Net):
    """The model does not have it."""

    def share(self):
        self.blocks[0].gate = self.blocks[2].gate = nn.Linear(WIDTH, WIDTH)


class OfSeveralLayers(OfABlockToo):
    """It has layers itself."""

    def share(self):
        layers = nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks[1].gate = self.gate = nn.Sequential(*layers)


class PartOfAPart(_Net):
    """The model calls a part of what two blocks share."""

    def share(self):
        gate = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.blocks[0].gate = self.blocks[2].gate = gate
        self.part = gate[2]

    def forward(self, x):
        return super().forward(x) + self.head(self.part(self.inlet(x)))


class OfItsOwnLayers(_Net):
    """The model calls a layer that is a block's alone, under a name of its own."""

    def share(self):
        self.first = self.blocks[0].up

    def forward(self, x):
        return super().forward(x) + self.head(self.first(self.inlet(x)))


class _Embeds(nn.Module):
    def __init__(self, table):
        super().__init__()
        self.up, self.table = nn.Linear(WIDTH, WIDTH), table

    def forward(self, x, tokens):
        return x + self.up(x + self.table(tokens)).tanh()


class Embedding(_Net):
    """An embedding that each block adds again."""

    def share(self):
        self.table = nn.Embedding(9, WIDTH)
        self.blocks = nn.ModuleList(_Embeds(self.table) for _ in range(2))

    def forward(self, x):
        tokens = x.sign().cumsum(1).long().remainder(9)[:, 0]
        x = self.inlet(x) + self.table(tokens)
        for block in self.blocks:
            x = block(x, tokens)
        return self.head(x + self.table(tokens))


class _Outer(nn.Module):
    """A unit around units, which goes on with their layer when they have ended."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH)
        self.inner = nn.ModuleList(_Block(self.gate) for _ in range(2))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.gate(x)
        for block in self.inner:
            x = block(x).tanh() + self.gate(x)
        return self.out(x)


class Nested(_Net):
    units = ("_Outer", "_Block")

    def share(self):
        self.blocks = nn.ModuleList(_Outer() for _ in range(2))


class Recomputed(CalledBetween):
    def forward(self, x):
        x = self.inlet(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) + self.gate(x)
        return self.head(x)


class Unused(OfABlockToo):
    """The block that has it is not called."""

    def forward(self, x):
        return self.head(self.gate(self.blocks[0](self.inlet(x))))


class OfAKindOfItsOwn(OfABlockToo):
    """It has a weight beside its layer, which it reads as well."""

    def share(self):
        self.blocks[1].gate = self.gate = _Gate()


class _Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.own, self.layer = nn.Parameter(torch.ones(WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return F.linear(x, self.layer.weight * self.own) + self.layer(x)


class OfAnotherDtype(OfABlockToo):
    def share(self):
        super().share()
        self.gate.double().weight.requires_grad_(False)
        self.gate.register_forward_pre_hook(lambda _, args: args[0].double())
        self.gate.register_forward_hook(lambda *args: args[-1].float())


class UnitOfTwo(_Net):
    """A unit inside two units."""

    units = ("_Outer", "_Block")

    def share(self):
        self.blocks = nn.ModuleList(_Outer() for _ in range(2))
        self.blocks[1].inner[0] = self.blocks[0].inner[0]


class Tied(OfABlockToo):
    """Its weight is another layer's, too."""

    def share(self):
        super().share()
        self.again = nn.Linear(WIDTH, WIDTH)
        self.again.weight = self.gate.weight

    def forward(self, x):
        return super().forward(x) + self.head(self.again(self.inlet(x)))


class _TiesWithin(_Outer):
    def __init__(self):
        super().__init__()
        for block in self.inner:
            block.gate = None
        self.inner[0].up.weight = self.gate.weight


class NestedTied(Nested):
    """A unit and one inside of it have a weight in common, in a layer of each."""

    units = ("_TiesWithin", "_Block")

    def share(self):
        self.blocks = nn.ModuleList(_TiesWithin() for _ in range(2))


class _Scales(_Block):
    """Reads a weight that others have, too."""

    def __init__(self, weights):
        super().__init__()
        self.weights = weights

    def forward(self, x):
        return super().forward(x) * self.weights[0]


class ReadByAll(_Net):
    """Blocks, and the model between them, read a weight that nobody calls."""

    def share(self):
        self.weights = nn.ParameterList([torch.linspace(0.5, 1, WIDTH)])
        self.blocks = nn.ModuleList(_Scales(self.weights) for _ in range(2))

    def forward(self, x):
        x = self.inlet(x) * self.weights[0]
        for block in self.blocks:
            x = block(x) * self.weights[0]
        return self.head(x)


class _ReadsGate(_Block):
    def forward(self, x):
        return x + F.linear(self.up(self.norm(x)), self.gate.weight).tanh()


class ReadByBlocks(_Net):
    """Blocks read the weight of a layer without calling it, as those of peft's Lily do."""

    def share(self):
        gate = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList(_ReadsGate(gate) for _ in range(2))


FORMS = [
    OfABlockToo, RegisteredFirst, CalledBetween, OfTwoBlocks, OfSeveralLayers, PartOfAPart,
    OfItsOwnLayers, Embedding, Nested, Recomputed, Unused, OfAKindOfItsOwn, OfAnotherDtype,
    UnitOfTwo, Tied, NestedTied, ReadByAll, ReadByBlocks,
]  # fmt: skip
