"""The small measurements: decode, cache, concurrent, cold.

Called by cli/bench.py.  Each takes a Site and sizes and returns what it found with its verdict.  What must
stay true: a repeated request must give the tokens it gave before, whatever ran beside it; a figure is taken
from replies that were judged, and the verdict names every reply that was not in order.

    decode      two fixed prompts, several times each; the medians; with `chat` as a user's turn in text
    cache       prompts of exact lengths, first and then again; with `cold` no token may come from a cache
    concurrent  1, 2, 4, 8 streams at once, distinct prompts; each alone before, all in a row behind
    cold        a short, a long source and a long document prompt, cold and then the identical one warm
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from .client import Ask, ask, each_alone, together
from .inputs import asks, prompt_ids
from .site import Notes, Site
from .timing import middle, times

__all__ = ["COLD", "cache", "cold", "concurrent", "decode"]

COLD: Final = {"short": 40, "source": 16_022, "document": 12_780}  # lengths of the published runs
_DECODE: Final = {"prose": 31, "code": 14}  # of their short prompts
_CHAT: Final = {"prose": "Tell me how rain is made, and why some clouds bring none.",
                "code": "Write a function that returns the n-th Fibonacci number."}


def decode(
    site: Site, *, new_tokens: int = 256, repeats: int = 3, salt: int = 100, chat: bool = False
) -> dict[str, Any]:
    """256 tokens behind two short prompts, three times.  chat: by template, tokenizer and text as users ask,
    of a pack that has them."""
    notes, medians = Notes(site), {}
    for i, (name, length) in enumerate(_DECODE.items()):
        request = Ask(prompt_ids(length, site.vocab, salt + i), new_tokens)
        if chat:
            request = Ask((), new_tokens, text=_CHAT[name])
        replies = [ask(site.target, request) for _ in range(repeats)]
        for k, reply in enumerate(replies):
            notes.take(f"{name} {k}", reply, replays=_wanted(site, new_tokens))
        medians[name] = middle([times(r.sent_at, r.token_at, len(r.ask.ids)) for r in replies])
        site.say(f"{name:<6} {_figures(medians[name])}")
    return notes.result("decode", new_tokens=new_tokens, repeats=repeats, chat=chat, medians=medians)


def cache(
    site: Site, *, lengths: Sequence[int], new_tokens: int = 64, repeats: int = 2, cold: bool = False,
    salt: int = 200,
) -> dict[str, Any]:
    """Prompts of exactly these lengths, each `repeats` times in a row.  cold: no reply may use a cache."""
    notes, points = Notes(site, cold=cold), []
    for request in asks(lengths, site.vocab, new_tokens, salt=salt):
        for k in range(repeats):
            reply = ask(site.target, request)
            made = notes.take(f"{len(request.ids)} {'first' if not k else f'again {k}'}", reply,
                              replays=_wanted(site, new_tokens))
            site.say(f"{made['name']:<14} {_figures(made['client'])} cached {made['cached_tokens']}")
            points.append({"name": made["name"], "cached_tokens": made["cached_tokens"]})
    return notes.result("cache", lengths=list(lengths), new_tokens=new_tokens, repeats=repeats,
                        require_cold=cold, points=points)


def concurrent(
    site: Site, *, widths: Sequence[int] = (1, 2, 4, 8), length: int = 64, new_tokens: int = 128,
    alone: bool = False, serial: bool = False, salt: int = 300,
) -> dict[str, Any]:
    """So many streams at once.  alone: every request by itself before; serial: all again in a row behind."""
    notes, waves = Notes(site), []
    requests = asks([length] * max(widths), site.vocab, new_tokens, salt=salt)
    wanted = _wanted(site, new_tokens)
    if alone:
        for i, reply in enumerate(each_alone(site.target, requests)):
            notes.take(f"alone {i}", reply, replays=wanted)
    for width in widths:
        wave = notes.wave(f"width {width}", together(site.target, requests[:width]), replays=wanted)
        waves.append(wave)
        site.say(f"{width} streams: {wave['aggregate']['decode_tokens_per_s']} tokens/s together")
    if serial:
        for i, reply in enumerate(each_alone(site.target, requests)):
            notes.take(f"serial {i}", reply, replays=wanted)
    if not alone and not serial and not (1 in widths and max(widths) > 1):
        notes.reasons.append("no reply was held to a run of its own: give --alone or --serial")
    return notes.result("concurrent", widths=list(widths), length=length, new_tokens=new_tokens, alone=alone,
                        serial=serial, waves=waves)


def cold(
    site: Site, *, lengths: dict[str, int] | None = None, new_tokens: int = 128, salt: int = 400
) -> dict[str, Any]:
    """Each prompt cold, then the identical one warm; both must be computed in full."""
    notes, points = Notes(site), {}
    for i, (name, length) in enumerate((lengths or COLD).items()):
        request = Ask(prompt_ids(length, site.vocab, salt + i), new_tokens)
        for state in ("cold", "warm"):
            made = notes.take(f"{name} {state}", ask(site.target, request), replays=_wanted(site, new_tokens))
            points[f"{name} {state}"] = made["client"] | {"phases_s": made["phases_s"]}
            site.say(f"{name:<9} {state} {length:>6} tokens  {_figures(made['client'])}, of TTFT "
                     + ", ".join(f"{each} {s}" for each, s in made["phases_s"].items()) + " s")
    return notes.result("cold", lengths=lengths or COLD, new_tokens=new_tokens, points=points)


def _wanted(site: Site, new_tokens: int) -> bool | None:
    """Whether replies must show replays: a graph needs a few rounds to be made and used."""
    return None if new_tokens < 8 else site.mode == "graph"


def _figures(found: dict[str, Any]) -> str:
    """A line for people."""
    def shown(name: str, digits: int) -> str:
        value = found[name]
        return "-" if value is None else f"{value:.{digits}f}"

    return (f"TTFT {shown('ttft_s', 3)} s, prefill {shown('prefill_tokens_per_s', 0)} tok/s, "
            f"decode {shown('decode_tokens_per_s', 1)} tok/s, ITL mean {shown('itl_mean_ms', 2)} "
            f"p50 {shown('itl_p50_ms', 2)} p95 {shown('itl_p95_ms', 2)} ms")
