"""Clients that leave, stall, ask too much or send rubbish: each is answered or dropped, and nothing stays."""

from __future__ import annotations

import json
import random
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from flashnext_drv.errors import UsageError
from flashnext_drv.server import app as app_module
from flashnext_drv.server.keys import Keys, add_key, key_digest
from flashnext_drv.server.live import Server
from flashnext_drv.server.metrics import Metrics

from .served import LIMITS, MAX_QUEUE, Served, events_of, serving

LONG = 1900  # tokens that nobody waits for


def open_stream(served: Served, ids: list[int], n_new: int, **more: Any) -> socket.socket:
    """A connection whose stream has been asked for and not read."""
    body = json.dumps(
        {"ids": ids, "max_new_tokens": n_new, "ignore_eos": True, "stream": True, **more}
    ).encode()
    made = socket.create_connection((served.server.host, served.server.port), timeout=60)
    made.sendall(
        b"POST /v1/generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % len(body) + body
    )
    return made


def read_to(stream: socket.socket, mark: bytes) -> bytes:
    raw = b""
    while mark not in raw:
        piece = stream.recv(65536)
        assert piece, raw[-300:]
        raw += piece
    return raw


def test_clients_that_leave_cost_a_step_in_every_phase(served: Served) -> None:
    before = served.settled()
    alone = served.solo([1, 2, 3], 4).tokens
    # Decoding: it leaves after its first tokens.
    stream = open_stream(served, [1, 2, 3], LONG)
    read_to(stream, b'"tokens"')
    stream.close()
    assert served.settled().finished.get("cancelled", 0) == before.finished.get("cancelled", 0) + 1
    # In its prompt, which takes longer than this.
    stream = open_stream(served, list(range(100)), 4, return_progress=True)
    read_to(stream, b"prompt_progress")
    stream.close()
    assert served.settled().finished["cancelled"] == before.finished.get("cancelled", 0) + 2
    # In the queue, behind as many as may run.
    running = [open_stream(served, [i], LONG) for i in range(served.worker.max_streams)]
    served.until(lambda stats: stats.decoding + stats.prompting == served.worker.max_streams)
    waiting = open_stream(served, [9], 4)
    served.until(lambda stats: stats.queued == 1)
    waiting.close()
    served.until(lambda stats: stats.queued == 0)
    for stream in running:
        stream.close()
    after = served.settled()
    assert after.finished["cancelled"] == before.finished.get("cancelled", 0) + 3 + len(running)
    assert (after.free_slots, after.free_pages) == (before.free_slots, before.free_pages)
    assert served.generate([1, 2, 3], 4)["tokens"] == alone


def test_a_full_queue_is_429_and_a_cancel_by_id_ends_a_stream(served: Served) -> None:
    before = served.settled()
    streams = [open_stream(served, [i], LONG) for i in range(served.worker.max_streams + MAX_QUEUE)]
    served.until(lambda stats: stats.queued == MAX_QUEUE)
    refused = served.ask("POST", "/v1/generate", {"ids": [1], "max_new_tokens": 1})
    assert refused.status == 429 and int(refused.headers["retry-after"]) >= 1
    assert refused.error()["type"] == "rate_limit_error" and refused.error()["code"] == "queue_full"
    assert served.worker.stats().refused == before.refused + 1
    live = served.ask("GET", "/status").json()
    assert live["queued"] == MAX_QUEUE and len(live["requests"]) == len(streams)
    victim = next(each for each in live["requests"] if each["state"] == "queued")
    assert served.ask("POST", "/v1/cancel", {"id": victim["id"]}).json()["cancelled"] is True
    assert served.ask("POST", "/v1/cancel", {"id": "gen-0"}).json()["cancelled"] is False
    served.until(lambda stats: stats.queued == MAX_QUEUE - 1)
    for each in served.ask("GET", "/status").json()["requests"]:
        served.ask("POST", "/v1/cancel", {"id": each["request_id"]})
    ends = []
    for stream in streams:
        with stream:
            ends.append(read_to(stream, b"[DONE]"))
    assert all(b'"finish_reason":"cancelled"' in end for end in ends)
    assert served.settled().finished["cancelled"] >= before.finished.get("cancelled", 0) + len(streams)


