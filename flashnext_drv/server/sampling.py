"""How tokens are drawn and where a reply ends: the fields of a body that all endpoints share.

Called by schema.py.  What must stay true: a value that the engine would refuse is refused here, by the name
the client knows; penalties and bias that change nothing are no edits at all, so greedy stays the plain path.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any, Final

from ..engine import sequence
from ..engine.sequence import Sampling
from .fields import Fields

__all__ = ["read_edits", "read_ids", "read_sampling", "read_stop_ids", "read_stop_strings"]

_MOST_STOPS: Final = 16
_LONGEST_STOP: Final = 256  # characters
_MOST_STOP_IDS: Final = 64
_MOST_BIAS: Final = 900  # with stop ids beside them the engine takes 1024


def read_sampling(given: Fields, defaults: Mapping[str, float]) -> Sampling:
    """defaults: of fields that the body leaves out.  A missing seed is drawn."""
    top_k = given.take("top_k")
    if top_k is None:
        top_k = int(defaults.get("top_k", 0))
    seed = given.integer("seed", 0, (1 << 64) - 1)
    return Sampling(
        temperature=given.number("temperature", 0.0, 100.0, defaults.get("temperature", 1.0)),
        top_k=max(0, given.integer_of("top_k", top_k, -1, (1 << 32) - 1)),
        top_p=given.number("top_p", 0.0, 1.0, defaults.get("top_p", 1.0), above=True),
        min_p=given.number("min_p", 0.0, 1.0, defaults.get("min_p", 0.0)),
        seed=secrets.randbits(53) if seed is None else seed,  # 53 bits: every client's numbers hold it
    )


def read_edits(given: Fields, vocab: int, defaults: Mapping[str, float]) -> Any:
    """Penalties and bias as the engine takes them; None where they change nothing."""
    repetition = given.number("repetition_penalty", 0.01, 100.0, defaults.get("repetition_penalty", 1.0))
    presence = given.number("presence_penalty", -2.0, 2.0, 0.0)
    frequency = given.number("frequency_penalty", -2.0, 2.0, 0.0)
    raw = given.take("logit_bias")
    if raw is not None and (not isinstance(raw, Mapping) or len(raw) > _MOST_BIAS):
        raise given.bad(
            "logit_bias", raw, f"an object of up to {_MOST_BIAS} token ids and numbers", "invalid_type"
        )
    bias: dict[int, float] = {}
    for name, value in (raw or {}).items():
        plain = name.isascii() and name.isdigit() and len(name) < 12 and name == str(int(name))
        if not plain or int(name) >= vocab:
            raise given.bad("logit_bias", name, f"token ids 0..{vocab - 1} as names")
        bias[int(name)] = given.number_of(f"logit_bias.{name}", value, -100.0, 100.0)
    if repetition == 1.0 and presence == frequency == 0.0 and not any(bias.values()):
        return None
    made: Any = getattr(sequence, "Edits", None)
    if made is None:
        names = ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias")
        values = (repetition != 1.0 and repetition, presence, frequency, bias)
        name, value = next((n, v) for n, v in zip(names, values, strict=True) if v)
        raise given.unsupported(name, value, "this build draws from the model's own logits: leave it out")
    return made(repetition=repetition, presence=presence, frequency=frequency, bias=tuple(bias.items()))


def read_stop_strings(given: Fields, has_text: bool) -> tuple[tuple[str, ...], bool]:
    """(stop strings, whether the text keeps the one that ended it)."""
    raw = given.take("stop")
    include = given.flag("include_stop_str_in_output")
    listed = [raw] if isinstance(raw, str) else raw if raw is not None else []
    if not isinstance(listed, list) or len(listed) > _MOST_STOPS:
        raise given.bad("stop", raw, f"a string or a list of up to {_MOST_STOPS} strings", "invalid_type")
    for i, stop in enumerate(listed):
        if not isinstance(stop, str) or not 1 <= len(stop) <= _LONGEST_STOP:
            raise given.bad(f"stop[{i}]", stop, f"a string of 1..{_LONGEST_STOP} characters")
        given.unicode(f"stop[{i}]", stop)
    if listed and not has_text:
        raise given.unsupported("stop", raw, "the pack has no tokenizer: use stop_token_ids")
    return tuple(listed), include


def read_stop_ids(given: Fields, vocab: int, always: frozenset[int]) -> frozenset[int]:
    """Ids that end the reply: those asked for and, unless ignore_eos, `always`."""
    raw = given.take("stop_token_ids")
    if raw is not None and (not isinstance(raw, list) or len(raw) > _MOST_STOP_IDS):
        raise given.bad("stop_token_ids", raw, f"a list of up to {_MOST_STOP_IDS} token ids", "invalid_type")
    own = frozenset(read_ids(given, "stop_token_ids", raw, vocab)) if raw else frozenset()
    return own if given.flag("ignore_eos") else own | always


def read_ids(given: Fields, name: str, raw: object, vocab: int) -> tuple[int, ...]:
    """`raw`, value of field `name`, as token ids 0..vocab-1, at least one."""
    if not isinstance(raw, list) or not raw:
        raise given.bad(name, raw, "a list of at least one token id", "invalid_type")
    for i, value in enumerate(raw):
        if type(value) is not int or not 0 <= value < vocab:
            raise given.bad(f"{name}[{i}]", value, f"a token id 0..{vocab - 1}")
    return tuple(raw)
