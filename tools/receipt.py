#!/usr/bin/env python3
"""Seals results as receipts, checks receipts again, and quotes them.

    python tools/receipt.py make RESULT.json --out tests/receipts/NAME.json [--commit REV]
    python tools/receipt.py verify [FILE ...] [--here] [--json]
    python tools/receipt.py quote FILE ... [--commit REV]

A result is what a measuring program wrote (form 2, without a commit).  `make` gives it the commit whose
sources and measuring client are those that ran: by default HEAD, and then the working tree must be clean;
with --commit that commit's own objects are read, whatever lies in the working tree.  What matches no commit
gets no receipt.  `verify` checks form, commit, images and everything that can be made again from the figures;
--here fails those of other sources too.  `quote` prints a line for a table, and refuses a receipt of other
sources than this tree's (or REV's).  Exit 0 good, 1 refused or wrong, 2 usage.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from flashnext_drv.bench.receipt import (  # noqa: E402
    client_name,
    digest_of,
    is_source,
    package_digest,
    schema_problems,
    source_digest,
)
from flashnext_drv.bench.recheck import figures, recheck  # noqa: E402
from flashnext_drv.errors import BuildError, UsageError  # noqa: E402
from flashnext_drv.kernels import catalog  # noqa: E402

RECEIPTS = ROOT / "tests" / "receipts"


def git(*words: str, root: Path = ROOT, data: bytes | None = None) -> bytes:
    done = subprocess.run(["git", "-C", str(root), *words], input=data, capture_output=True, check=False)
    if done.returncode:
        raise UsageError(f"git {words[0]} failed", because=done.stderr.decode(errors="replace").strip()[:300])
    return done.stdout


def dirty(root: Path = ROOT) -> list[str]:
    """Files that are changed, staged or not known to git and not ignored."""
    return git("status", "--porcelain", root=root).decode().splitlines()


def commit_digest(commit: str, root: Path = ROOT) -> str:
    """source_digest of a commit, from git's objects."""
    return digest_of(_contents(commit, lambda path: path if is_source(path) else None, root))


def commit_client(commit: str, command: str, root: Path = ROOT) -> str:
    """client_digest of a commit and the program that a command begins with."""
    try:
        program = Path(shlex.split(command)[0]).name
    except (ValueError, IndexError) as error:
        raise UsageError("a command names no program", command=command) from error
    return digest_of(_contents(commit, lambda path: client_name(path, program), root))


def _contents(commit: str, named: Callable[[str], str | None], root: Path) -> list[tuple[str, bytes]]:
    """(name, content) of a commit's files that get one."""
    listed = git("ls-tree", "-r", "-z", commit, root=root).decode().split("\0")
    files = [(line.split("\t", 1)[1], line.split()[2]) for line in listed if line]
    wanted = [(name, oid) for path, oid in files if (name := named(path)) is not None]
    raw = git("cat-file", "--batch", root=root, data="".join(f"{oid}\n" for _, oid in wanted).encode())
    contents, at = [], 0
    for path, oid in wanted:
        end = raw.index(b"\n", at)
        name, kind, size = raw[at:end].split()
        if name.decode() != oid or kind != b"blob":
            raise UsageError("git gave another object than asked for", path=path)
        contents.append((path, raw[end + 1 : end + 1 + int(size)]))
        at = end + 2 + int(size)
    return contents


def full_commit(name: str, root: Path = ROOT) -> str:
    return git("rev-parse", "--verify", f"{name}^{{commit}}", root=root).decode().strip()


def seal(result: dict[str, Any], commit: str | None, root: Path = ROOT) -> dict[str, Any]:
    """The result with its commit.  Raises UsageError for every reason not to."""
    if not isinstance(result, dict):
        raise UsageError("a result is a JSON object")
    if "tree" in result:
        raise UsageError("it is a receipt already: a receipt is not moved to another commit")
    if result.get("form", 1) == 1:
        raise UsageError("a result of form 1 does not say which sources ran")
    wrong = [*schema_problems(result), *recheck(result.get("results") or {})]
    if wrong:
        raise UsageError("the result is not in order", because="; ".join(wrong))
    if commit is None:
        changed = dirty(root)
        if changed:
            raise UsageError("the working tree is dirty", because=f"{len(changed)} files, first {changed[0]}",
                             do="commit, or name the commit that ran by --commit")
    name = full_commit(commit or "HEAD", root)
    if commit_digest(name, root) != result["source_digest"]:
        raise UsageError("other sources ran than this commit's", commit=name[:12],
                         do="run again from a clean checkout, or name the commit that ran")
    if commit_client(name, result["command"], root) != result["client_digest"]:
        raise UsageError("another client measured than this commit's", commit=name[:12],
                         do="run again from a clean checkout, or name the commit that ran")
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return result | {"tree": {"commit": name, "sealed": now}}


def here(receipt: dict[str, Any], source: str | None = None) -> bool:
    """Whether a receipt is of these sources: this tree's, or those with the digest `source`."""
    if receipt.get("form", 1) == 1:
        kernels = receipt["kernels"]["source_digest"] == catalog.source_digest()
        return source is None and kernels and receipt["package_digest"] == package_digest()
    return bool(receipt["source_digest"] == (source or source_digest()))


