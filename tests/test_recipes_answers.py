"""Prompts with answers: what is in a sequence, and that the loss is the answers' alone."""

import json
from pathlib import Path

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from recipes.causal_lm import CausalLM
from recipes.data import TextData
from recipes.errors import RecipeError
from recipes.optimizer import OptimizerConfig
from tests.support.trainer import on_trainer_ranks, seeded, weights_of

PAIRS = [
    (f"What is {n} and {n * n}? ", " ".join(["It", "is", str(n + n * n), "."] * (1 + n % 5)))
    for n in range(24)
]


def _file(folder, pairs=PAIRS, name="pairs.jsonl"):
    path = Path(folder) / name
    lines = [json.dumps({"prompt": prompt, "completion": answer}) for prompt, answer in pairs]
    path.write_text("\n".join(lines))
    return path


def _data(path, **options):
    defaults = {"text_field": "prompt", "answer_field": "completion", "seq_len": 48}
    defaults |= {"batch_size": 2, "vocab_size": 300, "val_fraction": 0.25}
    return TextData(path=path, cache_dir=Path(path).parent / "cache", **{**defaults, **options})


def _text(tokens, ids):
    return tokens.tokenizer().decode([int(i) for i in ids], skip_special_tokens=False)


def test_a_sequence_is_a_prompt_and_its_answer_and_labels_are_the_answer_and_its_end(tmp_path):
    data = _data(_file(tmp_path))
    tokens = data.open()
    assert (len(data.train), len(data.val)) == (18, 6)
    for number, (prompt, answer) in enumerate(PAIRS):
        dataset, index = (data.train, number) if number < 18 else (data.val, number - 18)
        row = dataset[index]
        counts = row["labels"] != -100
        assert int(counts.sum()) == int(row["num_tokens"])
        assert _text(tokens, row["labels"][counts]) == f"{answer}<|endoftext|>"
        first = int(counts.nonzero()[0])
        assert _text(tokens, row["input_ids"][: first + 1]) == prompt
        length = first + int(row["num_tokens"])
        joined = torch.cat([row["input_ids"][:length], row["labels"][length - 1 : length]])
        assert _text(tokens, joined) == f"{prompt}{answer}<|endoftext|>"
        assert (row["input_ids"][length:] == tokens.end_of_text).all()
    for index in (-1, 18):
        with pytest.raises(IndexError, match="expected 0 to 17"):
            data.train[index]


def test_of_what_is_too_long_the_prompt_loses_its_beginning_and_the_answer_its_end(tmp_path):
    pairs = [("begin " * 40 + "here", "short"), ("prompt", "much " * 60)] * 4
    data = _data(_file(tmp_path, pairs), seq_len=16, val_fraction=0)
    tokens = data.open()
    long_prompt, long_answer = data.train[0], data.train[1]
    counts = long_prompt["labels"] != -100
    assert _text(tokens, long_prompt["labels"][counts]) == "short<|endoftext|>"
    assert _text(tokens, long_prompt["input_ids"]).startswith(("begin", " begin", "b", "e", "g"))
    assert "here" in _text(tokens, long_prompt["input_ids"])
    assert int(long_answer["num_tokens"]) == 16
    assert _text(tokens, long_answer["labels"]).startswith("much much")


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([("a prompt", "an answer"), ("", "an answer")], "expected text in each 'prompt', got 1"),
        (
            [("a prompt", ""), ("a prompt", "an answer")],
            "expected text in each 'completion', got 1",
        ),
    ],
)
def test_prompts_and_answers_without_text_are_refused(tmp_path, pairs, message):
    with pytest.raises(RecipeError, match=message):
        _data(_file(tmp_path, pairs)).open()


def test_a_token_that_occurs_in_the_text_ends_no_documents(tmp_path):
    data = _data(_file(tmp_path))
    tokens = data.open().tokenizer()
    in_text = tokens.id_to_token(tokens.encode(" is").ids[0])
    saved = tmp_path / "tokenizer.json"
    tokens.save(str(saved))
    with pytest.raises(RecipeError, match=r"end-of-text token 24 times.* choose another"):
        _data(_file(tmp_path), tokenizer=str(saved), end_of_text=in_text).open()


