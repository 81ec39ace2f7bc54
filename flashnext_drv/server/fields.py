"""Request bodies field by field: what may stand there, and the error that names what may not.

Called by schema.py and messages.py.  What must stay true: a field nobody took is an error, so nothing that a
client asks for is dropped in silence; null is the same as absent; messages name field, value and a way out.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, Final

__all__ = ["ApiError", "Fields", "shown"]

_MOST_SHOWN: Final = 80  # characters of a value in a message
_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout",
    429: "rate_limit_error",
}


class ApiError(Exception):
    """A failure with its HTTP status and OpenAI's error body.

    message: one line.  param: the field at fault.  code: a word for programs.  type: OpenAI's class of error,
    by default from the status.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        type: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.type = type or _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")

    def body(self) -> dict[str, Any]:
        """The reply's JSON."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": error}


class Fields:
    """One JSON object of a body, read by taking fields out of it.

    where: path of the object in the body, "" for the body itself.  All methods raise ApiError 400.
    """

    def __init__(self, raw: object, where: str = "") -> None:
        self.where = where
        if not isinstance(raw, Mapping):
            raise ApiError(
                400,
                f"{where or 'the body'} is {shown(raw)}: expected a JSON object",
                param=where or None,
                code="invalid_type",
            )
        self._left: dict[str, Any] = {str(k): v for k, v in raw.items() if v is not None}

    def path(self, name: str) -> str:
        """Full name of a field, for messages."""
        return f"{self.where}.{name}" if self.where else name

    def has(self, name: str) -> bool:
        """Whether the field is there and not taken."""
        return name in self._left

    def take(self, name: str) -> Any:
        """The field's value as it is; None when absent."""
        return self._left.pop(name, None)

    def bad(self, name: str, value: object, wanted: str, code: str = "invalid_value") -> ApiError:
        """The error to raise for a value."""
        path = self.path(name)
        return ApiError(400, f"{path} is {shown(value)}: expected {wanted}", param=path, code=code)

    def unsupported(self, name: str, value: object, way_out: str) -> ApiError:
        """The error to raise for what is asked for and not built."""
        path = self.path(name)
        return ApiError(
            400, f"{path} is {shown(value)}: not supported; {way_out}", param=path, code="unsupported_value"
        )

    def text(self, name: str, default: str | None = None) -> str | None:
        """A string that can be written as UTF-8."""
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.bad(name, value, "a string", "invalid_type")
        return self.unicode(name, value)

    def unicode(self, name: str, value: str) -> str:
        """`value`, which is a string of field `name`."""
        try:
            value.encode()
        except UnicodeEncodeError:
            raise self.bad(name, value, "valid Unicode without lone surrogates") from None
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.bad(name, value, "true or false", "invalid_type")
        return value

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> int | None:
        value = self.take(name)
        if value is None:
            return default
        return self.integer_of(name, value, low, high)

    def integer_of(self, name: str, value: object, low: int, high: int) -> int:
        """`value` of field `name` as an integer low..high; 3.0 is one."""
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.bad(name, value, f"an integer {low}..{high}", "invalid_type")
        if not low <= value <= high:
            raise self.bad(name, value, f"an integer {low}..{high}")
        return value

    def number(self, name: str, low: float, high: float, default: float, *, above: bool = False) -> float:
        """A finite number low..high; above: not `low` itself."""
        value = self.take(name)
        if value is None:
            return default
        return self.number_of(name, value, low, high, above=above)

    def number_of(self, name: str, value: object, low: float, high: float, *, above: bool = False) -> float:
        wanted = f"a number above {low:g}, up to {high:g}" if above else f"a number {low:g}..{high:g}"
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.bad(name, value, wanted, "invalid_type")
        if (isinstance(value, float) and not math.isfinite(value)) or not low <= value <= high:
            raise self.bad(name, value, wanted)
        if above and value == low:
            raise self.bad(name, value, wanted)
        return float(value)

    def word(self, name: str, allowed: Collection[str], default: str | None = None) -> str | None:
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, str) or value not in allowed:
            raise self.bad(name, value, " or ".join(allowed))
        return value

    def only(self, name: str, allowed: Collection[Any], way_out: str) -> None:
        """A field that may be there as long as it asks for what is done anyway."""
        value = self.take(name)
        if value is not None and not any(type(value) is type(one) and value == one for one in allowed):
            raise self.unsupported(name, value, way_out)

    def end(self, unsupported: Mapping[str, str] | None = None) -> None:
        """Nothing may be left.  unsupported: known names that are not built, with a way out."""
        for name, value in self._left.items():
            way_out = (unsupported or {}).get(name)
            if way_out is not None:
                raise self.unsupported(name, value, way_out)
        for name in self._left:
            path = self.path(name)
            raise ApiError(
                400,
                f"{shown(path)} is no known field; leave it out or check its spelling",
                param=path[:_MOST_SHOWN],
                code="unknown_parameter",
            )


def shown(value: object) -> str:
    """A value in one line of bounded length."""
    if isinstance(value, list | tuple) and len(value) > 8:
        return f"a list of {len(value)} values"
    if isinstance(value, Mapping):
        return f"an object of {len(value)} fields"
    try:
        text = ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value)
    except ValueError:  # an integer too long to print
        return f"an integer of {value.bit_length()} bits" if isinstance(value, int) else "?"
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 3]}..."
