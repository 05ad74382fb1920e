"""Text to token ids, with one law: text from data never becomes a control token, and nothing is ever added to it.

A *control token* is one that the chat template writes, an image, video or tile token, or one that the tokenizer gives a role (BOS,
EOS, padding, unknown, ...) or puts around a text. All other added tokens (`<loc_1>`, `<tool_call>`, `<|box_start|>`), special or not,
are read in text as transformers reads them.
"""

import hashlib
import json
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from eyeline.core.errors import BadSample, Refused
from eyeline.core.files import read_object, storage_failed, write_json
from eyeline.data.text.templates import QWEN_MARKS, Template

if TYPE_CHECKING:  # transformers takes seconds to import, so functions that need it do it themselves
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

# How Qwen2 cuts text before merging (transformers 5.24, models/qwen2/tokenization_qwen2.py)
QWEN_PIECES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LONGEST_PIECE = 10_000  # characters that a tokenizer is trained on at once: its time grows with the square of a word's length
LONGEST_TEXT = 4 << 20  # characters of one run: no model has positions for them, and runs of spaces of twice this length break splitting
MOST_IDS = 1 << 22  # sixteen times the largest vocabulary there is: the tokenizers library takes memory for every id below the largest
LARGEST_TEMPLATE = 1 << 20  # bytes of a chat template: the largest published ones have a fiftieth of it
MOST_TEMPLATES = 64
FORMS = (normalizers.NFC, normalizers.NFD, normalizers.NFKC, normalizers.NFKD)
KEPT = 20_000  # conversations that are remembered tokenised
KEPT_TOKENS = 512  # longer ones are not

T = TypeVar("T")


class Encoder:
    """A tokenizer and a chat template: what turns segments into ids. Pickles small, and without transformers, for workers."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", template: Template, marks: Sequence[str] | None = ()):
        """`marks` are further control tokens that a model's images are written with (`ImageRule.marks`); None for a model of text
        alone, which needs no image token.

        Refused when the tokenizer lacks one of the control tokens, or is not a `tokenizers` one.
        """
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise Refused(
                f"the tokenizer is a {type(tokenizer).__name__}, which has no tokenizer.json behind it; a fast tokenizer is needed. "
                "Convert it once with transformers (AutoTokenizer.from_pretrained(...).save_pretrained(...))"
            )
        self.template = template
        self._backend = backend
        vocabulary = backend.get_vocab(with_added_tokens=True)
        needed = control_tokens_of(template, marks)
        missing = [token for token in needed if token not in vocabulary]
        if missing:
            raise Refused(
                f"the tokenizer has no {', '.join(missing)}, which the template {template.name!r} writes. Choose another template, "
                "or add the tokens when the model is imported"
            )
        self.controls = {token: vocabulary[token] for token in needed}
        self.stop_ids = tuple(sorted({self.controls[template.terminator], self.controls[template.end]}))
        self.vocabulary = 1 + max(vocabulary.values())  # ids that may occur: the embedding needs at least as many rows
        added = backend.get_added_tokens_decoder()
        known = {*needed, *QWEN_MARKS.controls, *_role_tokens(tokenizer), *_put_around(backend)} & vocabulary.keys()
        self.all_controls = {token: vocabulary[token] for token in sorted(known)}
        self.strips = {token.content: (token.lstrip, token.rstrip) for token in added.values() if token.content in self.controls}
        split = bool(getattr(tokenizer, "split_special_tokens", False))
        self._added = {i: token for i, token in added.items() if token.content not in known and not (split and token.special)}
        self._plain = _bare(backend)
        _add_in_place(self._plain, self._added)
        self._control_ids = frozenset(self.all_controls.values())
        self._memory: dict[Hashable, Any] = {}
        said = template.name + template.jinja + backend.to_str() + "".join(f"\n{i} {token!r}" for i, token in sorted(self._added.items()))
        self.identity = hashlib.sha256(said.encode()).hexdigest()[:16]

    @property
    def image_token(self) -> int:
        """The id that every visual token of an image is written as; a model of text alone has none."""
        return self.controls[self.template.image]

    def ids(self, text: str) -> list[int]:
        """Ids of text from data. BadSample `control_token` if, against all measures, one of them would be a control token, and
        `too_long` for a text that no model could read."""
        if len(text) > LONGEST_TEXT:
            raise BadSample("too_long", "text", f"{len(text):,} characters in one piece, over {LONGEST_TEXT:,}")
        # `encode` would also return the position of each piece in the text, which takes a fifth of its time
        plain = self._without_forms if text.isascii() else self._plain
        ids = plain.encode_batch_fast([text], add_special_tokens=False)[0].ids
        if not self._control_ids.isdisjoint(ids):
            raise BadSample("control_token", "text", f"{text[:60]!r} would be read as a control token by this tokenizer")
        return ids

    @cached_property
    def _without_forms(self) -> Tokenizer:
        """The same tokenizer for ASCII, which the normal forms of Unicode leave as it is: they take a sixth of the time."""
        if not isinstance(self._plain.normalizer, FORMS) or not all(token.content.isascii() for token in self._added.values()):
            return self._plain
        out = Tokenizer(self._plain.model)  # shared, and not copied
        out.pre_tokenizer = self._plain.pre_tokenizer
        _add_in_place(out, self._added)
        return out

    def recall(self, key: Hashable) -> Any:
        """The value that `remember` keeps under the key, or None."""
        return self._memory.get(key)

    def remember(self, key: Hashable, value: T, size: int) -> T:
        """Keep the value for a while if its size (in tokens) is small; returns it."""
        if size <= KEPT_TOKENS:
            if len(self._memory) >= KEPT:
                self._memory.clear()
            self._memory[key] = value
        return value

    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        """Text of ids; control tokens are left out unless `special`."""
        kept = [i for i in ids if special or i not in self._control_ids]
        return self._backend.decode(kept, skip_special_tokens=False)

    def __getstate__(self) -> dict:
        return {name: value for name, value in self.__dict__.items() if name != "_without_forms"} | {"_memory": {}}


def control_tokens_of(template: Template, marks: Sequence[str] | None) -> tuple[str, ...]:
    """The control tokens that a tokenizer must have: the template's, and those of images unless the model has none (`marks` None)."""
    if marks is None:
        return tuple(token for token in template.controls if token not in template.media)
    return (*template.controls, *marks)


