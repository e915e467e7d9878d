"""Small models of transformers, plain and sharded."""

import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_fsdp import ZERO3, shard_model

IDS = torch.arange(24).reshape(2, 12) % 61


def _gpt2():
    config = GPT2Config(vocab_size=61, n_positions=16, n_embd=20, n_layer=2, n_head=2)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    config.bos_token_id = config.eos_token_id = 0
    return GPT2LMHeadModel(config)


def _plain(model):
    return model


def _core_zero3(model):
    return shard_model(model, ZERO3)


def logits_of(model):
    with torch.no_grad():
        return model.eval()(IDS).logits


def wholes(model):
    return {
        name: (v.full_tensor() if hasattr(v, "full_tensor") else v).detach().clone()
        for name, v in model.state_dict().items()
    }


def token_loader():
    ids = torch.randint(0, 61, (16, 12), generator=torch.Generator().manual_seed(1))
    return DataLoader([{"input_ids": row, "labels": row} for row in ids], batch_size=2)
