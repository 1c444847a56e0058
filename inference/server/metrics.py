"""Metrics for Prometheus, named as vLLM's where they mean the same: `ptq:` stands for `vllm:`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from inference.server.measures import WHOLE, Histogram

METHODS = ("GET", "POST", "HEAD", "OPTIONS")


class Metrics:
    """What `/metrics` answers; a registry of its own, so that two servers of a process do not mix.

    Args:
        client: The engine.
        model: The name that it is served by.
    """

    def __init__(self, client: EngineClient, model: str) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(client, model))
        ProcessCollector(registry=self._registry)
        labels = ("method", "route", "status")
        told = "Answers by route and status."
        self._answers = Counter("ptq:http_requests", told, labels, registry=self._registry)
        told = "Seconds from a request's headers to the end of its answer."
        self._seconds = Timer(
            "ptq:http_request_duration_seconds",
            told,
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
            seconds: That it took.
        """
        method = method if method in METHODS else "other"  # clients must not make up rows
        self._answers.labels(method, route, status).inc()
        self._seconds.labels(method, route).observe(seconds)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """All of it in the format that an Accept header asks for, and its content type."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type


class _EngineCollector(Collector):
    """Reads what the client knows of its engine when it is asked."""

    def __init__(self, client: EngineClient, model: str) -> None:
        self._client, self._model = client, model

    def describe(self) -> list[Metric]:
        """Nothing: it would only serve to find equal names."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Give every metric."""
        yield from self._gauges()
        yield from self._counters()
        measures = self._client.measures
        for name, told, values in (
            ("time_to_first_token_seconds", "From arrival to the first token.", "first_token"),
            ("inter_token_latency_seconds", "Between two tokens of a request.", "inter_token"),
            ("e2e_request_latency_seconds", "From arrival to the end.", "whole"),
            ("request_prompt_tokens", "Tokens of prompts.", "prompt_lengths"),
            ("request_generation_tokens", "Tokens of answers.", "generation_lengths"),
        ):
            family = HistogramMetricFamily(f"ptq:{name}", told, labels=["model_name"])
            found = getattr(measures, values)
            family.add_metric([self._model], _buckets(found), found.total)
            yield family

    def _gauges(self) -> Iterator[Metric]:
        client, stats = self._client, self._client.stats
        total = stats.blocks_total
        for name, told, value in (
            ("engine_ready", "1 while requests are taken.", client.state == "ready"),
            ("num_requests_running", "Requests that run.", stats.running),
            ("num_requests_waiting", "Requests that wait.", stats.waiting),
            ("num_requests_in_flight", "Requests that wait or run.", client.in_flight),
            ("kv_cache_usage_perc", "Used blocks, 1 is all.", stats.blocks_used / (total or 1)),
            ("kv_cache_blocks_total", "Blocks of the cache.", total),
            ("kv_cache_blocks_free", "Blocks that hold nothing.", stats.blocks_free),
            ("kv_cache_blocks_used", "Blocks of requests.", stats.blocks_used),
            ("kv_cache_blocks_cached", "Blocks of nobody, kept.", stats.blocks_cached),
        ):
            yield _single(GaugeMetricFamily, name, told, self._model, value)

    def _counters(self) -> Iterator[Metric]:
        stats, measures = self._client.stats, self._client.measures
        for name, told, value in (
            ("prompt_tokens", "Tokens of prompts.", measures.prompt_tokens),
            ("generation_tokens", "Tokens that were generated.", measures.generation_tokens),
            ("prefix_cache_queries", "Prompt tokens looked up.", stats.prefix_queried_tokens),
            ("prefix_cache_hits", "Those found.", stats.prefix_hit_tokens),
            ("num_preemptions", "Requests that gave blocks up.", stats.preemptions),
            ("corrupted_requests", "Requests of NaN or infinity.", stats.corrupted),
            ("failed_steps", "Steps that failed.", stats.failed_steps),
            ("spec_decode_num_drafts", "Steps of a request with drafts.", stats.draft_steps),
            ("spec_decode_num_draft_tokens", "Drafts.", sum(stats.drafts_proposed)),
            ("spec_decode_num_accepted_tokens", "Those that came.", sum(stats.drafts_accepted)),
            ("overloaded_requests", "Requests that found the queue full.", measures.overloaded),
        ):
            yield _single(CounterMetricFamily, name, told, self._model, value)
        told, labels = "Drafts that came, by position from 0 on.", ["model_name", "position"]
        name = "ptq:spec_decode_num_accepted_tokens_per_pos"
        family = CounterMetricFamily(name, told, labels=labels)
        for position, accepted in enumerate(stats.drafts_accepted):
            family.add_metric([self._model, str(position)], accepted)
        yield family
        told, labels = "Requests that ended, by reason.", ["model_name", "finished_reason"]
        family = CounterMetricFamily("ptq:request_success", told, labels=labels)
        for reason in ("stop", "length", "abort", "error", "refused"):
            family.add_metric([self._model, reason], measures.finished[reason])
        yield family


def _single(
    kind: type[GaugeMetricFamily | CounterMetricFamily],
    name: str,
    told: str,
    model: str,
    value: float,
) -> Metric:
    family = kind(f"ptq:{name}", told, labels=["model_name"])
    family.add_metric([model], value)
    return family


def _buckets(histogram: Histogram) -> Sequence[tuple[str, float]]:
    """(bound, count of values up to it), as Prometheus wants them."""
    bounds = [*map(str, histogram.bounds), "+Inf"]
    return list(zip(bounds, accumulate(histogram.counts), strict=True))