def _role_tokens(tokenizer: "PreTrainedTokenizerBase") -> list[str]:
    """The tokens that have a role: BOS, EOS, padding, unknown, mask, and those that a processor calls image_token and the like.
    Special tokens without a role (`additional_special_tokens`) are not among them."""
    return [str(token) for token in tokenizer.special_tokens_map.values() if not isinstance(token, list | tuple)]


def _put_around(backend: Tokenizer) -> list[str]:
    """The tokens that the tokenizer puts around a text."""
    around = json.loads(backend.to_str())["post_processor"]
    steps = around.get("processors", [around]) if around else []
    templates = [name for step in steps for name in (step.get("special_tokens") or ())]
    return templates + [step[end][0] for step in steps for end in ("cls", "sep") if isinstance(step.get(end), list)]


def _bare(backend: Tokenizer) -> Tokenizer:
    """A copy that knows the model's own pieces only: no added tokens, no BOS nor anything else around a text, no padding, no cutting."""
    record = json.loads(backend.to_str())
    record |= {"added_tokens": [], "padding": None, "truncation": None, "post_processor": None}
    return Tokenizer.from_str(json.dumps(record))


FILLER = "\U0010ffff"  # no character, by Unicode's own word: it stands in for tokens that a copy must not know, to keep ids in place


def _add_in_place(tokenizer: Tokenizer, added: Mapping[int, AddedToken]) -> None:
    """Add the tokens under their own ids. The library gives each new token the next id, so gaps between them are filled.
    Refused where that cannot be."""
    tokens: list[AddedToken] = []
    free = tokenizer.get_vocab_size(with_added_tokens=False)
    for i, token in sorted(added.items()):
        if tokenizer.token_to_id(token.content) is None:
            tokens += [AddedToken(f"{FILLER}{n}{FILLER}", normalized=False) for n in range(free, i)]
        tokens.append(token)
        free = max(free, i + 1)
    tokenizer.add_tokens(tokens)
    for i, token in added.items():
        if tokenizer.token_to_id(token.content) != i:
            raise Refused(
                f"the tokenizer has the added token {token.content!r} under id {i}, below the size of its vocabulary, and Eyeline cannot "
                "keep it there. Save the tokenizer again with transformers (AutoTokenizer.from_pretrained(...).save_pretrained(...))"
            )


