"""Small models with adapters of peft, and training of them."""

import lightning.pytorch as pl
import peft
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.support.pretrained import _gpt2


def qwen2(tied=False):
    config = Qwen2Config(
        vocab_size=61,
        hidden_size=24,
        intermediate_size=36,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
        bos_token_id=0,
        eos_token_id=0,
    )
    return Qwen2ForCausalLM(config)


def lora(*targets, **options):
    targets = list(targets) or ["q_proj", "v_proj", "down_proj"]
    return peft.LoraConfig(r=3, target_modules=targets, task_type="CAUSAL_LM", **options)


def ia3():
    layers = ["k_proj", "v_proj", "down_proj"]
    return peft.IA3Config(
        target_modules=layers, feedforward_modules=["down_proj"], task_type="CAUSAL_LM"
    )


# What is built, and which adapters it gets. Embeddings and tokens: parameters that no block has, in
# containers without a forward.
KINDS = {
    "gpt2": (_gpt2, lambda: lora("c_attn", "c_proj", fan_in_fan_out=True)),
    "qwen2": (qwen2, lora),
    "tied": (lambda: qwen2(tied=True), lora),
    "bf16": (lambda: qwen2().bfloat16(), lora),
    "bf16 tied": (lambda: qwen2(tied=True).bfloat16(), lora),
    "dora": (qwen2, lambda: lora(use_dora=True)),
    "bf16 dora": (lambda: qwen2().bfloat16(), lambda: lora(use_dora=True)),
    "ia3": (qwen2, ia3),
    "head": (qwen2, lambda: lora("q_proj", "lm_head", use_dora=True)),
    "tied head": (lambda: qwen2(tied=True), lambda: lora("q_proj", "lm_head")),
    "embedding": (qwen2, lambda: lora("q_proj", "embed_tokens")),
    "tokens": (qwen2, lambda: lora(trainable_token_indices=[3, 5])),
    "untied": (lambda: qwen2(tied=True), lambda: lora(modules_to_save=["lm_head"])),
    "whole head": (qwen2, lambda: lora(modules_to_save=["lm_head"], bias="lora_only")),
}

# Of the kind "bf16", to be compiled: each block, and each adapter in it, takes seconds.
FEW_GRAPHS = "bf16 of few graphs"
_OF_FEW_GRAPHS = (lambda: qwen2().bfloat16(), lambda: lora("q_proj"))


def adapted(kind, seed=0):
    """The model of a kind; adapters have values that do something."""
    make, config = _OF_FEW_GRAPHS if kind == FEW_GRAPHS else KINDS[kind]
    torch.manual_seed(0)
    model = peft.get_peft_model(make(), config())
    torch.manual_seed(1 + seed)
    for parameter in trained(model):
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def trained(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def loss_of(model, batch):
    ids = batch["ids"]
    logits = model(input_ids=ids).logits.float()
    return F.cross_entropy(logits.flatten(0, 1), ids.roll(-1, 1).flatten())


def token_batch(step, micro, rank):
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    return {"ids": torch.randint(0, 61, (2, 12), generator=generator)}


class Adapted(pl.LightningModule):
    """Trains adapters."""

    def __init__(self, kind="qwen2", seed=0, optimizer=torch.optim.AdamW, lr=0.01):
        super().__init__()
        self.model = adapted(kind, seed)
        self.optimizer, self.lr = optimizer, lr

    def training_step(self, batch, batch_idx):
        return loss_of(self.model, batch)

    def configure_optimizers(self):
        takes_all = self.optimizer is not torch.optim.Muon  # which takes matrices only
        taken = [p for p in trained(self) if takes_all or p.dim() == 2]
        return self.optimizer(taken, lr=self.lr)


def adapted_loader(num_samples=16):
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(0, 61, (num_samples, 12), generator=generator)
    return DataLoader([{"ids": row} for row in ids], batch_size=2)
