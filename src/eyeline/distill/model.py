"""A teacher in this process: a folder's model, answered by our own `generate`, several prompts at a time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from eyeline.bundle.bundle import Opened, open_bundle
from eyeline.bundle.computing import choose_kernels
from eyeline.bundle.fill import load_for_generation
from eyeline.bundle.folders import digest_of_files
from eyeline.core.batch import Document
from eyeline.core.errors import BadSample, fitting
from eyeline.core.plan import Spec
from eyeline.data.text.tokenizer import Encoder
from eyeline.distill.settings import Distill, ModelTeacher
from eyeline.distill.teacher import Request, Said
from eyeline.generate.generate import generate
from eyeline.generate.prompts import Prompts
from eyeline.generate.sampling import Sampling
from eyeline.models import Model
from eyeline.models import spec as spec_of
from eyeline.parallel.launch import machine


class _Loaded(NamedTuple):
    model: Model
    spec: Spec
    encoder: Encoder
    prompts: Prompts


@dataclass(frozen=True, eq=False)
class FolderTeacher:
    """A teacher in this process. It is loaded where it is first asked."""

    teacher: ModelTeacher
    settings: Distill
    device: str
    threads: int | None

    @property
    def name(self) -> str:
        return self.teacher.path

    @cached_property
    def identity(self) -> Any:
        opened = self._opened
        return {"model": digest_of_weights(opened), "template": opened.bundle.template, "tokenizer": opened.bundle.encoder().identity}

    @property
    def tokenizer(self) -> str | None:
        return self._opened.bundle.encoder().identity

    @property
    def keeps_seeds(self) -> bool:
        return True

    @property
    def accelerated(self) -> bool:
        return self.device != "cpu"

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("teacher", "settings", "device", "threads")}

    @cached_property
    def _opened(self) -> Opened:
        return open_bundle(Path(self.teacher.path), self.teacher.checkpoint)

    @cached_property
    def _loaded(self) -> _Loaded:
        here = machine(self.device, self.threads)
        dtype = torch.bfloat16 if here.capability is not None and here.capability >= (8, 0) else torch.float32
        with fitting("the teacher"):
            model = load_for_generation(self._opened, here.device, dtype)
        choose_kernels(model, here, dtype, trains=False, quiet=True)
        spec, encoder = spec_of(self._opened.bundle.config), self._opened.bundle.encoder()
        return _Loaded(model, spec, encoder, Prompts(encoder, spec.image))

    def answers(self, requests: Sequence[Request]) -> list[Said]:
        """The answers, in order. Each is what `generate` gives for its prompt and seed alone, up to rounding."""
        found: dict[int, Said] = {}
        for round in self._rounds(requests, found):
            found |= self._answered(round)
        return [found[n] for n in range(len(requests))]

    def _answered(self, round: list[tuple[int, Request, Document]]) -> dict[int, Said]:
        model, spec, encoder, _ = self._loaded
        settings = self.settings
        sampling = Sampling(max_new_tokens=settings.max_new_tokens, temperature=float(settings.temperature), top_p=settings.top_p)
        documents, seeds = [document for *_, document in round], [request.seed for _, request, _ in round]
        with fitting("a round of prompts (distill.teacher.max_tokens and max_patches)"):
            made = generate(model, spec, documents, sampling, encoder.stop_ids, seeds=seeds, likeliest=settings.top_logprobs)
        out: dict[int, Said] = {}
        for (n, _, document), answer in zip(round, made, strict=True):
            text = text_of(answer.tokens, encoder)
            out[n] = Said(text, answer.finish, "", len(document.tokens_T), len(answer.tokens), likely=answer.likely)
        return out

    def _rounds(self, requests: Sequence[Request], found: dict[int, Said]) -> Iterator[list[tuple[int, Request, Document]]]:
        """Requests that are answered together: their cache has room for max_tokens, and their images, each counted once, have at most
        max_patches. Those without a usable prompt are in `found`."""
        _, spec, _, prompts = self._loaded
        new, round = self.settings.max_new_tokens, list[tuple[int, Request, Document]]()
        longest, patches = 0, dict[str, int]()
        for n, request in enumerate(requests):
            try:
                document = prompts.prompt(request.messages)
                if len(document.tokens_T) >= spec.max_positions:
                    what = f"{len(document.tokens_T)} tokens leave no room for an answer in the teacher's {spec.max_positions}"
                    raise BadSample("too_long", "messages", what)
            except BadSample as bad:
                found[n] = Said("", "failed", why=str(bad), cause=bad.cause)
                continue
            own = {image.key: image.grid.patches for image in document.images}
            wider, more = max(longest, len(document.tokens_T)), patches | own
            full = (len(round) + 1) * (wider + new) > self.teacher.max_tokens or sum(more.values()) > self.teacher.max_patches
            if round and full:
                yield round
                round, wider, more = [], len(document.tokens_T), own
            round.append((n, request, document))
            longest, patches = wider, more
        if round:
            yield round

    def close(self) -> None:
        for name in ("_loaded", "_opened"):
            self.__dict__.pop(name, None)


def text_of(tokens: Sequence[int], encoder: Encoder) -> str:
    """The text of an answer, in which <think> and </think> stay where they are control tokens; where the prompt wrote the first, the
    answer has the second alone."""
    ends = {i: token for token, i in encoder.all_controls.items() if token in ("<think>", "</think>")}
    pieces, run = list[str](), list[int]()
    for token in tokens:
        if token in ends:
            pieces += [encoder.decode(run), ends[token]]
            run = []
        else:
            run.append(token)
    return "".join([*pieces, encoder.decode(run)])


def digest_of_weights(opened: Opened) -> str:
    """A digest of the files of a model."""
    return digest_of_files(opened.folder if opened.checkpoint is None else opened.checkpoint.folder)
