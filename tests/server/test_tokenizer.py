"""The tokenizer and template of synthetic packs, and the files of any pack's text side."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashnext_drv.__main__ import main
from flashnext_drv.cli import report
from flashnext_drv.errors import CheckpointError, UsageError
from flashnext_drv.model.config import ModelConfig
from flashnext_drv.model.pack import Pack
from flashnext_drv.model.synth_models import MODELS
from flashnext_drv.model.synth_text import CHAT_TEMPLATE, SPECIAL_TOKENS, text_files, write_text
from flashnext_drv.server.parse import ReplyParser
from flashnext_drv.server.text import TextModel

from . import texts

TOOLS = (texts.WEATHER, texts.CLOCK)


def calls(reply: str) -> list[tuple[str, Any]]:
    """(name, arguments) of the calls in a reply."""
    one = ReplyParser(form="xml", tools=TOOLS)
    deltas = texts.joined([*one.push(reply), *one.finish()])
    return [(name, json.loads(arguments)) for kind, arguments, _, _, name in deltas if kind == "tool_call"]


# The tokenizer of synthetic packs.


@pytest.mark.parametrize("name", ["micro", "tiny"])
def test_every_id_of_the_model_is_a_token_and_special_ones_have_their_places(name: str) -> None:
    config = ModelConfig.from_json(MODELS[name].config_json(None))
    files = text_files(config)
    assert files == text_files(config)
    text = TextModel(files["tokenizer.json"])
    assert text.n_tokens == config.vocab and all(text.token_bytes(i) for i in range(config.vocab))
    assert len({text.token_bytes(i) for i in range(config.vocab)}) == config.vocab
    for token, distance, hidden in SPECIAL_TOKENS:
        assert text.encode(token) == [config.eos_id + distance]
        assert text.is_hidden(config.eos_id + distance) is hidden
    assert text.stop_ids == {config.eos_id, config.eos_id + 2}


def test_places_of_special_tokens_are_those_of_the_published_family() -> None:
    place = {name: 248044 + distance for name, distance, _ in SPECIAL_TOKENS}
    assert (place["<|im_start|>"], place["<|im_end|>"], place["<tool_call>"]) == (248045, 248046, 248058)
    assert (place["<tool_response>"], place["<think>"], place["</think>"]) == (248066, 248068, 248069)


def test_a_vocabulary_without_room_is_refused() -> None:
    raw = MODELS["micro"].config_json(None)
    for field, value in (("vocab_size", 256), ("eos_token_id", 500)):
        changed = {**raw, "text_config": {**raw["text_config"], field: value}}
        with pytest.raises(UsageError, match="no room"):
            text_files(ModelConfig.from_json(changed))


@settings(deadline=None, max_examples=40)
@given(st.text(max_size=60))
def test_any_text_comes_back_from_its_ids(text: str) -> None:
    model = texts.text_model()
    assert model.decode(model.encode(text), special=True) == text


def test_a_file_that_would_cut_or_pad_does_neither() -> None:
    raw = json.loads(text_files(texts.config())["tokenizer.json"])
    raw["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    raw["padding"] = {
        "strategy": {"Fixed": 99},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<|endoftext|>",
    }
    said = "a prompt of more than three tokens"
    assert TextModel(json.dumps(raw)).encode(said) == texts.text_model().encode(said)


def test_english_takes_fewer_ids_than_bytes() -> None:
    text = "The water remembers everything it has seen, and nobody knows how old it is."
    assert len(texts.text_model().encode(text)) < len(text) * 0.6


def test_lone_surrogates_are_no_text() -> None:
    with pytest.raises(UsageError, match="Unicode"):
        texts.text_model().encode("a\ud800b")


# Files of packs.


def test_load_finds_what_synth_wrote_and_nothing_where_there_is_nothing(tmp_path: Path) -> None:
    assert TextModel.load(tmp_path) is None
    write_text(tmp_path, texts.config())
    first = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    write_text(tmp_path, texts.config())
    assert first == {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    text = TextModel.load(tmp_path)
    assert text is not None and text.template is not None
    assert text.template.call_form == "xml" and "enable_thinking" in text.template.variables
    assert text.defaults == {"temperature": 1.0, "top_p": 0.95, "top_k": 20}
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    other = TextModel.load(tmp_path)
    assert other is not None and other.render([{"role": "user", "content": "hm"}]) == "hm!"


def test_synth_writes_packs_with_text_that_inspect_and_manifests_accept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    pack = str(tmp_path / "pack")
    for argv in (
        ["synth", pack, "--model", "micro", "--tokenizer"],
        ["inspect", pack, "--save-manifest", f"{pack}/manifest.json"],
        ["inspect", pack, "--verify"],
    ):
        assert main(argv) == report.GOOD
    said = capsys.readouterr().out
    assert "text     tokenizer.json, tokenizer_config.json, generation_config.json" in said
    assert "manifest: equal" in said
    text = TextModel.load(pack)
    assert text is not None and text.n_tokens == Pack.open(pack).config.vocab
    (tmp_path / "pack" / "tokenizer.json").unlink()
    assert main(["inspect", pack, "--no-digest"]) == report.GOOD
    assert "no tokenizer: token ids only" in capsys.readouterr().out


def test_a_list_of_templates_has_a_default(tmp_path: Path) -> None:
    write_text(tmp_path, texts.config())
    templates = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    text = TextModel.load(tmp_path)
    assert text is not None and text.render([]) == "yes"
    (tmp_path / "tokenizer_config.json").unlink()
    bare = TextModel.load(tmp_path)
    assert bare is not None and bare.template is None
    with pytest.raises(UsageError, match="no chat template"):
        bare.render([])


@pytest.mark.parametrize(
    ("file", "raw", "message"),
    [
        ("tokenizer.json", b"{", "cannot be read"),
        ("tokenizer.json", b"\xff", "not UTF-8"),
        ("tokenizer.json", b'{"version": "1.0"}', "cannot be read"),
        ("tokenizer_config.json", b"[]", "no JSON object"),
        ("tokenizer_config.json", b"{]", "not JSON"),
        ("chat_template.jinja", b"{% for %}", "cannot be compiled"),
        ("generation_config.json", b'{"top_p": 2}', "impossible field"),
        ("generation_config.json", b'{"temperature": "hot"}', "impossible field"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, file: str, raw: bytes, message: str) -> None:
    write_text(tmp_path, texts.config())
    (tmp_path / file).write_bytes(raw)
    with pytest.raises(CheckpointError, match=message):
        TextModel.load(tmp_path)


@pytest.mark.parametrize("package", ["tokenizers", "jinja2"])
def test_a_package_that_is_missing_is_said_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    write_text(tmp_path, ModelConfig.from_json(MODELS["micro"].config_json(None)))
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(CheckpointError, match=f"packages are not installed.*{package}.*pip install"):
        TextModel.load(tmp_path)


def test_a_tokenizer_without_bytes_is_refused(tmp_path: Path) -> None:
    raw = json.loads(text_files(texts.config())["tokenizer.json"]) | {"decoder": None}
    with pytest.raises(CheckpointError, match="not byte-level"):
        TextModel(json.dumps(raw))


# The template.


def test_turns_as_the_family_writes_them() -> None:
    render = texts.text_model().render
    user = {"role": "user", "content": "Hi"}
    on = render([user], variables={"reasoning_effort": "medium"})
    assert on == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n"
    off = render([user], variables={"enable_thinking": False})
    assert off == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert render([user]).startswith("<|im_start|>system\nThink thoroughly.<|im_end|>\n")
    assert render(
        [{"role": "system", "content": "S"}, user], variables={"reasoning_effort": "low"}
    ).startswith("<|im_start|>system\nThink briefly.\n\nS<|im_end|>\n")
    past = [user, {"role": "assistant", "content": "Hello", "reasoning_content": "A greeting."}, user]
    assert render(past, generation=False, variables={"enable_thinking": False}) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\nA greeting.\n</think>\n\nHello"
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    )
    with pytest.raises(UsageError, match="unknown"):
        render([user], variables={"reasoning_effort": "some"})
    with pytest.raises(UsageError, match="role"):
        render([{"role": "judge", "content": ""}])


def test_calls_that_the_template_writes_are_read_back() -> None:
    arguments = {"city": "Bonn\nam Rhein", "days": 3, "more": {"a": [1, None]}, "wind": True, "units": None}
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "rain"},
        {"role": "tool", "content": "sun"},
    ]
    text = texts.text_model().render(messages, TOOLS, variables={"enable_thinking": False})
    assert text.startswith("<|im_start|>system\n# Tools\n")
    reply = text.split("</think>\n\n")[1].split("<|im_end|>")[0]
    assert calls(reply) == [("weather", arguments)]
    assert (
        "<|im_start|>user\n<tool_response>\nrain\n</tool_response>\n"
        "<tool_response>\nsun\n</tool_response><|im_end|>\n"
    ) in text


def test_a_template_sees_nothing_of_ours() -> None:
    for text in (
        "{{ messages.__class__.__mro__ }}",
        "{{ raise_exception.__globals__.x }}",
        "{% include 'x' %}",
        "{{ messages[0].pop('role') }}",
    ):
        with pytest.raises(UsageError):
            texts.text_model(text).render([{"role": "user", "content": "a"}])
    assert texts.text_model("{{ raise_exception.__globals__ }}").render([]) == ""


def test_the_template_of_the_tests_is_the_packs() -> None:
    files = text_files(texts.config())
    assert json.loads(files["tokenizer_config.json"])["chat_template"] == CHAT_TEMPLATE
