"""What is in a prepared corpus, and one rank's share of it."""

from pathlib import Path

import numpy as np

from recipes.data import TextData
from recipes.packing import TokenFile


def all_tokens(prepared: TokenFile) -> np.ndarray:
    return prepared.read(0, prepared.num_tokens)


class OnRank(TextData):
    """One rank's data, without a Trainer."""

    place = (1, 0)

    def _shard(self) -> dict[str, int]:
        return dict(zip(("num_replicas", "rank"), self.place, strict=True))


def on_rank(place: tuple[int, int], folder: Path, cache: Path, **options: int) -> TextData:
    chosen = {"seq_len": 8, "batch_size": 2, "vocab_size": 300, "num_workers": 0} | options
    data = OnRank(path=folder, cache_dir=cache, **chosen)  # type: ignore[arg-type]
    data.place = place
    data.setup("fit")
    return data
