"""A plan: bytes by owner and tier of a rank that has not been opened, and whether they fit.

Made by engine/plan.py.  What must stay true: owners and bytes are the ledger's after open; what is judged is
the sum of them against memory less every reserve, so a plan that fits leaves the reserves free.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ..errors import CapacityError, bytes_text
from .layout import Limits

__all__ = ["Plan", "device_allowed", "device_reserves", "host_allowed"]

Nearest = Callable[[], Sequence[str]]


def device_reserves(limits: Limits) -> int:
    """Device bytes that stay free for the caller: the server's, and the experts' where they are offloaded."""
    return limits.server_reserve_bytes + (
        limits.expert_reserve_bytes if limits.expert_lines is not None else 0
    )


def device_allowed(free_bytes: int, limits: Limits) -> int:
    """Device bytes that a plan may take; below 0 when the reserves alone are more than there is.

    free_bytes: free before any of the plan was allocated.
    """
    free = max(free_bytes - limits.reserve_bytes, 0)
    reserves = device_reserves(limits)
    if not limits.device_bytes:
        return free - reserves
    if not reserves:  # the caller's word counts, the driver has the last one
        return limits.device_bytes
    return min(limits.device_bytes, free) - reserves


def host_allowed(available_bytes: int | None, limits: Limits) -> int | None:
    """Host bytes that a plan may take; None when nobody can tell.

    available_bytes: what the system reports, None where it reports nothing.
    """
    given = limits.host_bytes or None
    if available_bytes is None:
        return given
    margin = available_bytes - limits.host_reserve_bytes
    return margin if given is None else min(given, margin)


@dataclass(frozen=True)
class Plan:
    """Bytes by owner and tier, before anything is allocated.

    device, pinned, host: what the ledger shows after open.  opening: pinned bytes by owner that are there
    only while the rank opens.  lines, lines_requested: device lines a layer, given and asked for; both the
    number of experts where all are resident.  line_bytes: of one line in every layer together.  pages: of 64
    tokens.  deep_rows: rows of a deep chunk, 0 without the deep pass.  ring: banks and lines of each, (0, 0)
    without a ring.
    """

    device: Mapping[str, int]
    pinned: Mapping[str, int]
    host: Mapping[str, int] = field(default_factory=dict)
    opening: Mapping[str, int] = field(default_factory=dict)
    lines: int = 0
    lines_requested: int = 0
    line_bytes: int = 0
    pages: int = 0
    deep_rows: int = 0
    ring: tuple[int, int] = (0, 0)

    @property
    def device_bytes(self) -> int:
        return sum(self.device.values())

    @property
    def host_bytes(self) -> int:
        """Most host bytes at one time, pinned and plain."""
        return sum(sum(tier.values()) for tier in (self.pinned, self.host, self.opening))

    def room(self, free_bytes: int, limits: Limits) -> int:
        """Device bytes that the limits leave beside this plan; below 0 when it does not fit.

        free_bytes: free before any of the plan was allocated.
        """
        return device_allowed(free_bytes, limits) - self.device_bytes

    def fits(self, free_bytes: int | None, limits: Limits, available_bytes: int | None = None) -> bool:
        """Whether `require_fits` would pass; memory that is not known is not judged."""
        allowed = host_allowed(available_bytes, limits)
        return (free_bytes is None or self.room(free_bytes, limits) >= 0) and (
            allowed is None or self.host_bytes <= allowed
        )

    def require_fits(
        self,
        free_bytes: int,
        limits: Limits,
        available_bytes: int | None = None,
        nearest: Nearest | None = None,
    ) -> None:
        """Raises CapacityError, naming the largest owner, when device or host memory does not hold the plan.

        available_bytes: host memory that the system reports, None to judge Limits.host_bytes alone.
        nearest: asked for settings that would fit when these do not.
        """
        self._require_device(free_bytes, limits, nearest)
        allowed = host_allowed(available_bytes, limits)
        if allowed is None or self.host_bytes <= allowed:
            return
        given = (
            f"Limits.host_bytes allows {bytes_text(allowed)}"
            if allowed == limits.host_bytes
            else f"{bytes_text(available_bytes or 0)} are available, of which "
            f"{bytes_text(limits.host_reserve_bytes)} stay in reserve"
        )
        raise CapacityError(
            "the plan does not fit host memory",
            needed_bytes=self.host_bytes,
            allowed_bytes=max(allowed, 0),
            because=f"{given}; largest owner {_largest({**self.host, **self.opening, **self.pinned})}",
            do=_advice(nearest, "use a machine with more host memory"),
        )

    def _require_device(self, free_bytes: int, limits: Limits, nearest: Nearest | None) -> None:
        need, allowed = self.device_bytes, device_allowed(free_bytes, limits)
        if need <= allowed:
            return
        reserves = device_reserves(limits)
        if limits.device_bytes and allowed + reserves == limits.device_bytes:
            given = f"Limits.device_bytes allows {bytes_text(limits.device_bytes)}"
        else:
            given = (
                f"{bytes_text(free_bytes)} are free, of which {bytes_text(limits.reserve_bytes)} stay in "
                "reserve"
            )
        if reserves:
            given += f", and {bytes_text(reserves)} are reserved for experts and server"
        what = "the plan does not fit device memory" if allowed >= 0 else "the reserves exceed device memory"
        raise CapacityError(
            what,
            needed_bytes=need,
            allowed_bytes=max(allowed, 0),
            because=f"{given}; largest owner {_largest(self.device)}, "
            f"kv {bytes_text(self.device.get('kv', 0))}",
            do=_advice(
                nearest, "lower context_tokens, sequences or rows, or use a device with more memory"
            ),
        )


def _largest(owners: Mapping[str, int]) -> str:
    owner = max(owners, key=lambda name: owners[name])
    return f"{owner} {bytes_text(owners[owner])}"


def _advice(nearest: Nearest | None, otherwise: str) -> str:
    found = list(nearest()) if nearest is not None else []
    return "; ".join(found) if found else otherwise
