"""What `/metrics` says, in vLLM's names where they exist and under `flashnext:` elsewhere.

Called by server/app.py.  What must stay true: whatever the scheduler counts is read from the scheduler when
it is asked for, so the two cannot disagree; times come from the stamps of the reply, which the engine thread
made; memory is the engine's own report, and is left out, not guessed, until there is one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ..engine.requests import Reply, Request
from ..kernels.tables import PAGE_TOKENS
from .worker import STATES, Worker

__all__ = ["CONTENT_TYPE", "Metrics"]

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS: Final = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
    160.0,
    640.0,
)
_PER_TOKEN: Final = (
    0.001,
    0.0025,
    0.005,
    0.0075,
    0.01,
    0.015,
    0.02,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
    2.5,
)
_TOKENS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000)


class Metrics:
    """One registry of one server.  model_name: the label that vLLM's dashboards filter by."""

    def __init__(self, worker: Worker, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self.memory: Mapping[str, Any] = {}  # MemoryReport.as_dict of the last look
        self._label = model_name
        self._times = {
            name: self._histogram(f"vllm:{name}", text, buckets)
            for name, text, buckets in (
                ("time_to_first_token_seconds", "From the request's arrival to its first token.", _SECONDS),
                (
                    "inter_token_latency_seconds",
                    "Between two tokens, by the engine thread's stamps.",
                    _PER_TOKEN,
                ),
                ("time_per_output_token_seconds", "A reply's mean time between tokens.", _PER_TOKEN),
                ("e2e_request_latency_seconds", "From the request's arrival to its last token.", _SECONDS),
                ("request_queue_time_seconds", "From arrival to admission.", _SECONDS),
                ("request_prefill_time_seconds", "From admission to the first token.", _SECONDS),
                ("request_decode_time_seconds", "From the first token to the last.", _SECONDS),
                ("request_inference_time_seconds", "From admission to the last token.", _SECONDS),
                ("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS),
                ("request_generation_tokens", "Tokens made for a request.", _TOKENS),
                ("request_max_num_generation_tokens", "The same: a request has one sequence.", _TOKENS),
                ("request_params_max_tokens", "Most tokens that a request asked for.", _TOKENS),
            )
        }
        self._success = Counter(
            "vllm:request_success",
            "Requests that ended, by why.",
            ("model_name", "finished_reason"),
            registry=self.registry,
        )
        for reason in ("stop", "length", "abort", "error"):
            self._success.labels(model_name, reason)
        self._http = Counter(
            "flashnext:http_responses", "Responses by status.", ("status",), registry=self.registry
        )
        self.registry.register(_Engine(self, worker, model_name))

    def responded(self, status: int) -> None:
        """A response was begun."""
        self._http.labels(str(status)).inc()

    def finished(self, reply: Reply, finish: str, request: Request) -> None:
        """A request ended.  finish: what the client was told: stop, length, abort or error."""
        self._success.labels(self._label, finish).inc()
        stamps, at = reply.stamps, reply.token_at
        arrived, admitted = stamps.get("submitted"), stamps.get("admitted")
        self._seen("request_prompt_tokens", len(request.ids))
        self._seen("request_params_max_tokens", request.max_new_tokens)
        for name in ("request_generation_tokens", "request_max_num_generation_tokens"):
            self._seen(name, len(reply.tokens))
        if arrived is not None and admitted is not None:
            self._seen("request_queue_time_seconds", admitted - arrived)
        if arrived is None or not at:
            return
        self._seen("time_to_first_token_seconds", at[0] - arrived)
        self._seen("e2e_request_latency_seconds", at[-1] - arrived)
        self._seen("request_decode_time_seconds", at[-1] - at[0])
        if admitted is not None:
            self._seen("request_prefill_time_seconds", at[0] - admitted)
            self._seen("request_inference_time_seconds", at[-1] - admitted)
        for earlier, later in zip(at, at[1:], strict=False):
            self._seen("inter_token_latency_seconds", later - earlier)
        if len(at) > 1:
            self._seen("time_per_output_token_seconds", (at[-1] - at[0]) / (len(at) - 1))

    def text(self) -> bytes:
        """All of it in Prometheus' text form."""
        return generate_latest(self.registry)

    def _histogram(self, name: str, text: str, buckets: Iterable[float]) -> Histogram:
        return Histogram(name, text, ("model_name",), registry=self.registry, buckets=tuple(buckets))

    def _seen(self, name: str, value: float) -> None:
        self._times[name].labels(self._label).observe(max(value, 0.0))


class _Engine:
    """Collects what scheduler, worker and the engine's memory report count, at the moment of asking."""

    def __init__(self, metrics: Metrics, worker: Worker, model_name: str) -> None:
        self._metrics, self._worker, self._label = metrics, worker, model_name

    def collect(self) -> Iterable[Metric]:
        """All families.  Called by the registry."""
        state = GaugeMetricFamily("flashnext:state", "1 for the state the server is in.", labels=("state",))
        for name in STATES:
            state.add_metric((name,), float(self._worker.state == name))
        yield state
        yield from self._scheduler()
        yield from self._memory()

    def _scheduler(self) -> Iterable[Metric]:
        stats = self._worker.stats()
        if stats is None:
            return
        yield self._gauge(
            "vllm:num_requests_running", "Requests in prompt or decode.", stats.prompting + stats.decoding
        )
        yield self._gauge("vllm:num_requests_waiting", "Requests in the queue.", stats.queued)
        yield self._count("vllm:prompt_tokens", "Prompt tokens run.", stats.prompt_tokens)
        yield self._count("vllm:generation_tokens", "Tokens drawn.", stats.new_tokens)
        yield self._count(
            "vllm:num_preemptions", "Requests put back into the queue: there is no preemption.", 0
        )
        pages = self._worker.facts.get("pages", 0)
        if pages:
            yield self._gauge(
                "vllm:kv_cache_usage_perc",
                "Share of the cache's pages in use, 0 to 1.",
                1.0 - stats.free_pages / pages,
            )
            cache = GaugeMetricFamily(
                "vllm:cache_config_info",
                "1; the cache's pages are in the labels.",
                labels=("model_name", "block_size", "num_gpu_blocks"),
            )
            cache.add_metric((self._label, str(PAGE_TOKENS), str(pages)), 1.0)
            yield cache
            yield self._gauge(
                "flashnext:deep_least_rows",
                "Rows of a prompt's segment from which on it takes the deep pass.",
                self._worker.facts["deep_rows"],
            )
        finished = CounterMetricFamily(
            "flashnext:scheduler_finished",
            "Requests that ended, by why, as the scheduler tells it.",
            labels=("finish",),
        )
        for name, value in stats.finished.items():
            finished.add_metric((name,), value)
        yield finished
        for name in ("prompting", "decoding", "free_slots", "free_pages", "max_streams", "max_queue"):
            yield self._gauge(f"flashnext:{name}", _words(name), getattr(stats, name))
        for name in (
            "submitted",
            "refused",
            "prompt_chunks",
            "decode_visits",
            "decode_rounds",
            "queue_seconds",
        ):
            yield self._count(f"flashnext:{name}", _words(name), getattr(stats, name))
        counters = CounterMetricFamily(
            "flashnext:engine",
            "The engine's counters: graphs, paths of prompt rows, experts, ring, link; up to a second old.",
            labels=("counter",),
        )
        for name, value in sorted(stats.counters.items()):
            counters.add_metric((name,), value)
        yield counters
        wanted = stats.counters.get("expert_hits", 0) + stats.counters.get("expert_misses", 0)
        if wanted:
            yield self._gauge(
                "flashnext:expert_hit_rate",
                "Distinct experts found in device lines.",
                stats.counters["expert_hits"] / wanted,
            )

    def _memory(self) -> Iterable[Metric]:
        report = self._metrics.memory
        if not report:
            return
        live = GaugeMetricFamily(
            "flashnext:memory_live_bytes", "Bytes asked for and not given back.", labels=("owner", "tier")
        )
        peak = GaugeMetricFamily(
            "flashnext:memory_peak_bytes", "The most at one time.", labels=("owner", "tier")
        )
        for row in report["rows"]:
            if row["n_live"] or row["peak_bytes"]:
                live.add_metric((row["owner"], row["tier"]), row["live_bytes"])
                peak.add_metric((row["owner"], row["tier"]), row["peak_bytes"])
        yield live
        yield peak
        for name in ("total", "free", "free_at_start", "unexplained"):
            yield self._gauge(
                f"flashnext:device_{name}_bytes",
                f"Device memory: {name.replace('_', ' ')}.",
                report[f"{name}_bytes"],
            )
        graphs = report["graphs"]
        yield self._gauge("flashnext:graphs_kept", "Graph executables kept.", graphs.get("kept", 0))
        yield self._gauge("flashnext:graphs_bytes", "Device memory they took.", graphs.get("bytes", 0))
        yield self._gauge(
            "flashnext:deep_rows",
            "Rows that the deep pass takes at once; 0: it is not there.",
            report["deep"]["rows"],
        )
        experts = report["experts"]
        if experts:
            for name, text, value in (
                ("", "Device lines of experts a layer.", experts["lines"]),
                ("_requested", "Those that were asked for.", experts["requested"]),
            ):
                yield self._gauge(f"flashnext:expert_lines{name}", text, value)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=("model_name",))
        family.add_metric((self._label,), value)
        return family

    def _count(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=("model_name",))
        family.add_metric((self._label,), value)
        return family


def _words(name: str) -> str:
    """Help text of a field of SchedulerStats."""
    return f"SchedulerStats.{name}."
