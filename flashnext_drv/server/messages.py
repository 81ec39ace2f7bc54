"""Messages and tools of a chat request: checked, and in the form that chat templates read.

Called by schema.py.  What must stay true: what the model would not see is refused, not dropped; arguments of
earlier tool calls reach the template as objects, as templates of the family go through them by key.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from .fields import ApiError, Fields, shown

__all__ = ["read_messages", "read_tool_choice", "read_tools"]

_ROLES: Final = ("system", "developer", "user", "assistant", "tool")
_MOST_MESSAGES: Final = 8192
_MOST_TOOLS: Final = 256
_NAME: Final = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
_TEXT_ONLY: Final = "this engine reads text alone: send parts of type text"


def read_messages(raw: object) -> list[dict[str, Any]]:
    """The messages, each {role, content} and what belongs to its role.  Raises ApiError 400."""
    if not isinstance(raw, list) or not raw:
        raise ApiError(
            400,
            f"messages is {shown(raw)}: expected a list of at least one message",
            param="messages",
            code="missing_field" if raw is None else "invalid_type",
        )
    if len(raw) > _MOST_MESSAGES:
        raise ApiError(
            400,
            f"messages has {len(raw)} entries: at most {_MOST_MESSAGES}",
            param="messages",
            code="invalid_value",
        )
    return [_message(Fields(one, f"messages[{i}]")) for i, one in enumerate(raw)]


def read_tools(raw: object) -> tuple[dict[str, Any], ...]:
    """The tools offered, as sent.  Raises ApiError 400."""
    if raw is None:
        return ()
    if not isinstance(raw, list) or len(raw) > _MOST_TOOLS:
        raise ApiError(
            400,
            f"tools is {shown(raw)}: expected a list of up to {_MOST_TOOLS} tools",
            param="tools",
            code="invalid_type",
        )
    seen: set[str] = set()
    return tuple(_tool(one, f"tools[{i}]", seen) for i, one in enumerate(raw))


def read_tool_choice(body: Fields, tools: tuple[dict[str, Any], ...]) -> str | dict[str, Any]:
    """ "auto", "none", "required", or {"type": "function", "function": {"name": ...}}."""
    raw = body.take("tool_choice")
    if raw is None:
        return "auto" if tools else "none"
    if isinstance(raw, str):
        if raw not in ("auto", "none", "required"):
            raise body.bad("tool_choice", raw, "auto, none, required or one function by name")
        if raw == "required" and not tools:
            raise body.bad("tool_choice", raw, "tools beside it")
        return raw if tools else "none"
    named = Fields(raw, "tool_choice")
    if named.take("type") != "function":
        raise body.unsupported("tool_choice", raw, 'use {"type": "function", "function": {"name": ...}}')
    function = Fields(named.take("function"), "tool_choice.function")
    name = function.text("name")
    function.end()
    named.end()
    if name not in {tool["function"]["name"] for tool in tools}:
        raise function.bad("name", name, "the name of one of the tools")
    return {"type": "function", "function": {"name": name}}


def _message(one: Fields) -> dict[str, Any]:
    role = one.word("role", _ROLES)
    if role is None:
        raise one.bad("role", None, " or ".join(_ROLES))
    message: dict[str, Any] = {"role": "system" if role == "developer" else role}
    if role == "assistant":
        _assistant(one, message)
    else:
        message["content"] = _content(one)
        if role == "tool":
            call_id = one.text("tool_call_id")
            if call_id is None:
                raise one.bad("tool_call_id", None, "the id of the call that this answers")
            message["tool_call_id"] = call_id
            name = one.text("name")
            if name is not None:
                message["name"] = name
    one.end(
        {
            "name": "the model is not shown names; write them into the content",
            "tool_calls": "only messages of role assistant have tool_calls",
            "function_call": "use tool_calls",
            "audio": _TEXT_ONLY,
            "prefix": "use /v1/completions to go on with a text of your own",
        }
    )
    return message


def _assistant(one: Fields, message: dict[str, Any]) -> None:
    reasoning = [one.text(name) for name in ("reasoning_content", "reasoning")]
    thought = reasoning[0] if reasoning[0] is not None else reasoning[1]
    if thought is not None:
        message["reasoning_content"] = thought
    for name in ("annotations",):  # what replies of other servers carry when there is nothing
        if one.has(name):
            one.only(name, ([],), "leave it out")
    calls = one.take("tool_calls")
    if calls is not None and not isinstance(calls, list):
        raise one.bad("tool_calls", calls, "a list of tool calls", "invalid_type")
    if calls:
        message["tool_calls"] = [
            _call(Fields(call, f"{one.path('tool_calls')}[{i}]")) for i, call in enumerate(calls)
        ]
    if one.has("content"):
        message["content"] = _content(one)
    elif calls or thought is not None:
        message["content"] = ""
    else:
        raise one.bad("content", None, "a string, or tool_calls instead")


def _call(call: Fields) -> dict[str, Any]:
    call_id = call.text("id")
    call.only("type", ("function",), "tool calls are of type function")
    call.take("index")
    function = Fields(call.take("function"), call.path("function"))
    name, arguments = function.text("name"), function.take("arguments")
    if name is None or not _NAME.fullmatch(name):
        raise function.bad("name", name, "a function's name")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise function.bad("arguments", arguments, "the text of a JSON object") from None
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise function.bad("arguments", arguments, "the text of a JSON object")
    function.end()
    call.end()
    return {"id": call_id or "", "type": "function", "function": {"name": name, "arguments": arguments}}


def _content(one: Fields) -> str:
    """A string, or the texts of a list of text parts one behind the other."""
    raw = one.take("content")
    if isinstance(raw, str):
        return one.unicode("content", raw)
    if not isinstance(raw, list):
        raise one.bad("content", raw, "a string or a list of parts of type text", "invalid_type")
    texts = []
    for i, entry in enumerate(raw):
        part = Fields(entry, f"{one.path('content')}[{i}]")
        kind = part.take("type")
        if kind != "text":
            raise part.unsupported("type", kind, _TEXT_ONLY)
        text = part.text("text")
        if text is None:
            raise part.bad("text", None, "a string")
        part.end()
        texts.append(text)
    return "".join(texts)


def _tool(raw: object, where: str, seen: set[str]) -> dict[str, Any]:
    tool = Fields(raw, where)
    kind = tool.take("type")
    if kind != "function":
        raise tool.unsupported("type", kind, "tools are of type function")
    function = Fields(tool.take("function"), f"{where}.function")
    name = function.text("name")
    if name is None or not _NAME.fullmatch(name):
        raise function.bad("name", name, "1..64 letters, digits, _, - or .")
    if name in seen:
        raise function.bad("name", name, "a name that no other tool has")
    seen.add(name)
    made: dict[str, Any] = {"name": name}
    description = function.text("description")
    if description is not None:
        made["description"] = description
    parameters = function.take("parameters")
    if parameters is not None:
        if not isinstance(parameters, Mapping):
            raise function.bad("parameters", parameters, "a JSON schema of an object", "invalid_type")
        _check_schema(function, parameters)
        made["parameters"] = parameters
    function.only("strict", (False,), "arguments are not held to the schema: leave strict out and check them")
    function.end()
    tool.end()
    return {"type": "function", "function": made}


def _check_schema(function: Fields, parameters: Mapping[str, Any]) -> None:
    """As far as the reading of calls goes by it: an object, with properties by name."""
    kind = parameters.get("type", "object")
    if kind != "object":
        raise function.bad("parameters.type", kind, "object")
    properties = parameters.get("properties", {})
    if not isinstance(properties, Mapping):
        raise function.bad("parameters.properties", properties, "an object", "invalid_type")
    try:
        function.unicode("parameters", json.dumps(parameters, ensure_ascii=False))
    except RecursionError:
        raise function.bad("parameters", parameters, "a schema that is not nested so deeply") from None
