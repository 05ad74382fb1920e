"""Every chat template is found again by what it renders, wherever a folder has it, and one that does not end is refused."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from eyeline.bundle import rendering
from eyeline.bundle.bundle import _PROBES, open_bundle, template_name
from eyeline.bundle.rendering import render, rendered
from eyeline.core.errors import Refused
from eyeline.data.text.templates import TEMPLATES
from eyeline.data.text.tokenizer import load_tokenizer
from tests.bundle.tiny import save_language, tokenizer
from tests.data.published_templates import LLAMA3_2, PUBLISHED


@pytest.mark.parametrize("name", list(TEMPLATES))
def test_a_template_is_recognised(name: str) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    tokenizer.chat_template = TEMPLATES[name].jinja
    assert template_name(tokenizer, Path("here")) == name


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_the_template_of_a_published_checkpoint_is_recognised(name: str) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    tokenizer.chat_template = PUBLISHED[name]
    assert template_name(tokenizer, Path("here")) == name


def test_a_template_that_writes_the_day_is_recognised_on_any_day() -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    tokenizer.chat_template = LLAMA3_2
    spoken = str(tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False))
    assert "Today Date: " in spoken and "26 Jul 2024" not in spoken
    assert template_name(tokenizer, Path("here")) == "llama3.1"


# ---- rendering


@pytest.mark.parametrize("name", [*PUBLISHED, *(f"our {name}" for name in TEMPLATES)])
def test_rendering_equals_transformers(name: str) -> None:
    jinja = TEMPLATES[name.removeprefix("our ")].jinja if name.startswith("our ") else PUBLISHED[name]
    tok = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), bos_token="<s>")
    variables = {"bos_token": "<s>", "date_string": "today"}
    for probe in _PROBES:
        wanted = tok.apply_chat_template(probe, chat_template=jinja, tokenize=False, add_generation_prompt=True, date_string="today")
        assert render(jinja, probe, variables) == wanted


TAGS = (
    "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{% generation %}{{ m | tojson }}{% endgeneration %}\n"
    "{% endfor %}{% set ns = namespace(a=1) %}{% set ns.a = ns.a + 1 %}{{ ns.a }}{{ dict(b=2).b }}{{ bos_token }}"
    "{{ strftime_now('%Y') | length }}{{ tools is none }}{{ messages | tojson(indent=2) }}"
)


def test_tags_filters_and_functions_equal_transformers() -> None:
    tok = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), bos_token="<s>")
    wanted = [tok.apply_chat_template(probe, chat_template=TAGS, tokenize=False, add_generation_prompt=True) for probe in _PROBES]
    assert rendered(TAGS, _PROBES, {"bos_token": "<s>"}) == wanted


LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
UNBOUNDED = {
    "nested loops": (LOOP, "does not end within 1 seconds"),
    "a power": ("{% set n = 10 ** 9 %}{{ 7 ** n }}", "does not end within 1 seconds"),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "calls itself without end"),
    "nesting": ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "calls itself without end"),
    "long text": ("{% set n = 10 ** 8 %}{{ 'a' * n }}", "writes more than 1,048,576 characters"),
    "long text in pieces": ("{% for a in range(99999) %}{{ 'a' * 99 }}{% endfor %}", "writes more than 1,048,576 characters"),
    "a gigabyte": ("{% set n = 10 ** 10 %}{{ 'a' * n }}", "needs more than 1,024 MiB of memory"),
    "a long template": ("a" * (2**20 + 1), "has 1,048,577 characters, over 1,048,576"),
}


@pytest.mark.parametrize("name", UNBOUNDED)
def test_a_template_without_end_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "SECONDS", 1)
    jinja, message = UNBOUNDED[name]
    tok = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    tok.chat_template = jinja
    with pytest.raises(Refused, match=f"the chat template of here {message}.* --template, which replaces it"):
        template_name(tok, Path("here"))


@pytest.mark.parametrize(
    "jinja",
    [
        "{% for a in range(10 ** 9) %}{% endfor %}",
        "{{ raise_exception('no') }}",
        "{{ messages[9].content }}",
        "{% if %}",
        "{% set ns = namespace(__class__=1) %}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_a_template_that_fails_is_none(jinja: str) -> None:
    assert rendered(jinja, _PROBES, {}) is None


# ---- where folders have them

QWEN = PUBLISHED["qwen2.5"]
WHERE = {
    "a list": ("tokenizer_config.json", [{"name": "default", "template": QWEN}, {"name": "tool_use", "template": "{{ 1 }}"}]),
    "a list, the default last": ("tokenizer_config.json", [{"name": "rag", "template": "{{ 1 }}"}, {"name": "default", "template": QWEN}]),
    "a list without a default": ("tokenizer_config.json", [{"name": "chat", "template": QWEN}]),
    "a list whose default is unknown": (
        "tokenizer_config.json",
        [{"name": "default", "template": "{{ 1 }}"}, {"name": "chat", "template": QWEN}],
    ),
    "one text": ("tokenizer_config.json", QWEN),
    "the processor's": ("chat_template.json", QWEN),
    "the processor's list": ("chat_template.json", [{"name": "default", "template": QWEN}]),
    "in the processor's settings": ("processor_config.json", QWEN),
}


def without_template(folder: Path) -> Path:
    save_language(folder)
    (folder / "chat_template.jinja").unlink()
    return folder


@pytest.mark.parametrize("name", WHERE)
def test_templates_are_found_wherever_a_folder_has_them(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, value = WHERE[name]
    path = without_template(tmp_path / "m") / file
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | {"chat_template": value}))
    assert open_bundle(tmp_path / "m").bundle.template == "qwen2.5"
    assert ("'chat' is used (qwen2.5)" in capsys.readouterr().out) == ("unknown" in name)


@pytest.mark.parametrize("file", ["chat_template.jinja", "additional_chat_templates/chat.jinja"])
def test_templates_in_files_of_their_own_are_found(file: str, tmp_path: Path) -> None:
    path = without_template(tmp_path / "m") / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(QWEN)
    assert open_bundle(tmp_path / "m").bundle.template == "qwen2.5"


def test_templates_that_are_all_unknown_are_listed(tmp_path: Path) -> None:
    path = without_template(tmp_path / "m") / "chat_template.json"
    path.write_text(
        json.dumps({"chat_template": [{"name": "tool_use", "template": "{{ 1 }}"}, {"name": "default", "template": "{{ 2 }}"}]})
    )
    with pytest.raises(Refused, match=r"is not one that Eyeline knows \(default, tool_use: none\)"):
        open_bundle(tmp_path / "m")


@pytest.mark.parametrize("value", [5, True, [1], {"a": 1}, [{"name": "x"}], [{"template": "x"}], {"default": {"default": "x"}}])
@pytest.mark.parametrize("file", ["tokenizer_config.json", "chat_template.json", "processor_config.json"])
def test_a_template_of_another_type_is_refused(value: object, file: str, tmp_path: Path) -> None:
    path = without_template(tmp_path / "m") / file
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | {"chat_template": value}))
    with pytest.raises(Refused, match=r"wanted a text, or texts by name|the tokenizer in .* cannot be read"):
        open_bundle(tmp_path / "m")


HOSTILE: dict[str, tuple[str, str]] = {
    "settings that are a list": ("tokenizer_config.json", "[1]"),
    "settings that are nested without end": ("tokenizer_config.json", "[" * 100_000),
    "an end of another type": ("tokenizer_config.json", '{"eos_token": 5}'),
    "added tokens of another type": ("tokenizer_config.json", '{"added_tokens_decoder": [1]}'),
    "a switch of another type": ("tokenizer_config.json", '{"split_special_tokens": "x"}'),
    "special tokens that are a list": ("special_tokens_map.json", "[1]"),
    "special tokens of another type": ("special_tokens_map.json", '{"eos_token": [1]}'),
    "added tokens that are a number": ("added_tokens.json", "5"),
    "ids of another type": ("added_tokens.json", '{"a": [1]}'),
    "a template of megabytes": ("chat_template.jinja", "a" * (2**20 + 1)),
    "another template of megabytes": ("additional_chat_templates/x.jinja", "a" * (2**20 + 1)),
    "a template that is a folder": ("chat_template.jinja/x", ""),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_beside_a_tokenizer_are_refused(name: str, tmp_path: Path) -> None:
    tokenizer().save_pretrained(str(tmp_path))
    (tmp_path / "chat_template.jinja").unlink()
    file, text = HOSTILE[name]
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(text)
    with pytest.raises(Refused):
        load_tokenizer(tmp_path)
