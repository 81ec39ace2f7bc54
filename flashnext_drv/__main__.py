"""`flashnext-drv` and `python -m flashnext_drv`: parse, run one command, turn its error into an exit code.

The only reader of FLASHNEXT_DRV_DEVICE (default of --device) and FLASHNEXT_DRV_PACK (default of PACK).  Exit
codes: 0 good, 1 check failed, 2 usage, 3 something missing, 4 capacity.  What must stay true: an error of our
tree ends as one line on stderr; any other is a bug and keeps its traceback.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from . import __version__
from .cli import COMMANDS
from .cli.report import FAILED, INTERRUPTED, exit_code
from .errors import FlashNextError, UsageError

__all__ = ["main", "make_parser"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code.  argv: by default the process's arguments."""
    parser, modules = make_parser()
    args = parser.parse_args(argv)
    try:
        _fill_defaults(args)
        code: int = modules[args.command].run(args)
    except FlashNextError as error:
        print(f"flashnext-drv {args.command}: {error}", file=sys.stderr)
        return exit_code(error)
    except BaseExceptionGroup as group:
        ours, other = group.split(FlashNextError)
        if other is not None:
            raise
        for one in ours.exceptions if ours is not None else ():
            print(f"flashnext-drv {args.command}: {one}", file=sys.stderr)
        return exit_code(group)
    except BrokenPipeError:  # the reader of stdout left; nothing more can be said there
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except KeyboardInterrupt:
        print(f"flashnext-drv {args.command}: interrupted", file=sys.stderr)
        return INTERRUPTED
    return code


def make_parser() -> tuple[argparse.ArgumentParser, dict[str, ModuleType]]:
    """The parser, and each command's module."""
    parser = argparse.ArgumentParser(
        prog="flashnext-drv",
        description="Exact inference for Flash-Next EXL3 packs, on a GPU or in its simulator.",
        epilog="exit codes: 0 good, 1 check failed, 2 usage, 3 something missing, 4 capacity",
    )
    parser.add_argument("--version", action="version", version=f"flashnext_drv {__version__}")
    sub = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    modules = {name: importlib.import_module(f".cli.{name}", __package__) for name in COMMANDS}
    for module in modules.values():
        module.add_parser(sub)
    return parser, modules


def _fill_defaults(args: argparse.Namespace) -> None:
    if "device" in args and args.device is None:
        args.device = os.environ.get("FLASHNEXT_DRV_DEVICE") or "auto"
        if args.device not in ("auto", "cuda", "sim"):
            raise UsageError("FLASHNEXT_DRV_DEVICE is unknown", value=args.device, do="use auto, cuda or sim")
    if "pack" in args and args.pack is None and not getattr(args, "diff", None):
        args.pack = os.environ.get("FLASHNEXT_DRV_PACK") or None
        if args.pack is None:
            raise UsageError("no pack was named", do="give PACK, or set FLASHNEXT_DRV_PACK")


if __name__ == "__main__":
    sys.exit(main())
