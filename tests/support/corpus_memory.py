"""By how much a process grows while it prepares and reads a corpus; to be run in one of its own."""

import json
import multiprocessing
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers

from lightning_fsdp.data import ResumableLoader
from recipes.data import TextData
from recipes.packing import TokenFile
from tests.support.texts import text


def write_corpus(path: Path, num_bytes: int) -> None:
    """One file: long lines of text; or objects or rows that hold little of it and much else."""
    lines = [text(seed, 250).replace("\n", "_") + "\n" for seed in range(300)]
    if path.suffix == ".parquet":  # one row group, all of it text, in pages of a megabyte
        num_rows = num_bytes // len("".join(lines[:10]).encode()) + 1
        texts = ["".join(lines[n % 290 : n % 290 + 10]) for n in range(num_rows)]
        import pyarrow as pa
        from pyarrow import parquet as pq

        options = {"row_group_size": num_rows, "write_batch_size": 16, "use_dictionary": False}
        options["compression"] = "none"
        pq.write_table(pa.table({"text": texts}), path, **options)
        return
    if path.suffix == ".txt":
        block = "".join(lines)
    elif path.suffix == ".csv":
        texts = [text(n, 40).replace("\n", "_") for n in range(100)]
        block = "text,url\n" + "".join(f'"{each}",{"x" * 8000}\n' for each in texts)
    else:
        end = "\n" if path.suffix == ".jsonl" else ",\n"
        other = {"url": "x" * 8000, "numbers": [1, {"two": [2]}]}
        block = "".join(json.dumps({"text": text(n, 40), **other}) + end for n in range(100))
    with path.open("w", encoding="utf-8") as file:
        if path.suffix == ".json":
            file.write("[\n")
        for _ in range(num_bytes // len(block.encode()) + 1):
            file.write(block)
        if path.suffix == ".json":
            file.write('{"text": "end"}]')
    assert path.stat().st_size >= num_bytes


def write_line_tokenizer(path: Path) -> None:
    """A token a line, so that a gigabyte passes through in seconds."""
    tokenizer = Tokenizer(models.WordLevel({"?": 0, "<|endoftext|>": 1}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.CharDelimiterSplit("\n")
    tokenizer.save(str(path))


class Growth:
    """The most memory that was resident since it was made, beyond what was then."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
        self.before = self._peak()

    def bytes(self) -> int:
        return self._peak() - self.before

    @staticmethod
    def _peak() -> int:
        (line,) = [
            line
            for line in Path("/proc/self/status").read_text().splitlines()
            if line.startswith("VmHWM:")
        ]
        return int(line.split()[1]) * 1024


def main(folder: Path, what: str, has_own_tokenizer: bool, num_bytes: int, out: Path) -> int:
    """Write bytes and tokens to ``out``; ``what`` is the suffix of the corpus, or ``tokens``.

    A tenth of it is read first, as what a process takes for any corpus is not this one's.
    """
    for part, size in (("tenth", num_bytes // 10), ("whole", num_bytes)):
        (folder / part).mkdir()
        if what == "tokens":
            found = _read_tokens(folder / part, size)
        else:
            found = _prepare(folder / part, what, has_own_tokenizer, size)
    out.write_text(json.dumps(found))
    return 0


def _read_tokens(folder: Path, num_bytes: int) -> dict[str, int]:
    with (folder / "tokens.bin").open("wb") as file:
        file.truncate(num_bytes)
    growth = Growth()
    tokens = TokenFile(
        folder=folder,
        num_documents=1,
        num_empty=0,
        num_skipped=0,
        num_tokens=num_bytes // 2,
        vocab_size=300,
        end_of_text=0,
        dtype="uint16",
    )
    packed = tokens.sequences(0, tokens.num_tokens, 8192)
    num_tokens = sum(batch["input_ids"].numel() for batch in ResumableLoader(packed, batch_size=8))
    return {"bytes": growth.bytes(), "tokens": num_tokens}


def _prepare(folder: Path, suffix: str, has_own_tokenizer: bool, num_bytes: int) -> dict[str, int]:
    (folder / "corpus").mkdir()
    # By another process, whose memory is its own.
    arguments = (folder / "corpus" / f"x{suffix}", num_bytes)
    writer = multiprocessing.get_context("fork").Process(target=write_corpus, args=arguments)
    writer.start()
    writer.join()
    own = None
    if has_own_tokenizer:
        own = str(folder / "tokenizer.json")
        write_line_tokenizer(Path(own))
    growth = Growth()
    data = TextData(
        path=folder / "corpus",
        tokenizer=own,
        cache_dir=folder / "cache",
        seq_len=256,
        batch_size=16,
        val_fraction=0.1,  # so that a tenth has some
    )
    data.setup("fit")
    num_tokens = sum(batch["input_ids"].numel() for batch in data.train_dataloader())
    return {"bytes": growth.bytes(), "tokens": num_tokens}
