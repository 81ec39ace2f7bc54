#!/usr/bin/env python3
"""Counts the raw log of `flashnext-drv check --log FILE` again and compares with its SUMMARY.

    python tools/audit_check.py FILE

Shares no code with the package, reads nothing but the log.  Exit 0 when the log ends with a SUMMARY that says
what the lines say and nothing failed or was missed; 1 when it says otherwise, when something failed, or when
there is no SUMMARY.
"""

import json
import re
import sys

SUMMARY = re.compile(
    r"SUMMARY (\d+) kernels: (\d+) pass, (\d+) fail, 0 known; (\d+) controls: (\d+) red, (\d+) missed"
)


def audit(lines):
    """(complaints, counted six numbers or None) of a log's lines."""
    complaints = []
    try:
        records = [json.loads(line) for line in lines if line.strip()]
    except ValueError as error:
        return [f"a line is no JSON: {error}"], None
    if not records or records[0].get("kind") != "begin":
        return ["the log does not begin"], None
    if [r.get("kind") for r in records].count("begin") != 1:
        complaints.append("the log begins more than once")
    due, stages = records[0]["kernels"], records[0]["stages"]
    bad, seen, verdict = set(), {}, {}
    for record in records[1:]:
        kind = record.get("kind")
        if kind == "stage":
            if record["kernel"] not in due:
                complaints.append(f"{record['kernel']} was not due")
            seen.setdefault(record["kernel"], {}).setdefault(record["stage"], []).append(record["ok"] is True)
            if record["exempt"] and not record["text"]:
                complaints.append(f"{record['kernel']}: {record['stage']} is exempt without a reason")
        elif kind == "accumulate":
            if not record["factor"] > 1.0:
                bad.add(record["kernel"])
        elif kind == "control":
            key = (record["kernel"], record["control"])
            if key in verdict:
                complaints.append(f"{key[0]}/{key[1]} has two verdicts")
            if record["red"] and not record["stage"]:
                complaints.append(f"{key[0]}/{key[1]} is red by no stage")
            verdict[key] = record
        elif kind != "end":
            complaints.append(f"a record of unknown kind {kind!r}")
    for name in due:
        of_kernel = seen.get(name, {})
        if any(stage not in of_kernel for stage in stages) or not all(all(oks) for oks in of_kernel.values()):
            bad.add(name)
    wanted = [tuple(pair) for pair in records[0]["controls"]]
    for key in verdict:
        if key not in wanted:
            complaints.append(f"{key[0]}/{key[1]} was not due")
    run = [key for key in wanted if verdict.get(key, {}).get("stage") not in ("racecheck", "hopper")]
    red = [key for key in run if verdict.get(key, {}).get("red") is True]
    counted = (len(due), len(due) - len(bad), len(bad), len(run), len(red), len(run) - len(red))
    end = [r for r in records if r.get("kind") == "end"]
    if len(end) != 1 or records[-1].get("kind") != "end":
        complaints.append("the log has no end: no result")
        return complaints, counted
    said = SUMMARY.fullmatch(end[0]["summary"])
    if said is None:
        complaints.append(f"the SUMMARY has another form: {end[0]['summary']}")
    elif tuple(int(n) for n in said.groups()) != counted:
        complaints.append(f"the SUMMARY says {end[0]['summary']!r}, the lines say {counted}")
    return complaints, counted


def main(argv):
    if len(argv) != 1:
        print(__doc__.strip().splitlines()[2].strip(), file=sys.stderr)
        return 2
    with open(argv[0], encoding="utf-8") as file:
        complaints, counted = audit(file.read().splitlines())
    for one in complaints:
        print(f"audit: {one}")
    if counted is None:
        return 1
    print("audit: {} kernels: {} pass, {} fail; {} controls: {} red, {} missed".format(*counted))
    return 1 if complaints or counted[2] or counted[5] or not counted[0] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
