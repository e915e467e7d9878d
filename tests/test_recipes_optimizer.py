"""Muon in the recipes: the matrices of blocks by it, everything else by AdamW."""

import pytest
import torch

from recipes.errors import RecipeError
from recipes.gpt2 import GPT2
from recipes.optimizer import OptimizerConfig, build_muon
from recipes.qwen import Qwen
from tests.support.trainer import SHARDED, make_trainer, on_trainer_ranks

VOCABULARY = 97
MUON = OptimizerConfig(name="muon", lr=0.01)
KINDS = {
    "gpt2": (lambda **o: GPT2(size="nano", vocab_size=VOCABULARY, max_seq_len=16, **o)),
    "qwen": (lambda **o: Qwen(size="tiny", vocab_size=VOCABULARY, max_seq_len=16, **o)),
}


def _built(kind, **options):
    torch.manual_seed(0)
    module = KINDS[kind](**options)
    module.configure_model()
    return module


@pytest.mark.parametrize("kind", KINDS)
def test_matrices_of_blocks_are_muons_and_all_else_is_adamws(kind):
    module = _built(kind)
    names = {id(p): name for name, p in module.named_parameters()}
    optimizer = build_muon(module.model, MUON)
    muon, *others = optimizer.param_groups
    of_blocks = [n for n, p in module.named_parameters() if p.ndim == 2 and module.blocks_name in n]
    assert [names[id(p)] for p in muon["params"]] == of_blocks
    assert not muon.get("elementwise")
    assert all(group["elementwise"] for group in others)
    stepped = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    assert sorted(stepped) == sorted(names.values())


def _train(module, step):
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        tokens = torch.randint(0, VOCABULARY, (2, 16), generator=generator)
        module.model(input_ids=tokens, labels=tokens).loss.backward()
        step()
        module.zero_grad()
    return module.state_dict()


def test_one_optimizer_steps_as_the_two_do():
    one, two = _built("gpt2"), _built("gpt2")
    together = build_muon(one.model, MUON)
    muon, *others = build_muon(two.model, MUON).param_groups
    names = ("lr", "weight_decay", "momentum", "adjust_lr_fn")
    apart = [
        torch.optim.Muon(muon["params"], **{name: muon[name] for name in names}),
        torch.optim.AdamW(
            [{"params": g["params"], "weight_decay": g["weight_decay"]} for g in others],
            lr=MUON.lr, betas=MUON.betas, eps=MUON.eps, fused=True,
        ),
    ]  # fmt: skip
    found = _train(one, together.step)
    expected = _train(two, lambda: [optimizer.step() for optimizer in apart])
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("trains", ["weight", "bias"])
def test_a_model_may_train_matrices_alone_or_vectors_alone(trains):
    """As adapters do."""
    module = _built("gpt2")
    for name, parameter in module.named_parameters():
        parameter.requires_grad_("h." in name and "ln" not in name and name.endswith(trains))
    optimizer = build_muon(module.model, MUON)
    (group,) = optimizer.param_groups
    assert group.get("elementwise", False) == (trains == "bias")
    before = {name: value.clone() for name, value in module.state_dict().items()}
    after = _train(module, optimizer.step)
    stepped = {id(p) for p in group["params"]}
    for name, parameter in module.named_parameters():
        assert torch.equal(after[name], before[name]) == (id(parameter) not in stepped), name


def test_options_are_checked():
    with pytest.raises(RecipeError, match=r"optimizer\.momentum: expected 0 or more and less than"):
        OptimizerConfig(name="muon", momentum=1.0)


def _losses(rank, world_size, folder, kind, names):
    generator = torch.Generator().manual_seed(2)
    rows = torch.randint(0, VOCABULARY // 4, (48, 17), generator=generator)
    data = [{"input_ids": row[:-1], "labels": row[1:]} for row in rows]
    found = {}
    for strategy in ("ddp", *names):
        torch.manual_seed(0)
        module = KINDS[kind](optimizer=MUON)
        trainer = make_trainer(
            strategy, folder, max_steps=8, gradient_clip_val=1.0, limit_val_batches=0
        )
        losses = []
        module.on_train_batch_end = lambda outputs, *_, losses=losses: losses.append(
            outputs["loss"].item()
        )
        trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=2))
        found[strategy] = losses
    return found


# Each model under each engine: a stage is nothing to whole tensors.
@pytest.mark.parametrize(
    ("kind", "names"), [*zip(KINDS, (SHARDED[::2], SHARDED[1::2]), strict=True)], ids=KINDS
)
def test_a_run_is_the_same_under_every_engine(kind, names, tmp_path):
    for found in on_trainer_ranks(_losses, 2, tmp_path, kind, names, timeout_s=280):
        expected = found["ddp"]
        assert expected[-1] < 0.95 * expected[0]
        for strategy, losses in found.items():
            assert losses == pytest.approx(expected, rel=0.02), strategy
