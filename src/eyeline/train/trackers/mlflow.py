"""MLflow: a database and files in RUN/trackers/mlflow. `mlflow ui --backend-store-uri sqlite:///RUN/trackers/mlflow/mlflow.db` shows it;
with `report_online: true` it goes to the server that MLFLOW_TRACKING_URI names."""

from collections.abc import Mapping, Sequence

import mlflow  # pyright: ignore[reportMissingImports]: an extra
from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]
from mlflow.tracking import MlflowClient  # pyright: ignore[reportMissingImports]

from eyeline.evals.result import Asked
from eyeline.train.trackers.tracker import About, caption, pixels

EXPERIMENT = "eyeline"


class MLflow:
    def __init__(self, about: About) -> None:
        folder = about.out / "mlflow"
        folder.mkdir(exist_ok=True)
        self._client = MlflowClient(None if about.online else f"sqlite:///{folder.resolve() / 'mlflow.db'}")
        known = self._client.get_experiment_by_name(EXPERIMENT)
        files = None if about.online else (folder.resolve() / "files").as_uri()
        experiment = known.experiment_id if known else self._client.create_experiment(EXPERIMENT, artifact_location=files)
        before = self._client.search_runs([experiment], f"tags.eyeline_run = '{about.id}'")
        made = before[0] if before else self._client.create_run(experiment, run_name=about.name, tags={"eyeline_run": about.id})
        self._id = made.info.run_id
        self._client.log_text(self._id, about.recipe_text, "recipe.yaml")

    def figures(self, step: int, figures: Mapping[str, float]) -> None:
        now = mlflow.utils.time.get_current_time_millis()
        self._client.log_batch(self._id, metrics=[Metric(name, value, now, step) for name, value in figures.items()])

    def samples(self, step: int, answers: Sequence[Asked]) -> None:
        self._client.log_text(self._id, "\n\n".join(map(caption, answers)), f"samples/step-{step:08d}.txt")
        for number, asked in enumerate(answers):
            for at, image in enumerate(asked.images):
                self._client.log_image(self._id, pixels(image), f"samples/step-{step:08d}-{number}-{at}.png")

    def close(self) -> None:
        self._client.set_terminated(self._id)
