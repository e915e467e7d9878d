"""In a second fit, of another module in other steps, a callback logs what a new one would."""

from functools import partial

from lightning.pytorch.loggers import Logger

import lightning_fsdp
from tests.support.trainer import Regressor, make_loader, make_trainer, on_trainer_ranks, seeded


class _Kept(Logger):
    """Keeps what it is given, but times."""

    name, version = "kept", 0

    def __init__(self):
        super().__init__()
        self.metrics = {}

    def log_hyperparams(self, *args, **kwargs):
        pass

    def log_metrics(self, metrics, step=None):
        for name, value in metrics.items():
            if not name.startswith("throughput/"):
                self.metrics[step, name] = value


def _callbacks():
    return [
        lightning_fsdp.GradientAccessProbe(steps=1),
        lightning_fsdp.MicrobatchIsolationProbe(steps=1),
        lightning_fsdp.GradientNoiseScale(every_n_steps=1, smoothing=0.0),
        lightning_fsdp.ThroughputMonitor(
            num_tokens=lambda batch: len(batch[0]), flops_per_token="count"
        ),
    ]


def _logged(strategy, folder, callbacks, accumulate=1, width=9):
    logger = _Kept()
    make_trainer(
        strategy,
        folder,
        callbacks=callbacks,
        logger=logger,
        accumulate_grad_batches=accumulate,
        log_every_n_steps=1,
    ).fit(seeded(partial(Regressor, width)), make_loader(16))
    return logger.metrics, callbacks[-1].flops_per_token


def _fit_twice(rank, world_size, folder):
    for strategy in ("scratch_fsdp_zero3", "fsdp2_zero2"):
        expected = _logged(strategy, folder, _callbacks())
        used = _callbacks()
        first = _logged(strategy, folder, used, accumulate=2, width=5)
        assert first[0].keys() != expected[0].keys() or rank > 0
        assert first[1] < expected[1]
        assert _logged(strategy, folder, used) == expected, strategy


def test_in_a_second_fit_a_callback_logs_what_a_new_one_would(tmp_path):
    on_trainer_ranks(_fit_twice, 2, tmp_path)