def test_other_wrong_use_is_named(tmp_path):
    with pytest.raises(RecipeError, match="expected another field for the answers"):
        _data(_file(tmp_path), text_field="completion").open()
    with pytest.raises(RecipeError, match=r"the field 'answr'.*--data\.answer_field"):
        _data(_file(tmp_path), answer_field="answr").open()
    plain = tmp_path / "plain.txt"
    plain.write_text("text")
    with pytest.raises(RecipeError, match=r"expected files with fields .*got plain text"):
        _data(plain).open()
    with pytest.raises(RecipeError, match=r"expected files with fields"):
        TextData(answer_field="completion", cache_dir=tmp_path / "cache").open()


def test_a_run_goes_on_with_its_own_prompts_and_answers_alone(tmp_path):
    path = tmp_path / "pairs.jsonl"
    row = {"prompt": "What is it? ", "other": "Say it. ", "completion": "It is this."}
    path.write_text("\n".join([json.dumps(row)] * 24))

    def started(**options):
        data = _data(path, seq_len=8, **options)
        data.setup("fit")
        return data

    state = started().state_dict()
    started().load_state_dict(state)
    for field in ("text_field", "answer_field"):
        with pytest.raises(RecipeError, match=r"checkpoint: .* read with other options"):
            started(**{field: "other"}).load_state_dict(state)
    with pytest.raises(RecipeError, match=r"checkpoint: .* read with other options"):
        started(text_field="completion", answer_field=None).load_state_dict(state)


class Tiny(CausalLM):
    model_class = GPT2LMHeadModel
    blocks_name = "transformer.h"

    def __init__(self):
        config = GPT2Config(
            vocab_size=300,
            n_positions=48,
            n_embd=16,
            n_layer=2,
            n_head=2,
            attn_pdrop=0,
            embd_pdrop=0,
            resid_pdrop=0,
            bos_token_id=0,
            eos_token_id=0,
        )
        super().__init__(
            config,
            pretrained=None,
            activation_checkpointing=False,
            compile_blocks=False,
            optimizer=OptimizerConfig(),
        )
        self.logged = []

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)

    def on_before_optimizer_step(self, optimizer):
        super().on_before_optimizer_step(optimizer)
        self.logged.append(float(self.trainer.callback_metrics["train/loss"]))


def _trainer(folder, strategy, **options):
    return L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        num_sanity_val_steps=0,
        **options,
    )


def _train(rank, world_size, file):
    data, model = _data(file), seeded(Tiny)
    trainer = _trainer(Path(file).parent, "scratch_fsdp", accumulate_grad_batches=2)
    torch.manual_seed(0)
    trainer.fit(model, data)

    # One process, one sum over the answers' tokens of each step, in the order that was trained.
    data = _data(file)
    data.open()
    plain = seeded(Tiny)
    torch.manual_seed(0)
    plain.configure_model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    from lightning_fsdp.data import DealtSampler

    orders = [
        list(DealtSampler(data.train, num_replicas=2, rank=each, seed=0)) for each in range(2)
    ]
    losses = []
    num_batches = len(orders[0]) // 2
    for first in range(0, num_batches, 2):
        rows = [
            data.train[i]
            for order in orders
            for i in order[2 * first : 2 * min(first + 2, num_batches)]
        ]
        logits = plain(torch.stack([row["input_ids"] for row in rows])).flatten(0, 1)
        loss = F.cross_entropy(logits, torch.stack([row["labels"] for row in rows]).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert len(losses) == trainer.global_step
    assert model.logged == pytest.approx(losses, rel=1e-5)
    torch.testing.assert_close(weights_of(model), dict(plain.state_dict()), atol=2e-6, rtol=2e-5)
    with torch.no_grad():
        rows = [data.val[i] for i in range(len(data.val))]
        logits = plain(torch.stack([row["input_ids"] for row in rows])).flatten(0, 1)
        expected = F.cross_entropy(logits, torch.stack([row["labels"] for row in rows]).flatten())
    torch.testing.assert_close(trainer.callback_metrics["val/loss"], expected, atol=1e-6, rtol=1e-5)


def test_two_ranks_train_the_mean_over_the_answers_tokens_of_each_step(tmp_path):
    on_trainer_ranks(_train, 2, _file(tmp_path))


def _ddp(rank, world_size, file):
    with pytest.raises(RecipeError, match="answer_field: expected a strategy of lightning_fsdp"):
        _trainer(Path(file).parent, "ddp").fit(seeded(Tiny), _data(file))


def test_a_strategy_that_cannot_weigh_is_refused(tmp_path):
    on_trainer_ranks(_ddp, 2, _file(tmp_path))
