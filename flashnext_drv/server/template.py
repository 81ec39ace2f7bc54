"""A pack's chat template: compiled once, run in jinja2's sandbox, and what it tells of the reply's form.

Called by text.py (`TextModel.template`).  What must stay true: a template reads what it is given and nothing
else (sandbox, no loader, no attributes of ours); whatever goes wrong inside it is a UsageError of the request
or, when it cannot be compiled, a CheckpointError of the pack.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from ..errors import CheckpointError, UsageError

__all__ = ["ChatTemplate", "packages_missing"]

_GIVEN: Final = frozenset(("messages", "tools", "add_generation_prompt", "raise_exception", "strftime_now"))
_TOKENS: Final = ("bos_token", "eos_token", "pad_token", "unk_token")


class ChatTemplate:
    """One compiled template.

    variables: names it reads beyond messages, tools and add_generation_prompt, such as enable_thinking.
    call_form: "xml" where tool calls are written <function=...><parameter=...>, "json" where they are one
    JSON object with name and arguments, "" where it knows no <tool_call>.
    """

    def __init__(self, text: str, config: Mapping[str, Any], source: str) -> None:
        """text: the template.  config: tokenizer_config.json, for bos_token and the like.  Raises
        CheckpointError."""
        try:
            import jinja2
            from jinja2 import meta
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError as error:
            raise packages_missing(error) from error
        env = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        env.filters["tojson"] = _to_json
        env.globals["raise_exception"] = _refuse
        env.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        for name in _TOKENS:
            token = config.get(name)
            token = token.get("content") if isinstance(token, Mapping) else token
            if isinstance(token, str):
                env.globals[name] = token
        try:
            self._template = env.from_string(text)
            names = meta.find_undeclared_variables(env.parse(text))
        except jinja2.TemplateError as error:
            raise CheckpointError(
                "the chat template cannot be compiled", file=source, because=str(error), do="fetch it again"
            ) from error
        self.variables = frozenset(names) - _GIVEN - set(env.globals)
        self.call_form = "" if "<tool_call>" not in text else "xml" if "<function=" in text else "json"

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        generation: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """The prompt's text; see TextModel.render.  Raises UsageError with what the template says."""
        import jinja2

        given: dict[str, Any] = {**variables, "messages": messages, "add_generation_prompt": generation}
        if tools:
            given["tools"] = tools
        try:
            return self._template.render(given)
        except jinja2.TemplateError as error:
            raise UsageError("the chat template refuses the messages", because=str(error)) from error
        except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError, RecursionError) as error:
            raise UsageError(
                "the chat template cannot be applied to the messages",
                because=f"{type(error).__name__}: {error}",
            ) from error


def packages_missing(error: ImportError) -> CheckpointError:
    """What a pack with a text side raises where the extra `server` is not installed."""
    return CheckpointError("the server's packages are not installed", because=str(error),
                           do="pip install 'flashnext_drv[server]'")


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:
    """As templates of published packs expect it: not escaped for HTML, letters as they are."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> str:
    import jinja2

    raise jinja2.TemplateError(message)
