"""Every error this package raises on purpose, and the form of its message.

    FlashNextError
     +- DriverError         a driver call returned an error            call, code, code_name
     |   +- OutOfMemory     device, pinned or mapped memory ran out    size_bytes, free_bytes
     |   +- ContextLost     sticky error: the context is of no use     context
     |   +- DriverMissing   no libcuda, or it lacks an entry point     call
     +- BuildError          kernel images: none for this GPU, stale, NVRTC refused the source
     +- CheckpointError     a pack that cannot be used as it is
     +- ContractError       a kernel broke its declaration, or arguments do not fit it
     +- CapacityError       a limit that was given is too small for what is asked
     |   +- QueueFull        a scheduler holds as many as it may     retry_after_seconds
     +- Cancelled           a prompt's caller asked to stop             done_tokens, prompt_tokens
     +- UsageError          a call in the wrong state or with a value outside its documented range
     |   +- Draining         a scheduler takes nothing new any more
     +- RemoteError         a server's answer cannot be used           status
     +- LeakError           something was not closed                   entries
     +- SimError            a finding of the simulator
         +- RaceFound, OutOfBounds, PoisonRead, Deadlock

Raised everywhere, caught by type.  Facts are fields, and the message is made from them: nobody parses
messages. Form, one line, units always: what failed (with which values): what holds the scarce thing; what to
do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

__all__ = ["BuildError", "Cancelled", "CapacityError", "CheckpointError", "ContextLost", "ContractError",
           "Deadlock", "Draining", "DriverError", "DriverMissing", "FlashNextError", "LeakError",
           "OutOfBounds", "OutOfMemory", "PoisonRead", "QueueFull", "RaceFound", "RemoteError", "SimError",
           "UsageError", "bytes_text"]


_MOST_SHOWN: Final = 400    # characters of one fact in a message; the field itself stays whole


class FlashNextError(Exception):
    """Base of the tree.

    what: what failed, words.  because: what holds the scarce thing, or what was found.  do: what to do about
    it. facts: values, with the unit in the name; each is also an attribute and `facts` holds them all.
    """

    def __init__(self, what: str, *, because: str = "", do: str = "", **facts: object) -> None:
        self.what = what
        self.because = because
        self.do = do
        self.facts: dict[str, object] = facts
        self.__dict__.update(facts)
        super().__init__(self.message())

    def message(self) -> str:
        """The one-line text, made from the fields."""
        text = self.what
        if self.facts:
            text += " (" + ", ".join(f"{name}={_shown(value)}" for name, value in self.facts.items()) + ")"
        if self.because:
            text += f": {self.because}"
        if self.do:
            text += f"; {self.do}"
        return text

    def __str__(self) -> str:
        return self.message()

    if TYPE_CHECKING:
        def __getattr__(self, name: str) -> Any: ...


class DriverError(FlashNextError):
    """A driver call returned an error code.

    call: the driver's function name.  code: its integer result (0 when the binding raised instead).
    code_name: e.g. CUDA_ERROR_INVALID_VALUE.  arguments: values of the call worth showing, units in the
    names.
    """

    def __init__(self, call: str, code: int = 0, code_name: str = "", *, because: str = "", do: str = "",
                 **arguments: object) -> None:
        self.call = call
        self.code = code
        self.code_name = code_name or f"error {code}"
        super().__init__(call, because=because, do=do, **arguments)

    def message(self) -> str:
        given = ", ".join(f"{name}={_shown(value)}" for name, value in self.facts.items())
        text = f"{self.call}({given}) returned {self.code_name}"
        if self.because:
            text += f": {self.because}"
        return f"{text}; {self.do}" if self.do else text


class OutOfMemory(DriverError):
    """Device, pinned or mapped memory ran out.  `because` names the largest holders once the ledger is
    known."""


class ContextLost(DriverError):
    """A sticky error: nothing on this context can work again.  Close what was opened on it and open anew."""


class DriverMissing(DriverError):
    """No libcuda could be loaded, it has no device, or it lacks an entry point that is needed."""

    def message(self) -> str:
        text = f"{self.call} is not available"
        if self.because:
            text += f": {self.because}"
        return f"{text}; {self.do}" if self.do else text


class BuildError(FlashNextError):
    """Kernel images are missing, stale or for other GPUs, or a compiler refused a source."""


class CheckpointError(FlashNextError):
    """A pack cannot be used: missing, malformed, changed or unsupported; nothing was loaded."""


class ContractError(FlashNextError):
    """A kernel and its declaration disagree, or a launch's arguments do not fit the declaration."""


class CapacityError(FlashNextError):
    """A limit is too small for what is asked; nothing was reserved."""


class QueueFull(CapacityError):
    """A scheduler has as many requests as it may hold.  retry_after_seconds: when one of them is expected to
    be done, from how long the earlier ones took."""


class Cancelled(FlashNextError):
    """A prompt was stopped between two launches because its caller asked for it.

    Tokens already in the state stay there; the sequence may go on or be closed.
    """


class UsageError(FlashNextError):
    """A call in the wrong state, or a value outside its documented range."""


class RemoteError(FlashNextError):
    """A server cannot be reached, or what it answered cannot be used.  status: of HTTP, 0 without one."""


class Draining(UsageError):
    """A scheduler finishes what it has and takes nothing new."""


class LeakError(FlashNextError):
    """Something opened was not closed.  entries: one text a leak, with its creation site."""

    def __init__(self, what: str, *, entries: tuple[str, ...] = (), because: str = "", do: str = "",
                 **facts: object) -> None:
        self.entries = entries
        super().__init__(what, because=because or "; ".join(entries), do=do, **facts)


class SimError(FlashNextError):
    """The simulator found a fault in a kernel or in the order of driver calls."""


class RaceFound(SimError):
    """Bytes depend on the order of lanes, warps, blocks or streams."""


class OutOfBounds(SimError):
    """A kernel or copy touched bytes outside its span."""


class PoisonRead(SimError):
    """Bytes that nobody wrote reached an output."""


class Deadlock(SimError):
    """Lanes, blocks or streams wait for each other and none can go on."""


def bytes_text(size_bytes: int) -> str:
    """`size_bytes` for people: 512 B, 1.5 KiB, 18.0 GiB."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"


def _shown(value: object) -> str:
    """A fact in one line of bounded length: text that cannot be printed as it is gets escaped."""
    try:
        text = str(value)
    except ValueError:      # Python writes no integer of more than 4300 digits
        return f"<{type(value).__name__} of {value.bit_length()} bits>" if isinstance(value, int) else "<?>"
    if not text.isprintable():
        text = ascii(text)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN - 3]}..."
