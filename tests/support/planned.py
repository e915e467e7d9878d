"""Folders of small models, and plans for them."""

from pathlib import Path

from transformers import GPT2Config, Qwen2Config

from lightning_fsdp.plan.dry_run import Run, dry_run
from lightning_fsdp.plan.models import config_of

VOCABULARY, SEQ_LEN, BATCH = 512, 32, 2

SHAPES = {
    "gpt2": GPT2Config(n_layer=4, n_embd=128, n_head=4, vocab_size=VOCABULARY, eos_token_id=0),
    "qwen": Qwen2Config(
        num_hidden_layers=4, hidden_size=128, intermediate_size=512, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=VOCABULARY, tie_word_embeddings=True,
    ),
}  # fmt: skip


def folder_with(config, folder, **changes):
    """A folder with the config of a small model, without weights; the changes are of its fields."""
    path, shape = Path(folder) / config, SHAPES[config]
    type(shape).from_dict(shape.to_dict() | changes).save_pretrained(path)
    return path


def planned(folder, **options):
    run = Run(**{"batch_size": BATCH, "seq_len": SEQ_LEN, "precision": "32-true", **options})
    return dry_run(config_of(str(folder)), run)
