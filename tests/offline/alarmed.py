"""What kills the first worker that uses it."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eyeline.bundle.two_towers import TwoTowers
from eyeline.core.batch import Image
from eyeline.core.image_rule import ImageRule
from eyeline.distill.teacher import Asking, Request, Said


def ring(alarm: Path) -> None:
    """Kill this process, if there is an alarm, which is then gone."""
    try:
        alarm.unlink()
    except FileNotFoundError:
        return
    os.kill(os.getpid(), 9)


@dataclass(frozen=True, eq=False)
class AlarmedTowers:
    towers: TwoTowers
    alarm: Path

    @property
    def identity(self) -> str:
        return self.towers.identity

    @property
    def rule(self) -> ImageRule:
        return self.towers.rule

    @property
    def device(self) -> str:
        return self.towers.device

    def text_vectors(self, texts: Sequence[str]) -> np.ndarray:
        return self.towers.text_vectors(texts)

    def image_vectors(self, images: Sequence[Image]) -> np.ndarray:
        ring(self.alarm)
        return self.towers.image_vectors(images)


@dataclass(frozen=True, eq=False)
class AlarmedTeacher:
    """Writes the number of its process at each call into `log`."""

    teacher: Asking
    alarm: Path
    log: Path

    @property
    def name(self) -> str:
        return self.teacher.name

    @property
    def identity(self) -> Any:
        return self.teacher.identity

    @property
    def tokenizer(self) -> str | None:
        return self.teacher.tokenizer

    @property
    def keeps_seeds(self) -> bool:
        return self.teacher.keeps_seeds

    @property
    def accelerated(self) -> bool:
        return self.teacher.accelerated

    def answers(self, requests: Sequence[Request]) -> list[Said]:
        with open(self.log, "a") as file:
            loaded = "_loaded" in vars(self.teacher)
            file.write(f"{os.getpid()} {'loaded' if loaded else 'new'}\n")
        ring(self.alarm)
        return self.teacher.answers(requests)

    def close(self) -> None:
        self.teacher.close()
