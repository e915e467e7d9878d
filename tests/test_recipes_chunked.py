"""The recipes' loss without logits: that of the logits, under every strategy, in less memory."""

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PretrainedConfig

from recipes.causal_lm import CausalLM
from recipes.gpt2 import GPT2
from recipes.qwen import Qwen
from tests.support.memory import StorageTracker
from tests.support.recipe_models import compile_eagerly, loss_and_gradients
from tests.support.trainer import SHARDED, assert_like_ddp, make_trainer, weights_of, with_options

VOCABULARY, SEQ_LEN = 97, 12


def _config(cls: type[CausalLM], vocab_size: int, *, tied: bool = True) -> PretrainedConfig:
    width = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
    if cls is Qwen:
        width = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
        width |= {"num_key_value_heads": 1, "intermediate_size": 24, "max_position_embeddings": 64}
    return cls.model_class.config_class(
        **width, vocab_size=vocab_size, tie_word_embeddings=tied, bos_token_id=0, eos_token_id=0
    )


def _small(
    cls: type[CausalLM], *, tied: bool = True, vocab_size: int = VOCABULARY, **options: object
) -> CausalLM:
    torch.manual_seed(3)
    module = cls(size="nano" if cls is GPT2 else "tiny", vocab_size=vocab_size, **options)
    module.config = _config(cls, vocab_size, tied=tied)
    if cls is GPT2:
        module.config.resid_pdrop = module.config.embd_pdrop = module.config.attn_pdrop = 0.0
    return module


def _batch(
    size: int = 4, seq_len: int = SEQ_LEN, vocab_size: int = VOCABULARY
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(vocab_size, (size, seq_len + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[:, : seq_len // 3] = -100
    return {"input_ids": tokens[:, :-1], "labels": labels}


@pytest.mark.parametrize(("cls", "tied"), [(GPT2, True), (Qwen, True), (Qwen, False)])
def test_chunked_and_plain_give_the_same_loss_and_gradients(
    cls: type[CausalLM], tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_eagerly(monkeypatch)
    found = []
    for options in (
        {"loss": "plain"},
        {},
        {"activation_checkpointing": True},
        {"compile_blocks": True},
    ):
        module = _small(cls, tied=tied, **options)
        module.configure_model()
        found.append(loss_and_gradients(module.train(), _batch()))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], atol=1e-6, rtol=1e-6)


def _train(strategy, folder, rank, *, cls, tied, precision="32-true"):
    """The same number of tokens everywhere, so that DDP's mean is the right one, too."""
    loss = "plain" if strategy == "ddp" else "chunked"
    module = _small(cls, tied=tied, loss=loss, activation_checkpointing=True)
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9)
    module.on_before_optimizer_step = lambda optimizer: None
    batch = _batch(8)
    data = [{key: value[i] for key, value in batch.items()} for i in range(8)]
    loader = DataLoader(data, batch_size=1)
    trainer = make_trainer(
        strategy, folder, precision=precision, accumulate_grad_batches=2, max_epochs=1
    )
    trainer.fit(module, loader, loader)
    return {"weights": weights_of(module), "loss": trainer.callback_metrics["val/loss"]}


def _train_tied(strategy, folder, rank):
    return _train(strategy, folder, rank, cls=GPT2, tied=True)


def _train_untied(strategy, folder, rank):
    return _train(strategy, folder, rank, cls=Qwen, tied=False)


def _train_as_one(strategy, folder, rank):
    """The model is a unit, of which the loss calls parts."""
    strategy = with_options(strategy, units=["GPT2LMHeadModel"])
    return _train(strategy, folder, rank, cls=GPT2, tied=True)


def _train_in_bf16(strategy, folder, rank):
    return _train(strategy, folder, rank, cls=Qwen, tied=True, precision="bf16-mixed")


# A tied weight belongs to two units, which meet otherwise at each stage; one that is not is as any.
@pytest.mark.parametrize(
    ("train", "sharded"),
    [(_train_tied, SHARDED), (_train_untied, SHARDED[::2]), (_train_as_one, SHARDED)],
)
def test_chunked_under_every_strategy_trains_as_plain_under_ddp(train, sharded, tmp_path) -> None:
    assert_like_ddp(train, tmp_path, sharded=sharded)


def test_chunked_under_bf16_trains_as_plain_under_ddp(tmp_path) -> None:
    assert_like_ddp(_train_in_bf16, tmp_path, sharded=SHARDED[::2], atol=1e-3, rtol=1e-2)


def test_the_peak_beside_the_gradient_of_the_weight_is_a_quarter() -> None:
    batch, peaks = _batch(16, 64, vocab_size=4096), {}
    for loss in ("chunked", "plain"):
        module = _small(GPT2, vocab_size=4096, loss=loss)
        module.configure_model()
        sizes: list[int] = []
        with StorageTracker(module) as tracker:
            tracker.track(batch.values())
            start = tracker.live_bytes()
            tracker.at_each_operation = lambda t=tracker, s=sizes: s.append(t.live_bytes())
            module.loss(batch).backward()
        peaks[loss] = max(sizes) - start - module.model.lm_head.weight.nbytes
    assert peaks["chunked"] <= 0.25 * peaks["plain"]
