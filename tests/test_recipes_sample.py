"""Text at the end of training: what transformers would write, by all ranks together."""

import functools
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from recipes.data import TextData
from recipes.errors import RecipeError
from recipes.gpt2 import GPT2
from recipes.optimizer import OptimizerConfig
from recipes.qwen import Qwen
from recipes.sample import SampleText
from tests.support.texts import write_folder
from tests.support.trainer import SHARDED, Regressor, make_trainer, on_trainer_ranks

pytestmark = pytest.mark.usefixtures("kept_ranks")

MODELS = {"qwen": Qwen, "gpt2": GPT2}
NUM_TOKENS = 6


def _data(folder: Path) -> TextData:
    return TextData(
        path=folder / "corpus",
        vocab_size=300,
        seq_len=16,
        batch_size=2,
        val_fraction=0.1,
        cache_dir=folder / "cache",
    )


def _model(name: str, **options: Any) -> Any:
    size = "tiny" if name == "qwen" else "nano"
    config = OptimizerConfig(lr=0.01)
    return MODELS[name](size=size, vocab_size=310, optimizer=config, **options)


def _train(
    strategy: str, folder: Path, model: Any, data: TextData, *callbacks: Any, **options: Any
) -> None:
    torch.manual_seed(0)
    options |= {"max_steps": 3, "limit_val_batches": 0}
    make_trainer(strategy, folder, callbacks=list(callbacks), **options).fit(model, data)


class _DrawsTheEnd(SampleText):
    """Rank r draws the end of the text as its ``ends[r]``-th token; counts forwards."""

    ends: tuple[int, ...] = ()
    rank = 0

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self.num_drawn, self.num_forwards = 0, 0
        self.rank, self.end = trainer.global_rank, trainer.datamodule.tokens.end_of_text

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        def count(*_: Any) -> None:
            self.num_forwards += 1

        handle = pl_module.model.register_forward_pre_hook(count)
        super().on_train_end(trainer, pl_module)
        handle.remove()

    def _draw(self, logits: Any, generator: Any) -> int:
        self.num_drawn += 1
        if self.num_drawn == self.ends[self.rank]:
            return int(self.end)
        logits = logits.clone()
        logits[self.end] = -torch.inf
        return super()._draw(logits, generator)


ENDS_TO_FORWARDS = {(2, 4): 4, (99, 1): NUM_TOKENS, (99, 99): NUM_TOKENS}


def _write_to_each_end(
    rank: int, world_size: int, folder: Path, strategy: str
) -> dict[tuple[int, ...], tuple[int, int, list[str], bool]]:
    found = {}
    for ends in ENDS_TO_FORWARDS:
        callback = _DrawsTheEnd(num_tokens=NUM_TOKENS)
        callback.ends = ends
        model = _model("qwen")
        _train(strategy, folder, model, _data(folder), callback)
        found[ends] = callback.num_forwards, callback.num_drawn, callback.texts, model.training
    return found


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What ranks have written to each end, by strategy; all of it in one launch."""

    @functools.cache
    def write(strategy: str) -> Any:
        folder = tmp_path_factory.mktemp("written")
        write_folder(folder / "corpus")
        return on_trainer_ranks(_write_to_each_end, 2, folder, strategy)

    return write


# Both stages of the core; of the others, whose stages differ in what torch keeps whole, one each.
@pytest.mark.parametrize("strategy", ["ddp", *SHARDED[:2], "fsdp1_zero3", "fsdp2_zero2"])
@pytest.mark.parametrize(("ends", "num_forwards"), ENDS_TO_FORWARDS.items())
def test_ranks_stop_together(
    strategy: str, ends: tuple[int, ...], num_forwards: int, written: Any
) -> None:
    found = [of_rank[ends] for of_rank in written(strategy)]
    for rank, (forwards, drawn, texts, is_training) in enumerate(found):
        assert forwards == num_forwards
        assert drawn == min(ends[rank], num_forwards), "nothing is drawn after the end"
        assert texts == found[0][2]
        assert len(texts) == 2
        assert is_training
    texts = found[0][2]
    assert all(text.startswith("import ") and "<|endoftext|>" not in text for text in texts)
    assert texts[0] != texts[1], "each rank draws for itself"
    if ends[1] == 1:
        assert texts[1] == "import "


def _say_by_position(model: Any, prompt_ids: list[int]) -> list[int]:
    """Set weights by hand so that GPT-2 says another token at every position, whatever came before.

    Returns:
        What it says after the prompt.
    """
    embedding, positions = model.transformer.wte.weight, model.transformer.wpe.weight
    said = 5 + torch.arange(len(positions))  # tokens that are one character
    embedding.normal_()
    positions.copy_(10 * embedding[said])  # the head is the embedding: the likeliest by far
    first = len(prompt_ids)  # the end of a text precedes them
    return said[first : first + NUM_TOKENS].tolist()


def _say_by_token(model: Any, prompt_ids: list[int]) -> list[int]:
    """Set weights by hand so that Qwen says one token after the other, from the prompt's last."""
    chain = [prompt_ids[-1], *range(40, 40 + NUM_TOKENS)]
    embedding, block = model.model.embed_tokens.weight, model.model.layers[-1].mlp
    embedding.normal_()
    for row, (token, following) in enumerate(itertools.pairwise(chain)):
        for projection in (block.gate_proj, block.up_proj):  # large at this token alone
            projection.weight[row] = 0.3 * embedding[token]
        block.down_proj.weight[:, row] = 0.3 * embedding[following]
    return chain[1:]


