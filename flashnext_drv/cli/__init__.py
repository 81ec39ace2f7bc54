"""The commands of `flashnext-drv`, one module each: `add_parser(sub)` declares, `run(args) -> int` does it.

Called by __main__.py, which parses, fills in the two environment defaults and turns errors into exit codes.
What must stay true: a result goes to stdout, everything else to stderr; importing a command loads no driver.
"""

from __future__ import annotations

from typing import Final

__all__ = ["COMMANDS"]

COMMANDS: Final = (
    "doctor", "inspect", "plan", "synth", "generate", "logits", "serve", "chat",
    "bench", "check", "records", "trace",
)