def test_a_slow_reader_holds_up_nobody(served: Served) -> None:
    ids, n_new = [4, 4, 4], 24
    served.server._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    alone = served.solo(ids, n_new).tokens
    body = json.dumps(
        {"ids": ids, "max_new_tokens": n_new, "ignore_eos": True, "stream": True, "logprobs": 20}
    )
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    slow.connect((served.server.host, served.server.port))
    slow.settimeout(60)
    slow.sendall(
        b"POST /v1/generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%s" % (len(body), body.encode())
    )
    other = served.generate([8, 8], 4)["tokens"]
    assert other == served.solo([8, 8], 4).tokens
    served.settled()  # all of it is drawn, and none of it was read
    raw = b""
    while b"[DONE]" not in raw:
        raw += slow.recv(512)
    slow.close()
    text = b"".join(part for part in chunked(raw.partition(b"\r\n\r\n")[2]))
    events = events_of(text)
    assert sum((event["tokens"] for event in events[:-1]), []) == alone


def chunked(raw: bytes) -> list[bytes]:
    """Bodies of HTTP chunks, as far as they are there."""
    found = []
    while raw:
        size, _, raw = raw.partition(b"\r\n")
        found.append(raw[: int(size, 16)])
        raw = raw[int(size, 16) + 2 :]
    return found


def mangled(random: random.Random, served: Served) -> tuple[str, bytes, dict[str, str]]:
    """Path, body and headers of a request that cannot be right."""
    good: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
        "/v1/completions": {"prompt": [1, 2], "max_tokens": 1},
        "/v1/generate": {"ids": [1, 2], "max_new_tokens": 1},
        "/tokenize": {"prompt": "x"},
        "/detokenize": {"tokens": [1]},
    }
    path = random.choice(list(good))
    body, headers = json.loads(json.dumps(good[path])), {}
    rubbish: list[Any] = [
        -1,
        1 << 70,
        1.5,
        "\ud800",
        [],
        {},
        [[1]],
        "",
        True,
        [None],
        {"a": {}},
        1e300,
        [2.5],
    ]
    kind = random.randrange(8)
    if kind == 0:  # bytes that are no JSON
        raw = bytearray(json.dumps(body).encode())
        for _ in range(random.randrange(1, 4)):
            raw[random.randrange(len(raw))] = random.choice(b"\x00\xff{[,\x80")
        raw += b"{"
        return path, bytes(raw), headers
    if kind == 1:
        raw = json.dumps(body).encode()
        return path, raw[: random.randrange(len(raw))], headers
    if kind == 2:
        return path, json.dumps(random.choice([None, 1, "x", [body], True, [], 1.5])).encode(), headers
    if kind == 3:
        deep = random.choice([100, 900, 990, 100000])
        return path, b'{"prompt": %s1%s, "max_tokens": 1}' % (b"[" * deep, b"]" * deep), headers
    if kind == 4:
        return path, json.dumps(body).encode(), {"Content-Type": random.choice(["text/plain", "image/png"])}
    if kind == 5:
        body[random.choice(["tempurature", "x" * 500, "\u0000", "стоп", "n_", "ids2"])] = random.choice(
            rubbish
        )
    elif kind == 6:
        name = random.choice(list(good[path])[:1])
        body[name] = random.choice([-1, 1.5, {}, [[[1]]], [None], {"a": {}}, [2.5], [True], [-7], [1 << 70]])
    else:
        if path.startswith("/v1"):
            body[random.choice(["temperature", "top_p", "min_p"])] = random.choice(
                [-1, "hot", [], {}, 1e300, True]
            )
        else:
            body["model"] = random.choice(["gpt-9", 7, [], {"x": 1}])
    return path, json.dumps(body).encode(), headers


