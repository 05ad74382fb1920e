"""Weights & Biases: in RUN/trackers/wandb. Offline, `wandb sync` sends it later; online with `report_online: true`."""

from collections.abc import Mapping, Sequence

import wandb  # pyright: ignore[reportMissingImports]: an extra

from eyeline.evals.result import Asked
from eyeline.train.trackers.tracker import About, caption, pixels


class WeightsAndBiases:
    def __init__(self, about: About) -> None:
        self._run = wandb.init(
            project="eyeline",
            name=about.name,
            id=about.id,
            resume="allow",
            dir=str(about.out),
            config=dict(about.recipe),
            mode="online" if about.online else "offline",
            settings=wandb.Settings(console="off", silent=True, disable_git=True, x_disable_stats=True),
        )

    def figures(self, step: int, figures: Mapping[str, float]) -> None:
        # its own step must rise with each call, and steps that are done again do not; so it is a figure like the others
        self._run.log({**figures, "global_step": step})

    def samples(self, step: int, answers: Sequence[Asked]) -> None:
        images = [wandb.Image(pixels(image), caption=caption(asked)) for asked in answers for image in asked.images]
        table = wandb.Table(["question", "prediction", "answer"], [[one.question, one.prediction, one.answer] for one in answers])
        self._run.log({"samples": images, "answers": table, "global_step": step})

    def close(self) -> None:
        self._run.finish()
