"""`flashnext-drv serve` as a process: it drains on a signal, stops hard on the second, refuses to be open."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import HTTPError

import pytest

from .served import events_of

ROOT = Path(__file__).resolve().parents[2]
SERVE = [sys.executable, "-m", "flashnext_drv", "serve"]
SMALL = ["--context", "4000", "--max-streams", "2", "--no-deep", "--steps-ahead", "1"]


@contextmanager
def process(pack: Path, device: str, *more: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and its address, once it is ready."""
    command = [*SERVE, str(pack), "--device", device, "--port", "0", *SMALL, *more]
    made = subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert made.stdout is not None
        said = made.stdout.readline()
        assert said.startswith("listening on http://127.0.0.1:"), made.communicate()[1]
        assert made.stdout.readline().startswith("ready: "), made.communicate()[1]
        yield made, said.split()[2].rstrip(",")
    finally:
        made.kill()
        made.wait()


def post(url: str, n_new: int) -> urllib.request.Request:
    body = json.dumps({"ids": [1, 2], "max_new_tokens": n_new, "ignore_eos": True, "stream": True}).encode()
    return urllib.request.Request(f"{url}/v1/generate", body, {"Content-Type": "application/json"})


def test_a_signal_drains_and_the_process_ends_well(text_pack: Path, device_name: str) -> None:
    with process(text_pack, device_name) as (served, url), urllib.request.urlopen(post(url, 24)) as stream:
        first = stream.readline()
        served.send_signal(signal.SIGTERM)
        refused = 0
        while not refused:  # the signal is on its way
            try:
                urllib.request.urlopen(f"{url}/ready").close()
                time.sleep(0.01)
            except HTTPError as error:
                refused, said = error.code, json.load(error)
        assert refused == 503 and said["state"] == "draining"
        with pytest.raises(HTTPError) as late:
            urllib.request.urlopen(post(url, 1))
        assert late.value.code == 503 and late.value.headers["retry-after"]
        *events, done = events_of(first + stream.read())
        assert done == "[DONE]" and sum(len(event["tokens"]) for event in events) == 24
        assert events[-1]["finish_reason"] == "length"
        _, log = served.communicate(timeout=30)
        assert served.returncode == 0, log
        assert "Traceback" not in log
        lines = [json.loads(line) for line in log.splitlines()]
        assert [line["event"] for line in lines if line["event"] != "request"][-2:] == ["draining", "closed"]


def test_the_second_signal_stops_what_is_left(text_pack: Path, device_name: str) -> None:
    with process(text_pack, device_name) as (served, url), urllib.request.urlopen(post(url, 3900)) as stream:
        first = stream.readline()
        served.send_signal(signal.SIGINT)
        time.sleep(0.4)
        assert served.poll() is None
        served.send_signal(signal.SIGINT)
        events = events_of(first + stream.read())
        assert events[-1]["error"]["code"] == "server_stopping"
        assert len(events) < 3000
        _, log = served.communicate(timeout=30)
        assert served.returncode == 130 and "Traceback" not in log, log


@pytest.mark.parametrize(
    ("more", "said"),
    (
        (["--host", "0.0.0.0"], "without API keys only this machine is served"),
        (["--api-keys", "/nowhere/keys"], "the file of API keys cannot be read"),
        (["--max-streams", "99"], "--max-streams"),
        (["--max-connections", "0"], "--max-connections"),
        (["--round-rows", "0"], "--round-rows"),
        (["--stall-seconds", "nan"], "--stall-seconds"),
        (["--serial"], "--prompt-rows 1"),
        (["--context", "5000"], "the model's positions"),
        (["--add-key", "x"], "--add-key needs --api-keys"),
    ),
    ids=("open", "no-file", "streams", "connections", "rows", "nan", "serial", "context", "add-key"),
)
def test_it_does_not_start_like_that(
    text_pack: Path, more: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from flashnext_drv.__main__ import main

    assert main(["serve", str(text_pack), "--port", "0", *more]) == 2
    assert said in capsys.readouterr().err