def test_two_hundred_mangled_requests_are_refused_in_form(served: Served) -> None:
    before = served.settled()
    connection = served.connection()
    for seed in range(200):
        path, body, headers = mangled(random.Random(seed), served)
        connection.request("POST", path, body, {"Content-Type": "application/json", **headers})
        response = connection.getresponse()
        raw = response.read()
        place = f"seed {seed}: POST {path} {body[:120]!r} -> {response.status} {raw[:200]!r}"
        assert 400 <= response.status < 500, place
        error = json.loads(raw)["error"]
        assert error["message"] and error["type"] and set(error) == {"message", "type", "param", "code"}, (
            place
        )
    connection.close()
    assert served.worker.stats().submitted == before.submitted
    assert served.ask("GET", "/health?deep=1").json()["status"] == "ok"
    assert not [line for line in served.log if line.get("status") == 500 and line["request_id"] != "mine-8"]


@pytest.mark.parametrize(
    "raw",
    (
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"GET\r\n\r\n",
        b"POST /v1/generate HTTP/1.1\r\nContent-Length: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nA: " + b"b" * 70000 + b"\r\n\r\n",
    ),
    ids=("tls", "no-target", "length", "headers"),
)
def test_what_is_no_http_is_answered_in_form(served: Served, raw: bytes) -> None:
    with socket.create_connection((served.server.host, served.server.port), timeout=30) as bare:
        bare.sendall(raw)
        head, _, body = read_to(bare, b"}}").partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ") and json.loads(body)["error"]["code"] == "bad_http"


def test_routes_methods_types_and_sizes(served: Served) -> None:
    assert served.ask("GET", "/v2").status == 404 and served.ask("GET", "/v2").error()["code"] == "not_found"
    wrong = served.ask("DELETE", "/v1/generate")
    assert wrong.status == 405 and wrong.headers["allow"] == "POST" and wrong.error()["code"]
    with serving(served.worker, served.model, body_bytes=64, prompt_tokens=3) as small:
        body = {"ids": [1] * 40, "max_new_tokens": 1}
        assert small.ask("POST", "/v1/generate", body).error()["code"] == "body_too_large"
        unannounced = b"".join(b"%x\r\n%s\r\n" % (50, b"[" * 50) for _ in range(3)) + b"0\r\n\r\n"
        with socket.create_connection((small.server.host, small.server.port), timeout=30) as bare:
            bare.sendall(
                b"POST /v1/generate HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
                + unannounced
            )
            assert read_to(bare, b"}}").startswith(b"HTTP/1.1 413 ")
        told = small.ask("POST", "/v1/generate", {"ids": [1] * 4, "max_new_tokens": 1})
        assert told.status == 400 and told.error()["code"] == "prompt_too_long"


def test_a_body_that_does_not_come_is_not_waited_for(served: Served) -> None:
    with (
        serving(served.worker, served.model, body_seconds=0.1) as hasty,
        socket.create_connection((hasty.server.host, hasty.server.port), timeout=30) as bare,
    ):
        bare.sendall(b"POST /v1/generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{")
        assert read_to(bare, b"}}").startswith(b"HTTP/1.1 408 ")


def test_time_limits_comments_and_progress(served: Served) -> None:
    with serving(served.worker, served.model, request_seconds=0.5, keepalive_seconds=0.01) as strict:
        late = strict.ask("POST", "/v1/generate", {"ids": [1], "max_new_tokens": LONG, "ignore_eos": True})
        assert late.status == 504 and late.error()["code"] == "request_timeout"
        served.settled()
        streamed = strict.ask(
            "POST", "/v1/generate", {"ids": [1], "max_new_tokens": LONG, "ignore_eos": True, "stream": True}
        )
        assert streamed.status == 200 and b": keep-alive\n\n" in streamed.raw
        assert streamed.events()[-1]["error"]["code"] == "request_timeout"
    served.settled()
    events = served.generate(list(range(40)), 1, stream=True, return_progress=True)
    told = [event["prompt_progress"] for event in events[:-1] if "prompt_progress" in event]
    assert told[0]["processed"] == 0 and told[-1]["processed"] == told[-1]["total"] == 40
    assert all({"total", "cache", "processed", "time_ms"} == set(one) for one in told)


