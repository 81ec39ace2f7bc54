"""Bodies of requests to what the engine is asked: chat, completion, token ids.

Called by the routes of app.py.  What must stay true: a parse function either returns an Ask that the engine
can run as it stands or raises ApiError 400 with field, value and a way out; it takes nothing silently; it
holds no state and may run on any thread.

Defaults.  temperature, top_p, top_k, min_p and repetition_penalty are those of the pack's
generation_config.json, else 1, 1, off, off and 1; for /v1/generate greedy.  A missing seed is drawn and told
in the reply.  max_tokens: 16 for completions, as OpenAI's; for chat Model.max_new_tokens, or what the context
still holds.

What is not enforced.  tool_choice "required" and a function by name work by beginning the assistant's turn
with the opening of a call, after thinking that is skipped; what follows is the model's own, arguments are not
held to a schema, and a call that is malformed comes back as content.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from ..engine.requests import MOST_LOGPROBS, Request
from ..errors import UsageError
from .calls import forced_opening
from .fields import ApiError, Fields
from .messages import read_messages, read_tool_choice, read_tools
from .parse import ReplyParser, ReplyStream
from .sampling import read_edits, read_ids, read_sampling, read_stop_ids, read_stop_strings
from .text import TextModel
from .thinking import read_thinking

__all__ = [
    "Ask",
    "Model",
    "parse_chat",
    "parse_completion",
    "parse_detokenize",
    "parse_generate",
    "parse_tokenize",
]

_COMPLETION_TOKENS: Final = 16
_ONE: Final = "send the request several times with different seeds"
_TEXT: Final = "replies are not constrained: ask for the form in the prompt and check it"
_NO_TOKENIZER: Final = "the pack has no tokenizer: send token ids to /v1/completions or /v1/generate"
_UNSUPPORTED: Final = {
    "suffix": "the model does not fill in: put all text in front",
    "audio": "this engine reads and writes text",
    "modalities": "this engine reads and writes text",
    "images": "this engine reads text",
    "functions": "use tools",
    "function_call": "use tool_choice",
    "prediction": "leave it out",
    "web_search_options": "leave it out",
    "guided_json": _TEXT,
    "guided_regex": _TEXT,
    "guided_choice": _TEXT,
    "guided_grammar": _TEXT,
    "structured_outputs": _TEXT,
    "json_schema": _TEXT,
    "grammar": _TEXT,
    "use_beam_search": "sample instead",
    "length_penalty": "leave it out",
    "prompt_logprobs": "logprobs are told of new tokens alone",
    "truncate_prompt_tokens": "shorten the prompt yourself",
    "continue_final_message": "use /v1/completions to go on with a text of your own",
    "thinking_budget": "bound the reply by max_tokens, or turn thinking off",
}


@dataclass(frozen=True)
class Model:
    """What is served.

    vocab: ids of the model.  context_tokens: most tokens of prompt and reply.  stop_ids: end a reply; those
    of the text side and the model's end of sequence.  max_new_tokens: of a chat that does not say, 0 for what
    the context holds.  defaults: sampling fields that a request leaves out.
    """

    name: str
    vocab: int
    context_tokens: int
    text: TextModel | None = None
    stop_ids: frozenset[int] = frozenset()
    max_new_tokens: int = 0
    defaults: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        name: str,
        vocab: int,
        context_tokens: int,
        eos_id: int,
        text: TextModel | None = None,
        max_new_tokens: int = 0,
    ) -> Model:
        """With the stop ids and defaults of the text side, as far as the model has such ids."""
        stops = {eos_id} | (set() if text is None else {i for i in text.stop_ids if i < vocab})
        defaults = {} if text is None else text.defaults
        return cls(name, vocab, context_tokens, text, frozenset(stops), max_new_tokens, defaults)


@dataclass(frozen=True)
class Ask:
    """A request as it will be run.

    kind: "chat", "completion" or "ids".  stop_strings, include_stop: end of the text.  echo: text that the
    reply begins with.  thinking: on or off.  tools, tool_choice: as read; form: how calls are written ("":
    none are looked for); opening: what the prompt already holds of one; single_call: end behind the first.
    reasoning: the prompt ends inside <think>.  progress: tell of the prompt's rows in the stream.
    return_ids: token ids in the reply.
    """

    kind: str
    request: Request
    stream: bool = False
    include_usage: bool = False
    stop_strings: tuple[str, ...] = ()
    include_stop: bool = False
    echo: str = ""
    thinking: bool = False
    tools: tuple[dict[str, Any], ...] = ()
    tool_choice: str | dict[str, Any] = "none"
    form: str = ""
    opening: str = ""
    single_call: bool = False
    reasoning: bool = False
    progress: bool = False
    return_ids: bool = False

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        return self.request.ids

    @property
    def seed(self) -> int:
        return self.request.sampling.seed

    @property
    def logprobs(self) -> int | None:
        return self.request.logprobs

    def reply_stream(self, model: Model) -> ReplyStream:
        """A fresh reader of this request's tokens."""
        parser = None
        if self.kind == "chat":
            parser = ReplyParser(
                reasoning=self.reasoning, form=self.form, tools=self.tools, opening=self.opening
            )
        return ReplyStream(
            None if self.kind == "ids" else model.text,
            stop_ids=self.request.stop_ids,
            stop_strings=self.stop_strings,
            include_stop=self.include_stop,
            min_tokens=self.request.min_new_tokens,
            single_call=self.single_call,
            parser=parser,
        )