def load_tokenizer(folder: Path) -> "PreTrainedTokenizerBase":
    """The tokenizer that tokenizer.json describes, to the letter. Raises Refused, also for one that would take memory or time without end.

    Not `AutoTokenizer`: with a config.json of Qwen2 it takes Qwen2's class, which keeps the vocabulary and replaces
    normalisation and splitting by its own (transformers 5.24), so that a tokenizer made otherwise would give other ids.
    """
    from transformers import PreTrainedTokenizerFast

    content = read_object(folder / "tokenizer.json")
    _refuse_settings(folder)
    model = content.get("model")
    pieces = model.get("vocab") if isinstance(model, dict) else None
    owners = {i: piece for piece, i in pieces.items() if isinstance(i, int)} if isinstance(pieces, dict) else {}
    added = content.get("added_tokens") or ()
    if not isinstance(added, list | tuple) or not all(isinstance(token, dict) for token in added):
        raise Refused(f"{folder / 'tokenizer.json'}: added_tokens is not a list of objects. Download it again.")
    for token in added:
        text, number = token.get("content"), token.get("id")
        if owners.setdefault(number, text) != text:
            raise Refused(f"{folder / 'tokenizer.json'} gives id {number} to both {owners[number]!r} and {text!r}. Download it again.")
    largest = max((i for i in owners if isinstance(i, int)), default=0)
    if largest > MOST_IDS:
        raise Refused(f"{folder / 'tokenizer.json'} has the id {largest:,}, over {MOST_IDS:,}, more than the rows of any embedding.")
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder))  # local: the file above was there
    except Exception as error:
        # the tokenizers library raises bare Exceptions for files that it cannot read; a subclass is something else
        if type(error) is not Exception and not isinstance(error, _OF_SETTINGS):
            raise
        raise Refused(f"the tokenizer in {folder} cannot be read: {error}. Download it again.") from error
    _refuse_endless(tokenizer.backend_tokenizer, folder)
    return tokenizer


# what transformers raises for settings of another type than it wants
_OF_SETTINGS = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError)


def _refuse_settings(folder: Path) -> None:
    """Refused for files next to tokenizer.json that transformers would read without checking their size or type."""
    for name in ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"):
        if (folder / name).exists():
            read_object(folder / name)
    texts = [folder / "chat_template.jinja", *sorted((folder / "additional_chat_templates").glob("*.jinja"))]
    for path in texts:
        if path.exists() and (not path.is_file() or path.stat().st_size > LARGEST_TEMPLATE):
            found = f"{path.stat().st_size:,} bytes" if path.is_file() else "no file"
            raise Refused(f"{path} is {found}; wanted a chat template of at most {LARGEST_TEMPLATE:,} bytes. Remove it.")
    if len(texts) > MOST_TEMPLATES:
        raise Refused(f"{folder} has {len(texts):,} chat templates; wanted at most {MOST_TEMPLATES}. Remove those that are not needed.")


def _refuse_endless(backend: Tokenizer, folder: Path) -> None:
    """Refused for a pattern whose work doubles with each letter of a text, as `(a+)+$`'s does: the library gives up after ten
    million steps, in every text that has such a place."""
    for letter in PROBES:
        for behind in PROBES:
            try:
                backend.encode(letter * 60 + behind, add_special_tokens=False)
            except BaseException as error:  # the class of Rust's panics has no other base, and no name to import it by
                if type(error).__name__ != "PanicException":
                    raise
                raise Refused(
                    f"the tokenizer in {folder} splits text by a pattern that does not terminate ({error}): {letter * 60 + behind!r}. "
                    "Download it again from where you trust it."
                ) from error


PROBES = ("a", "1", " ", "\n", "!", "é", "你", "_", "'s")


# Entries of tokenizer_config.json that say how and from where a tokenizer was loaded, or name code and classes that another folder has
LOADING = frozenset(
    (
        *("auto_map", "backend", "init_inputs", "processor_class", "transformers_version"),
        *("cache_dir", "commit_hash", "_commit_hash", "force_download", "is_local", "local_files_only", "name_or_path", "proxies"),
        *("resume_download", "revision", "subfolder", "token", "use_auth_token", "trust_remote_code", "user_agent"),
        *("from_auto", "_from_auto", "from_pipeline", "_from_pipeline", "from_slow", "use_fast"),
        *("gguf_file", "merges_file", "special_tokens_map_file", "tokenizer_file", "vocab_file"),
    )
)