SAYING = {"gpt2": _say_by_position, "qwen": _say_by_token}


def _write_greedily(
    rank: int, world_size: int, folder: Path, strategy: str, name: str, prompt_ids: list[int]
) -> Any:
    """The text, what it should be, and the trained model's weights."""
    callback = SampleText(prompt="gather", num_tokens=NUM_TOKENS, temperature=0)
    model = _model(name, max_seq_len=64)
    torch.manual_seed(0)
    model.configure_model()
    with torch.no_grad():
        said = SAYING[name](model.model, prompt_ids)
    _train(strategy, folder, model, _data(folder), callback)
    state = {n: value.clone() for n, value in model.model.state_dict().items()}
    return callback.texts, said, state


# Each engine with both models, and each of its stages with one of them.
@pytest.mark.parametrize(
    ("strategy", "name"),
    [("ddp", "gpt2"), *((strategy, list(MODELS)[i % 2]) for i, strategy in enumerate(SHARDED))],
)
def test_the_likeliest_text_is_that_of_transformers(
    strategy: str, name: str, tmp_path: Path
) -> None:
    """Three steps of training are far too few to change what the weights were set to say."""
    write_folder(tmp_path / "corpus")
    tokens = _data(tmp_path).open()
    prompt_ids = tokens.tokenizer().encode("gather").ids
    ((texts, said, state), _) = on_trainer_ranks(
        _write_greedily, 2, tmp_path, strategy, name, prompt_ids
    )
    module = _model(name, max_seq_len=64)
    module.configure_model()
    module.model.load_state_dict(state)
    ids = [tokens.end_of_text, *prompt_ids]
    expected = module.model.eval().generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        eos_token_id=tokens.end_of_text,
        pad_token_id=tokens.end_of_text,
    )
    assert expected[0, len(ids) :].tolist() == said
    assert texts == [tokens.tokenizer().decode(prompt_ids + said)] * 2


def test_a_model_with_few_positions_writes_less_and_random_states_stay(tmp_path: Path) -> None:
    write_folder(tmp_path / "corpus")
    logger = TensorBoardLogger(tmp_path, name="log", version="")
    states = []
    writing = _DrawsTheEnd(prompt="", num_tokens=1000)
    writing.ends = (999,)
    for callbacks in ([], [writing]):
        _train(
            "auto", tmp_path, _model("gpt2", max_seq_len=20), _data(tmp_path), *callbacks,
            devices=1, logger=logger,
        )  # fmt: skip
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
    (text,) = writing.texts
    assert writing.num_drawn == 19, "one position is taken by what precedes a document"
    events = EventAccumulator(str(tmp_path / "log")).Reload()
    (logged,) = events.Tensors("train/sample/text_summary")
    assert logged.step == 3
    assert text.splitlines()[0].strip() in logged.tensor_proto.string_val[0].decode()


@pytest.mark.parametrize("seed", [0, 1])
def test_tokens_are_drawn_as_often_as_they_are_likely(seed: int) -> None:
    callback = SampleText(temperature=0.5)
    logits = torch.tensor([0.0, 1.0, 2.0])
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.tensor([callback._draw(logits, generator) for _ in range(4000)])
    share = torch.bincount(drawn, minlength=3) / len(drawn)
    torch.testing.assert_close(share, (logits / 0.5).softmax(dim=0), atol=0.03, rtol=0)


def test_what_cannot_be_written_is_refused_before_training(tmp_path: Path) -> None:
    write_folder(tmp_path / "corpus")
    with pytest.raises(RecipeError, match=r"SampleText\.num_tokens: expected 1 or more, got 0"):
        SampleText(num_tokens=0)
    with pytest.raises(RecipeError, match=r"SampleText\.temperature: expected 0 or more, got -1"):
        SampleText(temperature=-1)
    model = _model("gpt2", max_seq_len=16)
    model.on_train_start = lambda: pytest.fail("the run was started")
    with pytest.raises(RecipeError, match=r"SampleText\.prompt: .* 16 positions, got \d+\. Short"):
        _train(
            "auto", tmp_path, model, _data(tmp_path), SampleText(prompt="shard " * 20), devices=1
        )
    with pytest.raises(RecipeError, match=r"SampleText: .* got Regressor on NoneType\. Leave it"):
        SampleText().setup(SimpleNamespace(datamodule=None), Regressor(), "fit")  # type: ignore[arg-type]
