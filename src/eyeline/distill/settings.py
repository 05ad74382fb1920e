"""The `distill` section of a recipe: what is asked of whom, how, and which answers are accepted."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, JsonValue, field_validator, model_validator

from eyeline.core.errors import nearest
from eyeline.core.settings import NotNegative, NotNegativeFloat, PathText, Positive, PositiveFloat, Settings, Share
from eyeline.data.sources.sources import Source
from eyeline.distill.prompts import SHIPPED, is_file


class ServerTeacher(Settings):
    """A server that speaks the OpenAI API: vLLM, SGLang, `transformers serve`, or a hosted one."""

    kind: Literal["server"] = "server"
    urls: Annotated[tuple[str, ...], Field(min_length=1)]  # of the API, such as http://host:8000/v1; requests are spread over several
    model: Annotated[str, Field(min_length=1)]  # as the server calls it
    key_env: str | None = None  # name of the environment variable that holds the key
    concurrency: Positive = 16  # requests that each worker has in flight
    timeout: PositiveFloat = 300.0  # seconds for one answer
    retries: NotNegative = 8  # of a request that a server did not answer, or was too busy for
    seeds: bool = True  # send a seed with each request; false: the server refuses seeds
    max_side: Positive | None = None  # pixels of the longer side that images are scaled down to before they are sent
    extra: dict[str, JsonValue] = Field(default={})  # further fields of each request: chat_template_kwargs: {enable_thinking: true}

    @field_validator("urls")
    @classmethod
    def _http(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        for url in urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"got {url!r}, wanted the URL of an API, such as http://localhost:8000/v1")
            if "@" in url.split("//", 1)[1].split("/", 1)[0]:
                raise ValueError("a URL must not contain a password: recipes are copied into run folders. Use key_env")
        return tuple(url.rstrip("/") for url in urls)

    @field_validator("extra")
    @classmethod
    def _not_ours(cls, extra: dict[str, JsonValue]) -> dict[str, JsonValue]:
        ours = [name for name in OURS if name in extra]
        if ours:
            raise ValueError(f"{', '.join(ours)} is set by other settings (temperature, top_p, max_new_tokens, n). Leave it out of extra")
        return extra


OURS = ("model", "messages", "temperature", "top_p", "max_tokens", "max_completion_tokens", "seed", "n", "stream")  # fields of a request


class ModelTeacher(Settings):
    """A model that this process loads: a run folder, or one that import or export made."""

    kind: Literal["model"] = "model"
    path: PathText
    checkpoint: Literal["newest", "best"] = "newest"  # of a run
    max_tokens: Positive = 16_384  # that the cache of a round has room for: prompts that are answered together
    max_patches: Positive = 16_384  # of the images of a round


Teacher = Annotated[ServerTeacher | ModelTeacher, Field(discriminator="kind")]


class Accept(Settings):
    """Which final answers are accepted."""

    # truth: those that agree with the sample's own answer. majority: those that agree with most answers to the sample. any: all
    by: Literal["truth", "majority", "any"] = "truth"
    # how two answers are compared. exact: as they are. normalised: without case, outer spaces and punctuation. number: as numbers, within
    # `tolerance`. choice: by the letter of an option
    compare: Literal["exact", "normalised", "number", "choice"] = "normalised"
    tolerance: NotNegativeFloat = 0.0  # of numbers, as a share of the true one
    min_share: Share = 0.5  # of the answers to a sample, that the majority has more than

    @model_validator(mode="after")
    def _used(self) -> "Accept":
        if self.tolerance and self.compare != "number":
            raise ValueError("tolerance is of compare: number. Leave it out")
        return self


class Filters(Settings):
    """Which texts are rejected, apart from their final answers."""

    refusals: bool = True  # "I'm sorry, but I cannot ..."
    leaks: bool = True  # it repeats the instructions of the prompt, or says that it was given the answer
    same_script: bool = True  # most letters are of another script than the question's: Chinese for English, but not French
    min_words: NotNegative = 5  # of the rationale
    max_words: Positive = 2000
    max_repetition: Share = 0.3  # share of its runs of four words that it has more than once
    mentions_image: bool = False  # where the sample has an image, the rationale has to speak of it


class Price(Settings):
    """What a million tokens cost, for the estimate of --dry."""

    prompt: NotNegativeFloat = 0.0
    answer: NotNegativeFloat = 0.0
    currency: Annotated[str, Field(min_length=1, max_length=8)] = "USD"


def _known_prompt(name: str) -> str:
    if name not in SHIPPED and not is_file(name):
        raise ValueError(f"got {name!r}, wanted {', '.join(SHIPPED)}, or a file of your own as FILE.jinja.{nearest(name, SHIPPED)}")
    return name


class Distill(Settings):
    """What `eyeline distill` asks a teacher, and what it keeps."""

    sources: Annotated[tuple[Source, ...], Field(min_length=1)]
    teacher: Teacher
    # each sample is asked with each: a shipped one, or a file, FILE.jinja
    prompts: Annotated[tuple[Annotated[str, AfterValidator(_known_prompt)], ...], Field(min_length=1)] = ("chain-of-thought",)
    n: Positive = 1  # answers to each prompt, with a seed each
    temperature: NotNegativeFloat = 0.7
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_new_tokens: Positive = 1024  # of an answer, which is cut there and rejected
    accept: Accept = Accept()
    filters: Filters = Filters()
    # likeliest tokens that are stored at each token of an answer, with their log probabilities; the teacher needs the student's tokenizer
    top_logprobs: NotNegative = 0
    keep: Positive = 1  # accepted answers that are kept of each sample, the first ones
    partition_rows: Positive = 64  # samples whose answers are committed together: what a crash can lose
    price: Price = Price()

    @model_validator(mode="after")
    def _makes_sense(self) -> "Distill":
        if len(set(self.prompts)) < len(self.prompts):
            raise ValueError("prompts has a prompt twice. For several answers to it, raise n")
        if self.temperature == 0 and self.n > 1:
            raise ValueError(f"temperature: 0 gives the same answer {self.n} times. Set n: 1, or raise temperature")
        if self.top_logprobs and self.teacher.kind == "server":
            raise ValueError("top_logprobs needs a teacher of kind: model: a server does not say which ids its tokens have. Leave it out")
        if self.top_logprobs and "question-rewriting" in self.prompts:
            raise ValueError("top_logprobs keeps answers as the teacher wrote them, and question-rewriting cuts them up. Leave one out")
        if self.accept.by == "majority" and len(self.prompts) * self.n < 3:
            raise ValueError("accept.by: majority compares the answers to a sample, and needs at least three. Raise n")
        if any(source.repeat > 1 for source in self.sources):
            raise ValueError("repeat sets how often an epoch visits a source, and a teacher is asked once. Raise n for several answers")
        if any(source.weight != 1 for source in self.sources):
            raise ValueError("weight is a share of what is trained on, and every sample is asked. Leave it out")
        return self

    @property
    def answers_per_sample(self) -> int:
        return len(self.prompts) * self.n