def parse_chat(body: object, model: Model) -> Ask:
    """Of POST /v1/chat/completions.  Raises ApiError."""
    given = Fields(body)
    _check_model(given, model)
    text = model.text
    if text is None:
        raise ApiError(400, f"{model.name}: {_NO_TOKENIZER}", param="messages", code="no_tokenizer")
    messages = read_messages(given.take("messages"))
    tools = read_tools(given.take("tools"))
    choice = read_tool_choice(given, tools)
    parallel = given.flag("parallel_tool_calls", True)
    forced = choice == "required" or isinstance(choice, dict)
    thinking, variables = read_thinking(given, text, forced)
    shown_tools = () if choice == "none" else tools
    prompt = _rendered(text, messages, shown_tools, variables)
    form = text.template.call_form if shown_tools and text.template is not None else ""
    if shown_tools and not form:
        raise given.unsupported("tools", list(tools), "the pack's chat template knows no tools")
    opening = ""
    if forced:
        if prompt.rstrip().endswith("<think>"):  # a template that always thinks
            prompt = prompt.rstrip() + "\n\n</think>\n\n"
        opening = forced_opening(form, choice["function"]["name"] if isinstance(choice, dict) else None)
        prompt += opening
    ids = tuple(_encoded(given, "messages", text, prompt))
    wanted = given.flag("logprobs")
    top = given.integer("top_logprobs", 0, MOST_LOGPROBS)
    if top is not None and not wanted:
        raise given.bad("top_logprobs", top, "logprobs true beside it")
    long_name = "max_completion_tokens"
    most = given.integer(long_name, 1, model.context_tokens)
    if most is None:
        most = given.integer("max_tokens", 1, model.context_tokens)
    elif given.has("max_tokens"):
        raise given.bad("max_tokens", given.take("max_tokens"), f"{long_name} alone")
    return _ask(
        given,
        model,
        "chat",
        ids,
        most,
        (top or 0) if wanted else None,
        thinking=thinking,
        tools=tools,
        tool_choice=choice,
        form=form,
        opening=opening,
        single_call=bool(form) and not parallel,
        reasoning=not opening and prompt.rstrip().endswith("<think>"),
    )


