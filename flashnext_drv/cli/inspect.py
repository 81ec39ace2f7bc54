"""`flashnext-drv inspect PACK`: what a pack holds, whether the engine can use it, and whether its bytes are
the ones its manifest tells of.

Registered by cli; reads files only, needs no device.  Errors leave as CheckpointError, but a pack that
differs from its manifest is a failed check: exit 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any, Final

from ..errors import CheckpointError, bytes_text
from ..model.inventory import GROUPS, group_of
from ..model.manifest import MANIFEST_NAME, Manifest
from ..model.pack import Pack

__all__ = ["add_parser", "run"]

_TOKENIZER: Final = "tokenizer.json"
_TEXT_FILES: Final = (_TOKENIZER, "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
_NO_TEXT: Final = "no tokenizer: token ids only"
_FLOATS: Final = {"F16": 16.0, "BF16": 16.0, "F32": 32.0}
_DIFFERENCES: Final = frozenset(("changed", "added", "dropped", "renamed"))


def add_parser(sub: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb to the command line."""
    parser = sub.add_parser("inspect", help="show what a pack holds and check it")
    parser.add_argument("pack", type=Path, nargs="?", metavar="PACK",
                        help="folder with config.json and *.safetensors (FLASHNEXT_DRV_PACK)")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="read every byte and compare with the manifest (PACK/manifest.json or --manifest)",
    )
    parser.add_argument("--manifest", type=Path, metavar="FILE", help="the manifest to compare with")
    parser.add_argument(
        "--save-manifest", type=Path, metavar="FILE", help="write the pack's manifest to FILE"
    )
    parser.add_argument(
        "--tensors", action="store_true", help="list every tensor: bits of a weight, type, shape, bytes, file"
    )
    parser.add_argument("--no-digest", action="store_true", help="do not hash the files")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the report.  Returns 0, or 1 when the pack differs from its manifest."""
    args.pack = Path(args.pack)
    found: dict[str, Any] = {}
    if not args.no_digest or args.verify or args.save_manifest:
        try:
            found = _hash(args)
        except CheckpointError as error:
            if not _DIFFERENCES & set(error.facts):
                raise
            print(json.dumps({"folder": str(args.pack), "manifest": str(error)}) if args.json else error)
            return 1
    pack = Pack.open(args.pack)
    pack.check()
    report = _report(pack) | ({"listing": _listing(pack)} if args.tensors else {}) | found
    print(json.dumps(report, indent=1) if args.json else _text(report))
    return 0


def _hash(args: argparse.Namespace) -> dict[str, Any]:
    """Digest of the files, compared with the manifest where there is one; CheckpointError when it differs."""
    made = Manifest.of(
        args.pack, use_cache=not args.verify, progress=_progress if sys.stderr.isatty() else None
    )
    found: dict[str, Any] = {"digest": made.digest, "pack_bytes": made.size}
    known = args.manifest or args.pack / MANIFEST_NAME
    if args.save_manifest:
        made.save(args.save_manifest)
    elif args.manifest or known.exists():
        Manifest.load(known).compare(made, str(args.pack))
        found["manifest"] = "equal"
    elif args.verify:
        raise CheckpointError(
            "there is no manifest to verify against",
            folder=str(args.pack),
            do="give one with --manifest, or make one with --save-manifest",
        )
    return found


def _report(pack: Pack) -> dict[str, Any]:
    """Everything but hashes, as plain data."""
    size, count = Counter[str](), Counter[str]()
    weights, bits = Counter[str](), dict.fromkeys(GROUPS, 0.0)  # of EXL3 linears
    widths: dict[str, Counter[str]] = {}
    for tensor in pack.tensors.values():
        group = group_of(tensor.name)
        size[group] += tensor.size
        count[group] += 1
        if tensor.name.endswith(".trellis") and len(tensor.shape) == 3:
            linear = pack.linear(tensor.name.removesuffix(".trellis"))
            widths.setdefault(group, Counter())[f"{linear.bits:g} {linear.codebook}"] += 1
            weights[group] += linear.k * linear.n
            bits[group] += linear.bits * linear.k * linear.n
    table = pack.ngram()
    c = pack.config
    return {
        "folder": str(pack.folder),
        "files": len(pack.files),
        "tensors": len(pack.tensors),
        "model": {
            "layers": c.n_layers,
            "hidden": c.hidden,
            "vocab": c.vocab,
            "experts": c.n_experts,
            "experts_a_token": c.n_active,
            "mtp": pack.has_mtp,
        },
        "groups": {
            g: {
                "tensors": count[g],
                "bytes": size[g],
                "linears": dict(sorted(widths.get(g, {}).items())),
                "bits": round(bits[g] / weights[g], 4) if weights[g] else None,
            }
            for g in GROUPS
            if count[g]
        },
        "bits": round(sum(bits.values()) / weights.total(), 4) if weights else None,
        "ngram": {
            "rows": table.rows,
            "row_bytes": table.row_bytes,
            "codec": table.codec,
            "pieces": len(table.sources),
        },
        "text": {name: (pack.folder / name).is_file() for name in _TEXT_FILES},
        "remarks": pack.remarks,
    }


def _listing(pack: Pack) -> list[dict[str, Any]]:
    """Every tensor by name.  bits, codebook: of a weight, told at the trellis of an EXL3 linear; bits of a
    value at n-gram rows and for floating point; None for the rest."""
    listed, codec = [], pack.ngram().codec
    for name in sorted(pack.tensors):
        tensor, bits, codebook = pack.tensors[name], _FLOATS.get(pack.tensors[name].dtype), ""
        if name.endswith(".trellis") and len(tensor.shape) == 3:
            linear = pack.linear(name.removesuffix(".trellis"))
            bits, codebook = linear.bits, linear.codebook
        elif name.endswith(".trellis") and not isinstance(codec, str):
            bits = float(codec)
        listed.append({"name": name, "bits": bits, "codebook": codebook, "dtype": tensor.dtype,
                       "shape": list(tensor.shape), "bytes": tensor.size, "file": tensor.file.name})
    return listed


def _text(report: dict[str, Any]) -> str:
    model, table = report["model"], report["ngram"]
    codec = table["codec"] if isinstance(table["codec"], str) else f"{table['codec']} bits"
    lines = [
        f"{report['folder']}: {report['tensors']} tensors in {report['files']} files",
        f"model    {model['layers']} layers, hidden {model['hidden']}, vocabulary {model['vocab']}, "
        f"{model['experts_a_token']} of {model['experts']} experts, MTP head: {model['mtp']}",
        f"n-grams  {table['rows']} rows of {table['row_bytes']} B, {codec}, in {table['pieces']} pieces",
        f"text     {', '.join(name for name in report['text'] if report['text'][name])}"
        if report["text"][_TOKENIZER] else f"text     {_NO_TEXT}",
        "",
        f"{'group':<10} {'tensors':>8} {'bytes':>16} {'bits':>7}  linears by width and codebook",
    ]
    for name, group in report["groups"].items():
        linears = ", ".join(f"{n} x {width}" for width, n in group["linears"].items())
        width = "" if group["bits"] is None else f"{group['bits']:.4g}"
        lines.append(f"{name:<10} {group['tensors']:>8} {group['bytes']:>16} {width:>7}  {linears}".rstrip())
    total = sum(group["bytes"] for group in report["groups"].values())
    mean = "" if report["bits"] is None else f", {report['bits']:.4g} bits a weight of its EXL3 linears"
    lines += ["", f"all tensors {total} B ({bytes_text(total)}){mean}"]
    if "digest" in report:
        lines.append(f"sha-256 over the file list {report['digest']} ({report['pack_bytes']} B)")
    if "manifest" in report:
        lines.append(f"manifest: {report['manifest']}")
    lines += [f"remark: {remark}" for remark in report["remarks"]]
    for one in report.get("listing", ()):
        shape = "x".join(map(str, one["shape"]))
        bits = "" if one["bits"] is None else f"{one['bits']:g} {one['codebook']}".rstrip()
        where = f"{one['file']}  {one['name']}"
        lines.append(f"{bits:<9} {one['dtype']:<5} {shape:<16} {one['bytes']:>12}  {where}")
    return "\n".join(lines)


def _progress(name: str, done: int, of: int) -> None:
    print(
        f"\rhashed {done} of {of} files: {name:<50.50}",
        end="\n" if done == of else "",
        file=sys.stderr,
        flush=True,
    )
