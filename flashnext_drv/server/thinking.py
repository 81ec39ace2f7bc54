"""Whether a chat thinks: enable_thinking, reasoning_effort, chat_template_kwargs to the template's names.

Called by schema.py.  What must stay true: the three may not contradict each other; a template is never given
a wish that it does not read, because it would pass over it without a word.
"""

from __future__ import annotations

from typing import Any, Final

from .fields import Fields
from .text import TextModel

__all__ = ["read_thinking"]

_EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_OWN: Final = frozenset(("enable_thinking", "reasoning_effort"))
_FORCED: Final = (
    "a forced tool call begins the reply, without thinking: use tool_choice auto, or turn thinking off"
)


def read_thinking(given: Fields, text: TextModel, forced: bool) -> tuple[bool, dict[str, Any]]:
    """(whether it thinks, variables for the template).

    forced: a tool call is, so the reply begins with it and there is no thinking.  An effort other than none
    means thinking.  Raises ApiError 400.
    """
    reads = text.template.variables if text.template is not None else frozenset[str]()
    raw = given.take("chat_template_kwargs")
    kwargs = Fields({} if raw is None else raw, "chat_template_kwargs")
    variables: dict[str, Any] = {}
    asked: list[tuple[Fields, str, Any, bool]] = []  # where, name, value, thinking
    for where in (given, kwargs):
        switch = where.take("enable_thinking")
        if switch is not None:
            if not isinstance(switch, bool):
                raise where.bad("enable_thinking", switch, "true or false", "invalid_type")
            asked.append((where, "enable_thinking", switch, switch))
    for where in (given, kwargs):
        effort = where.word("reasoning_effort", _EFFORTS)
        if effort is None:
            continue
        asked.append((where, "reasoning_effort", effort, effort != "none"))
        if variables.setdefault("reasoning_effort", effort) != effort:
            raise where.bad("reasoning_effort", effort, "one effort")
    for where, name, value, on in asked:
        if on is not asked[0][3]:
            first = asked[0]
            raise where.bad(name, value, f"what goes with {first[0].path(first[1])} {first[2]}")
        if on and forced:
            raise where.unsupported(name, value, _FORCED)
        if name == "reasoning_effort" and on and name not in reads:
            raise where.unsupported(name, value, "the template has no efforts: use none, or leave it out")
        if not forced and "enable_thinking" not in reads and (name == "enable_thinking" or not on):
            raise where.unsupported(name, value, "the pack's template cannot turn thinking on or off")
    thinking = not forced and (not asked or asked[0][3])
    if not thinking:
        variables.pop("reasoning_effort", None)
    if (asked or forced) and "enable_thinking" in reads:
        variables["enable_thinking"] = thinking
    for name in sorted(reads - _OWN):
        value = kwargs.take(name)
        if value is not None:
            variables[name] = value
    kwargs.end()
    return thinking, variables