def parse_completion(body: object, model: Model) -> Ask:
    """Of POST /v1/completions: prompt as text or as token ids.  Raises ApiError."""
    given = Fields(body)
    _check_model(given, model)
    ids = _prompt(given, model)
    most = given.integer("max_tokens", 1, model.context_tokens, _COMPLETION_TOKENS)
    logprobs = given.integer("logprobs", 0, MOST_LOGPROBS)
    echo = ""
    if given.flag("echo"):
        if model.text is None:
            raise given.unsupported("echo", True, _NO_TOKENIZER)
        if logprobs is not None:
            raise given.unsupported("echo", True, "logprobs are of new tokens alone: leave one of them out")
        echo = model.text.decode(ids, special=True)
    return _ask(given, model, "completion", ids, most, logprobs, echo=echo)


def parse_generate(body: object, model: Model) -> Ask:
    """Of POST /v1/generate: token ids in, token ids out, greedy unless said otherwise.  Raises ApiError."""
    given = Fields(body)
    _check_model(given, model)
    raw = given.take("ids")
    if raw is None:
        raise given.bad("ids", None, "the prompt as a list of token ids", "missing_field")
    ids = _prompt_ids(given, "ids", raw, model)
    most = given.integer("max_new_tokens", 1, model.context_tokens)
    if most is None:
        raise given.bad("max_new_tokens", None, f"an integer 1..{model.context_tokens}", "missing_field")
    logprobs = given.integer("logprobs", 0, MOST_LOGPROBS)
    return _ask(given, model, "ids", ids, most, logprobs)


def parse_tokenize(body: object, model: Model) -> dict[str, Any]:
    """Of POST /tokenize: {"prompt"} or {"messages", "tools"} to the reply's JSON.  Raises ApiError."""
    given = Fields(body)
    _check_model(given, model)
    text = _text_model(model, "prompt")
    if given.has("messages"):
        messages, tools = read_messages(given.take("messages")), read_tools(given.take("tools"))
        _, variables = read_thinking(given, text, False)
        prompt = _rendered(text, messages, tools, variables, given.flag("add_generation_prompt", True))
        ids = _encoded(given, "messages", text, prompt)
    else:
        wanted = given.text("prompt")
        if wanted is None:
            raise given.bad("prompt", None, "a text, or messages", "missing_field")
        ids = _encoded(given, "prompt", text, wanted)
    given.flag("add_special_tokens")  # none are added to a prompt of this family
    told: dict[str, Any] = {"count": len(ids), "max_model_len": model.context_tokens, "tokens": ids}
    if given.flag("return_token_strs"):
        told["token_strs"] = [text.token_text(i)[0] for i in ids]
    given.end()
    return told


def parse_detokenize(body: object, model: Model) -> dict[str, Any]:
    """Of POST /detokenize: {"tokens"} to the reply's JSON.  Raises ApiError."""
    given = Fields(body)
    _check_model(given, model)
    text = _text_model(model, "tokens")
    raw = given.take("tokens")
    ids = () if raw == [] else read_ids(given, "tokens", raw, model.vocab)
    given.end()
    return {"prompt": text.decode(ids, special=True)}


