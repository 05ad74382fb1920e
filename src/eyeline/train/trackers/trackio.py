"""Trackio: a database on this machine, in Trackio's own folder. `trackio show --project eyeline` shows it. It sends nothing."""

from collections.abc import Mapping, Sequence

import trackio  # pyright: ignore[reportMissingImports]: an extra

from eyeline.evals.result import Asked
from eyeline.train.trackers.tracker import About, caption, pixels


class Trackio:
    def __init__(self, about: About) -> None:
        self._run = trackio.init(project="eyeline", name=f"{about.name}-{about.id}", resume="allow", config=dict(about.recipe), embed=False)

    def figures(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log(dict(figures), step=step)

    def samples(self, step: int, answers: Sequence[Asked]) -> None:
        images = {
            f"samples/{number}/{at}": trackio.Image(pixels(image), caption=caption(asked))
            for number, asked in enumerate(answers)
            for at, image in enumerate(asked.images)
        }
        texts = {f"samples/{number}": caption(asked) for number, asked in enumerate(answers)}
        self._run.log({**images, **texts}, step=step)

    def close(self) -> None:
        self._run.finish()
