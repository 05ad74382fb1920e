"""TensorBoard: event files in RUN/trackers/tensorboard. `tensorboard --logdir RUN/trackers/tensorboard` shows them."""

from collections.abc import Mapping, Sequence

from torch.utils.tensorboard import SummaryWriter

from eyeline.evals.result import Asked
from eyeline.train.trackers.tracker import About, caption, pixels

FLUSH_S = 10  # a kill loses at most this; metrics.jsonl loses nothing


class TensorBoard:
    def __init__(self, about: About) -> None:
        # steps that an attempt before made and this one does again are taken out by TensorBoard
        again = None if about.resumed_from is None else about.resumed_from + 1
        self._writer = SummaryWriter(str(about.out / "tensorboard"), purge_step=again, flush_secs=FLUSH_S)
        self._writer.add_text("recipe", f"```yaml\n{about.recipe_text}```", about.resumed_from or 0)

    def figures(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def samples(self, step: int, answers: Sequence[Asked]) -> None:
        for number, asked in enumerate(answers):
            self._writer.add_text(f"samples/{number}", caption(asked).replace("\n", "  \n"), step)
            for at, image in enumerate(asked.images):
                self._writer.add_image(f"samples/{number}/image {at}", pixels(image), step, dataformats="HWC")

    def close(self) -> None:
        self._writer.close()