def _ask(
    given: Fields,
    model: Model,
    kind: str,
    ids: tuple[int, ...],
    most: int | None,
    logprobs: int | None,
    **more: Any,
) -> Ask:
    """What all kinds share; nothing may be left in the body then."""
    room = model.context_tokens - len(ids) + 1  # the last token drawn needs no place
    if most is None:
        most = min(room, model.max_new_tokens or room)
    if room < 1 or most > room:
        param = "messages" if kind == "chat" else "ids" if kind == "ids" else "prompt"
        raise _too_long(f"{len(ids)} prompt tokens and {max(most, 1)} new ones do not fit", model, param)
    least = given.integer("min_tokens", 0, most, 0) or 0
    stream = given.flag("stream")
    usage = _stream_options(given, stream)
    progress = given.flag("return_progress")
    if progress and not stream:
        raise given.bad("return_progress", True, "stream true beside it")
    strings, include = ((), False) if kind == "ids" else read_stop_strings(given, model.text is not None)
    request = Request(
        ids,
        most,
        read_sampling(given, {"temperature": 0.0} if kind == "ids" else model.defaults),
        read_stop_ids(given, model.vocab, model.stop_ids),
        least,
        logprobs,
        read_edits(given, model.vocab, {} if kind == "ids" else model.defaults),
    )
    return_ids = given.flag("return_token_ids", model.text is None) or kind == "ids"
    given.text("user")
    given.only("n", (1,), _ONE)
    given.only("best_of", (1,), _ONE)
    given.only("response_format", ({"type": "text"},), _TEXT)
    given.only("modalities", (["text"],), _UNSUPPORTED["modalities"])
    given.only("service_tier", ("auto", "default"), "leave it out")
    given.only("store", (False,), "nothing is stored: leave it out")
    given.only("draft", (False,), "there are no drafts: leave it out")
    given.only("skip_special_tokens", (True,), "ask for return_token_ids to see special tokens")
    given.only("add_special_tokens", (True, False), "none are added to a prompt of this family")
    given.end(_UNSUPPORTED)
    return Ask(
        kind, request, stream, usage, strings, include, progress=progress, return_ids=return_ids, **more
    )


def _check_model(given: Fields, model: Model) -> None:
    name = given.text("model")
    if name and name != model.name:
        raise ApiError(
            404,
            f"model {name[:80]!r} is not served here: use {model.name!r} or leave model out",
            param="model",
            code="model_not_found",
        )


def _text_model(model: Model, param: str) -> TextModel:
    if model.text is None:
        raise ApiError(400, f"{model.name}: {_NO_TOKENIZER}", param=param, code="no_tokenizer")
    return model.text


def _rendered(
    text: TextModel,
    messages: list[dict[str, Any]],
    tools: tuple[dict[str, Any], ...],
    variables: Mapping[str, Any],
    generation: bool = True,
) -> str:
    try:
        return text.render(messages, tools, generation=generation, variables=variables)
    except UsageError as error:
        raise ApiError(400, str(error), param="messages", code="invalid_messages") from error


def _encoded(given: Fields, name: str, text: TextModel, prompt: str) -> list[int]:
    try:
        ids = text.encode(prompt)
    except UsageError as error:
        raise ApiError(400, str(error), param=name, code="invalid_value") from error
    if not ids:
        raise given.bad(name, prompt, "a text of at least one token")
    return ids


def _prompt(given: Fields, model: Model) -> tuple[int, ...]:
    raw = given.take("prompt")
    if isinstance(raw, list) and raw and isinstance(raw[0], str | list):
        if len(raw) > 1:
            raise given.unsupported("prompt", raw, "send one request for each prompt")
        raw = raw[0]
    if isinstance(raw, str):
        text = _text_model(model, "prompt")
        return tuple(_encoded(given, "prompt", text, given.unicode("prompt", raw)))
    if raw is None:
        raise given.bad("prompt", None, "a text or a list of token ids", "missing_field")
    return _prompt_ids(given, "prompt", raw, model)


def _prompt_ids(given: Fields, name: str, raw: object, model: Model) -> tuple[int, ...]:
    if isinstance(raw, list) and len(raw) > model.context_tokens:
        raise _too_long(f"{len(raw)} prompt tokens do not fit", model, name)
    return read_ids(given, name, raw, model.vocab)


def _too_long(what: str, model: Model, param: str) -> ApiError:
    return ApiError(
        400,
        f"{what} the context of {model.context_tokens} tokens: shorten the prompt or lower max_tokens",
        param=param,
        code="context_length_exceeded",
    )


def _stream_options(given: Fields, stream: bool) -> bool:
    raw = given.take("stream_options")
    if raw is None:
        return False
    if not stream:
        raise given.bad("stream_options", raw, "stream true beside it")
    options = Fields(raw, "stream_options")
    usage = options.flag("include_usage")
    options.only("include_obfuscation", (False,), "replies are not padded: leave it out")
    options.end()
    return usage