def examine(path: Path, root: Path = ROOT) -> dict[str, Any]:
    """name, problems (in words), here, commit, verdict of one receipt."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return {"name": path.name, "problems": [f"unreadable: {error}"], "here": False}
    problems = schema_problems(found)
    if problems:
        return {"name": path.name, "problems": problems, "here": False}
    tree = found.get("tree")
    if tree is not None:
        try:
            if commit_digest(tree["commit"], root) != found["source_digest"]:
                problems.append(f"commit {tree['commit'][:12]} has other sources")
            if commit_client(tree["commit"], found["command"], root) != found["client_digest"]:
                problems.append(f"commit {tree['commit'][:12]} has another client")
        except UsageError as error:
            problems.append(f"its commit cannot be read: {error}")
    problems += recheck(found["results"]) + _images(found)
    verdict = found["results"].get("verdict")
    return {"name": path.name, "problems": problems, "here": here(found), "form": found.get("form", 1),
            "commit": tree["commit"] if tree else None, "verdict": verdict}


def _images(found: dict[str, Any]) -> list[str]:
    """Images of this tree against those of a receipt of the same kernel sources and compiler."""
    try:
        built = catalog.manifest()
    except BuildError:
        return []
    kernels = found["kernels"]
    mine = (catalog.source_digest(), built.option_digest)
    if (kernels["source_digest"], kernels.get("option_digest")) != mine:
        return []
    images = {image.family: image.sha256 for image in built.images if image.arch == kernels["arch"]}
    return [f"image {family} differs from the one built here" for family, sha in kernels["cubins"].items()
            if images.get(family, sha) != sha]


def quoted(path: Path, commit: str | None) -> str:
    """A line for a table.  Raises UsageError for a receipt of other sources or one that is not in order."""
    state = examine(path)
    if state["problems"]:
        raise UsageError(f"{path.name} is not in order", because="; ".join(state["problems"]))
    found = json.loads(path.read_text(encoding="utf-8"))
    source = commit_digest(full_commit(commit)) if commit else None
    if not here(found, source):
        raise UsageError(f"{path.name} is of other sources", commit=str(state["commit"] or "not named")[:12],
                         do="measure again, or quote it under its own commit by --commit")
    results = found["results"]
    verdict = results.get("verdict")
    if verdict is not None and not verdict["qualified"]:
        raise UsageError(f"{path.name} is not qualified", because="; ".join(verdict["reasons"])[:400])
    link = f"[{path.stem}](tests/receipts/{path.name})"
    if results.get("kind") not in ("workload", "scaled"):
        return f"| {results.get('kind', path.stem)} | {found['device']['name']} | {link} |"
    return "\n".join(
        f"| {results['kind']} {leg} | TTFT {_told(at['ttft_s'], 3)} s, prefill "
        f"{_told(at['prefill_tokens_per_s'], 0)} tokens/s, decode {_told(at['decode_tokens_per_s'], 1)} "
        f"tokens/s, ITL {_told(at['itl_mean_ms'], 2)} ms (p50 {_told(at['itl_p50_ms'], 2)}, p95 "
        f"{_told(at['itl_p95_ms'], 2)}) | {link} |"
        for leg, at in figures(results).items())


def _told(value: float | None, digits: int) -> str:
    """A figure that its stamps do not give is a dash."""
    return "-" if value is None else f"{value:.{digits}f}"


def verify(files: list[Path], must_be_here: bool, as_json: bool) -> int:
    states = [examine(path) for path in files or sorted(RECEIPTS.glob("*.json"))]
    bad = [s for s in states if s["problems"] or (must_be_here and not s["here"])]
    if as_json:
        print(json.dumps({"ok": not bad, "receipts": states}, indent=1))
        return 1 if bad else 0
    for state in states:
        commit = str(state.get("commit") or "no commit")[:12]
        tree = "this tree" if state["here"] else f"other sources ({commit})"
        verdict = state.get("verdict")
        said = "" if verdict is None else ", qualified" if verdict["qualified"] else ", NOT qualified"
        print(f"{'BAD ' if state['problems'] else 'ok  '} {state['name']}: {tree}{said}"
              + "".join(f"\n       {each}" for each in state["problems"]))
    print(f"{len(states)} receipts, {len(bad)} {'wrong or of other sources' if must_be_here else 'wrong'}")
    return 1 if bad else 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sub = parser.add_subparsers(dest="what", required=True)
    make = sub.add_parser("make", help="seal a result")
    make.add_argument("result", type=Path)
    make.add_argument("--out", type=Path, required=True)
    make.add_argument("--commit")
    check = sub.add_parser("verify", help="check receipts, by default all committed ones")
    check.add_argument("files", nargs="*", type=Path)
    check.add_argument("--here", action="store_true", help="fail receipts of other sources")
    check.add_argument("--json", action="store_true")
    quote = sub.add_parser("quote", help="lines for a table")
    quote.add_argument("files", nargs="+", type=Path)
    quote.add_argument("--commit", help="quote under this commit's sources instead of this tree's")
    args = parser.parse_args(argv)
    try:
        if args.what == "verify":
            return verify(args.files, args.here, args.json)
        if args.what == "quote":
            print("\n".join(quoted(path, args.commit) for path in args.files))
            return 0
        try:
            result = json.loads(args.result.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UsageError("the result cannot be read", file=args.result, because=str(error)) from error
        made = seal(result, args.commit)
        try:
            args.out.write_text(json.dumps(made, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        except OSError as error:
            raise UsageError("the receipt cannot be written", file=args.out, because=str(error)) from error
        print(f"{args.out}: commit {made['tree']['commit'][:12]}")
    except UsageError as error:
        print(f"receipt: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
