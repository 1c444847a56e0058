"""Metrics for Prometheus, named as vLLM's where they mean the same: `ptq:` stands for `vllm:`.

What is of an engine has its number as the label `engine`, 0 where there is one; sums over it are of
the server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, ProcessCollector
from prometheus_client import Histogram as Timer
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from inference.server.engine_client import EngineClient
from inference.server.fleet import ServedEngine
from inference.server.open_requests import WHOLE

METHODS = ("GET", "POST", "HEAD", "OPTIONS")
LABELS = ("model_name", "engine")
# (name, what it tells, its value for an engine)
GAUGES: list[tuple[str, str, Callable[[EngineClient], float]]] = [
    ("engine_ready", "1 while requests are taken.", lambda e: e.state == "ready"),
    ("num_requests_running", "Requests that run.", lambda e: e.stats.running),
    ("num_requests_waiting", "Requests that wait.", lambda e: e.stats.waiting),
    ("num_requests_in_flight", "Requests that wait or run.", lambda e: e.in_flight),
    (
        "kv_cache_usage_perc",
        "Used blocks, 1 is all.",
        lambda e: e.stats.blocks.used / (e.stats.blocks.total or 1),
    ),
    ("kv_cache_blocks_total", "Blocks of the cache.", lambda e: e.stats.blocks.total),
    ("kv_cache_blocks_free", "Blocks that hold nothing.", lambda e: e.stats.blocks.free),
    ("kv_cache_blocks_used", "Blocks of requests.", lambda e: e.stats.blocks.used),
    ("kv_cache_blocks_cached", "Blocks of nobody, kept.", lambda e: e.stats.blocks.cached),
]
COUNTERS: list[tuple[str, str, Callable[[EngineClient], float]]] = [
    ("prompt_tokens", "Tokens of prompts.", lambda e: e.measures.prompt_tokens),
    ("generation_tokens", "Tokens that were generated.", lambda e: e.measures.generation_tokens),
    ("prefix_cache_queries", "Prompt tokens looked up.", lambda e: e.stats.blocks.queried_tokens),
    ("prefix_cache_hits", "Those found.", lambda e: e.stats.blocks.hit_tokens),
    ("num_preemptions", "Requests that gave blocks up.", lambda e: e.stats.blocks.preemptions),
    ("corrupted_requests", "Requests of NaN or infinity.", lambda e: e.stats.corrupted),
    ("failed_steps", "Steps that failed.", lambda e: e.stats.failed_steps),
    ("spec_decode_num_drafts", "Steps of a request with drafts.", lambda e: e.stats.drafts.steps),
    ("spec_decode_num_draft_tokens", "Drafts.", lambda e: sum(e.stats.drafts.proposed)),
    ("spec_decode_num_accepted_tokens", "Those that came.", lambda e: sum(e.stats.drafts.accepted)),
    ("overloaded_requests", "Requests that found the queue full.", lambda e: e.measures.overloaded),
]
# (name, what it tells, the attribute of `Measures`)
HISTOGRAMS = [
    ("time_to_first_token_seconds", "From arrival to the first token.", "first_token"),
    ("inter_token_latency_seconds", "Between two tokens of a request.", "inter_token"),
    ("e2e_request_latency_seconds", "From arrival to the end.", "whole"),
    ("request_prompt_tokens", "Tokens of prompts.", "prompt_lengths"),
    ("request_generation_tokens", "Tokens of answers.", "generation_lengths"),
]


class Metrics(Collector):
    """What `/metrics` answers, with a registry of its own: servers of a process do not mix."""

    def __init__(self, client: ServedEngine, model: str) -> None:
        self._client, self._model, self._registry = client, model, CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)
        labels = ("method", "route", "status")
        text = "Answers by route and status."
        self._answers = Counter("ptq:http_requests", text, labels, registry=self._registry)
        text = "Seconds from a request's headers to the end of its answer."
        self._seconds = Timer(
            "ptq:http_request_duration_seconds",
            text,
            ("method", "route"),
            buckets=(0.001, 0.01, 0.1, *WHOLE),
            registry=self._registry,
        )

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count an answer.

        Args:
            method: Such as `POST`.
            route: Its template, such as `/v1/models/{model}`; `none` where no route fits.
            status: Of HTTP; 499 where the client left before.
        """
        method = method if method in METHODS else "other"  # clients must not make up rows
        self._answers.labels(method, route, status).inc()
        self._seconds.labels(method, route).observe(seconds)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """All of it in the format that an Accept header asks for, and its content type."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def describe(self) -> list[Metric]:
        """Nothing: it would only serve to find equal names."""
        return []

    def collect(self) -> Iterator[Metric]:
        """What the client knows of its engines when it is asked."""
        for kind, rows in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)):
            for name, text, value in rows:
                family = kind(f"ptq:{name}", text, labels=LABELS)
                for labels, engine in self._engines():
                    family.add_metric(labels, value(engine))
                yield family
        yield from self._by_label()
        for name, text, values in HISTOGRAMS:
            family = HistogramMetricFamily(f"ptq:{name}", text, labels=LABELS)
            for labels, engine in self._engines():
                found = getattr(engine.measures, values)
                bounds = [*map(str, found.bounds), "+Inf"]
                buckets = list(zip(bounds, accumulate(found.counts), strict=True))
                family.add_metric(labels, buckets, found.total)
            yield family

    def _engines(self) -> Iterator[tuple[list[str], EngineClient]]:
        """Each engine and the values of its labels."""
        for number, engine in enumerate(self._client.engines):
            yield [self._model, str(number)], engine

    def _by_label(self) -> Iterator[Metric]:
        """Counters that have a label beside the engine's."""
        text, name = "Accepted drafts, by position from 0 on.", "spec_decode_num_accepted_tokens"
        drafts = CounterMetricFamily(f"ptq:{name}_per_pos", text, labels=[*LABELS, "position"])
        text, labels = "Requests that ended, by reason.", [*LABELS, "finished_reason"]
        ended = CounterMetricFamily("ptq:request_success", text, labels=labels)
        text, labels = "Requests sent to an engine, by what decided.", [*LABELS, "by"]
        routed = CounterMetricFamily("ptq:routed_requests", text, labels=labels)
        for (values, engine), ways in zip(self._engines(), self._client.routed, strict=True):
            for position, accepted in enumerate(engine.stats.drafts.accepted):
                drafts.add_metric([*values, str(position)], accepted)
            for reason in ("stop", "length", "abort", "error", "refused"):
                ended.add_metric([*values, reason], engine.measures.finished[reason])
            for way, requests in ways.items():
                routed.add_metric([*values, way], requests)
        yield from (drafts, ended, routed)