def test_request_ids_logs_and_a_bug_of_ours(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    answered = served.ask("GET", "/v1/models", headers={"X-Request-Id": "mine-7"})
    assert answered.headers["x-request-id"] == "mine-7"
    odd = served.ask("GET", "/v1/models", headers={"X-Request-Id": 'a "b"'})
    assert odd.headers["x-request-id"].startswith("req-")

    def broken(*_: Any) -> Any:
        raise RuntimeError("secret of the inside")

    monkeypatch.setattr(app_module, "parse_generate", broken)
    failed = served.ask("POST", "/v1/generate", {"ids": [1], "max_new_tokens": 1}, {"X-Request-Id": "mine-8"})
    assert failed.status == 500 and failed.error()["code"] == "internal_error"
    assert "mine-8" in failed.error()["message"] and b"secret" not in failed.raw
    assert "secret of the inside" in served.line("mine-8")["trace"]
    assert served.line("mine-8")["status"] == 500 and served.line("mine-7")["path"] == "/v1/models"


def test_keys_are_asked_for_and_never_shown(served: Served, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    key, other = add_key(path, "ann"), add_key(path, "bob")
    assert key not in path.read_text() and key_digest(key) in path.read_text()
    keys = Keys(path)
    with serving(served.worker, served.model, keys=keys) as locked:

        def models(given: str | None) -> Any:
            return locked.ask("GET", "/v1/models", headers={} if given is None else {"Authorization": given})

        assert models(f"Bearer {key}").status == models(f"bearer {other}").status == 200
        for wrong in (None, "Bearer ", f"Bearer {key}x", f"Basic {key}", "Bearer " + key_digest(key)):
            refused = models(wrong)
            assert refused.status == 401 and refused.error()["type"] == "authentication_error"
            assert refused.headers["www-authenticate"] == "Bearer"
        assert locked.ask("GET", "/health").status == locked.ask("GET", "/ready").status == 200
        for path_ in ("/health?deep=1", "/metrics", "/status", "/v1/memory"):
            assert locked.ask("GET", path_).status == 401, path_
        assert locked.client(api_key=key).models.list().data[0].id == "micro"
        path.write_text(f"# bob has left\n{key_digest(key)} ann\n")
        keys.reload()
        assert models(f"Bearer {other}").status == 401 and models(f"Bearer {key}").status == 200
        path.write_text("oops\n")
        with pytest.raises(UsageError):
            keys.reload()
        assert models(f"Bearer {key}").status == 200
        assert {line.get("key") for line in locked.log} == {None, "ann", "bob"}
        assert key not in json.dumps(locked.log)


@pytest.mark.parametrize("before", ("", "# mine", f"{'a' * 64} ann", f"{'a' * 64} ann\n"))
def test_a_key_is_added_on_a_line_of_its_own(tmp_path: Path, before: str) -> None:
    path = tmp_path / "keys"
    path.write_text(before)
    key = add_key(path, "bob")
    assert Keys(path).name_of(key) == "bob" and path.read_text().startswith(before)
    assert len(path.read_text().splitlines()) == len(before.splitlines()) + 1


def test_a_key_without_a_name_is_called_the_same_wherever_it_stands(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"{key_digest('one')}\n{key_digest('two')}\n")
    keys = Keys(path)
    names = [keys.name_of("one"), keys.name_of("two")]
    path.write_text(f"{key_digest('two')}\n{key_digest('three')}\n")  # a request of two's may still run
    keys.reload()
    assert keys.name_of("two") == names[1] and keys.name_of("three") not in names


def test_small_events_do_not_wait_for_acknowledgements(served: Served) -> None:
    assert served.server._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


def test_other_hosts_are_refused_on_loopback_without_keys(served: Served) -> None:
    with serving(served.worker, served.model, hosts=frozenset(("127.0.0.1", "localhost"))) as local:
        assert local.ask("GET", "/v1/models").status == 200
        assert local.ask("GET", "/v1/models", headers={"Host": "localhost:80"}).status == 200
        assert local.ask("GET", "/v1/models", headers={"Host": "evil.example"}).status == 403
    with pytest.raises(UsageError, match="cannot be bound"), Server(None, port=served.server.port):
        pass


def test_metrics_are_the_schedulers_counts(served: Served) -> None:
    before = served.settled()
    made = [served.generate([3, i], 2 + i) for i in range(3)]
    threads = [threading.Thread(target=served.generate, args=([2, i], 3)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stats = served.settled()
    assert stats.new_tokens - before.new_tokens == sum(len(one["tokens"]) for one in made) + 12
    assert stats.prompt_tokens - before.prompt_tokens == 14
    text = served.ask("GET", "/metrics")
    assert text.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text.raw.decode())
        for sample in family.samples
    }
    name = ("model_name", "micro")
    for metric, wanted in (
        ("vllm:prompt_tokens_total", stats.prompt_tokens),
        ("vllm:generation_tokens_total", stats.new_tokens),
        ("vllm:num_requests_running", 0),
        ("vllm:num_requests_waiting", 0),
        ("vllm:kv_cache_usage_perc", 0),
        ("flashnext:deep_least_rows", LIMITS.deep_rows),
        ("flashnext:deep_rows", served.ask("GET", "/v1/memory").json()["deep"]["rows"]),
        ("flashnext:submitted_total", stats.submitted),
        ("flashnext:refused_total", stats.refused),
        ("flashnext:free_pages", stats.free_pages),
        ("flashnext:decode_visits_total", stats.decode_visits),
    ):
        assert found[(metric, name)] == wanted, metric
    for finish, n in stats.finished.items():
        assert found[("flashnext:scheduler_finished_total", ("finish", finish))] == n
    told = sum(
        found[("vllm:request_success_total", ("finished_reason", why), name)]
        for why in ("stop", "length", "abort", "error")
    )
    assert told <= sum(stats.finished.values())  # servers of the same engine count their own
    for each in ("generation_tokens", "max_num_generation_tokens", "params_max_tokens"):
        assert found[(f"vllm:request_{each}_count", name)] == told
    # everything that ended by its length made what it asked for
    assert found[("vllm:request_params_max_tokens_sum", name)] >= stats.new_tokens - before.new_tokens
    seconds = [found[(f"vllm:request_{part}_time_seconds_sum", name)] for part in
               ("prefill", "decode", "inference")]
    assert 0 < seconds[0] + seconds[1] == pytest.approx(seconds[2])
    pages = ("block_size", "64"), name, ("num_gpu_blocks", str(served.worker.facts["pages"]))
    assert found[("vllm:cache_config_info", *pages)] == 1
    assert found[("vllm:time_to_first_token_seconds_count", name)] <= told
    owners = {labels[1] for metric, *labels in found if metric == "flashnext:memory_live_bytes"}
    memory = served.ask("GET", "/v1/memory").json()
    assert ("tier", "device") in owners and memory["total_bytes"] > 0
    live = {(row["owner"], row["tier"]): row["live_bytes"] for row in memory["rows"]}
    assert (
        live[("kv", "device")]
        == found[("flashnext:memory_live_bytes", ("owner", "kv"), ("tier", "device"))]
        > 0
    )


def test_lines_of_experts_are_told_as_asked_for_and_as_observed(served: Served) -> None:
    metrics = Metrics(served.worker, "micro")
    told = served.ask("GET", "/v1/memory").json()
    metrics.memory = told | {"experts": {"requested": 72, "lines": 93}}
    text = metrics.text().decode()
    assert 'flashnext:expert_lines{model_name="micro"} 93.0' in text
    assert 'flashnext:expert_lines_requested{model_name="micro"} 72.0' in text
    metrics.memory = told
    assert "expert_lines" not in metrics.text().decode(), "all experts are on the device"
    status = served.ask("GET", "/status").json()
    assert (status["expert_lines"], status["deep_rows"]) == (None, LIMITS.deep_rows)


def test_a_deep_health_check_draws_a_token(served: Served) -> None:
    before = served.settled().new_tokens
    told = served.ask("GET", "/health?deep=1").json()
    assert told["status"] == "ok" and 0 <= told["token"] < served.model.vocab
    assert served.settled().new_tokens == before + 1
    assert served.ask("GET", "/health").json() == {"status": "ok", "state": "ready"}
    assert served.settled().new_tokens == before + 1