def _for_every_version(written: Mapping[str, Any]) -> dict[str, Any]:
    """tokenizer_config.json as transformers 4 and 5 both read it, of what 5 wrote: 4 does not know the class TokenizersBackend, and
    takes a list under `extra_special_tokens` for a mapping, which is how 5 reads one too. Where no inputs are named, 4 makes
    `token_type_ids`, which models refuse."""
    config = {key: value for key, value in written.items() if key not in LOADING}
    special, named = config.pop("extra_special_tokens", []), config.pop("model_specific_special_tokens", {})
    if isinstance(special, Mapping):
        special, named = [], {**special, **named}
    return {
        "model_input_names": ["input_ids", "attention_mask"],
        **config,
        **({"additional_special_tokens": list(special)} if special else {}),
        **({"extra_special_tokens": named} if named else {}),
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def save_tokenizer(tokenizer: "PreTrainedTokenizerBase", folder: Path) -> None:
    """Write what `load_tokenizer` and transformers, 4 as well as 5, read. Raises StorageFailed."""
    try:
        tokenizer.save_pretrained(str(folder))
    except Exception as error:
        # the tokenizers library raises bare Exceptions for files that it cannot write; a subclass is something else
        if type(error) is not Exception and not isinstance(error, OSError):
            raise
        raise storage_failed("write", folder / "tokenizer.json", OSError(str(error))) from error
    settings = folder / "tokenizer_config.json"
    write_json(settings, _for_every_version(read_object(settings)))


def train_bpe(texts: Iterable[str], vocabulary: int, template: Template) -> "PreTrainedTokenizerFast":
    """A byte-level BPE of at most `vocabulary` ids, made from `texts`, with the template's control tokens and jinja.

    Deterministic: the same texts in the same order give the same ids. Every byte has an id, so no text is unknown.
    """
    from transformers import PreTrainedTokenizerFast

    least = 256 + len(template.controls)
    if vocabulary < least:
        raise Refused(f"a byte-level vocabulary for the template {template.name!r} needs at least {least} ids, got {vocabulary}")
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()  # as Qwen2's, whose class transformers would read an exported language model with
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(QWEN_PIECES), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(template.controls),  # control tokens come after, so that the model's own pieces lack them
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    pieces = (text[n : n + LONGEST_PIECE] for text in texts for n in range(0, len(text), LONGEST_PIECE))
    backend.train_from_iterator(pieces, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=template.terminator, pad_token=template.end, clean_up_tokenization_spaces=False
    )
    tokenizer.add_special_tokens({"additional_special_tokens": [t for t in template.controls if t not in (template.terminator,)]})
    tokenizer.chat_template = template.jinja
    return tokenizer


def add_tokens(tokenizer: "PreTrainedTokenizerBase", template: Template, marks: Sequence[str] | None = ()) -> list[str]:
    """Add the missing control tokens of the template and of the model's images (`ImageRule.marks`; None: it has none) to
    `tokenizer`, and set its chat template; returns what was added.

    Ids follow the largest one in use, so that the free rows which checkpoints pad their embeddings with are used first.
    """
    known = tokenizer.get_vocab()
    missing = [token for token in control_tokens_of(template, marks) if token not in known]
    if missing:
        tokenizer.add_tokens(missing, special_tokens=True)
    tokenizer.chat_template = template.jinja
    return missing


def add_text_tokens(tokenizer: "PreTrainedTokenizerBase", tokens: Sequence[str]) -> None:
    """Add tokens that text may have, each whole wherever it stands. Those that were added before stay as they are. Raises Refused for one
    that is a piece of the vocabulary."""
    known, added = tokenizer.get_vocab(), tokenizer.get_added_vocab()  # pyright: ignore[reportCallIssue, reportOptionalCall]: transformers declares it twice
    for token in tokens:
        if token in known and token not in added:
            raise Refused(f"add_tokens: {token!r} is in the vocabulary already (id {known[token]}). Leave it out")
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in tokens if token not in added])  # pyright: ignore[reportArgumentType]
