"""What `/metrics` tells: counted right, and spelled as Prometheus reads it."""

import pytest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from inference.requests.request import SamplingParams
from inference.server.engine_client import Overloaded
from inference.server.metrics import Metrics
from inference.server.open_requests import Histogram, QueueLimits
from tests.inference.server.fake_engine import FakeEngine, Reading
from tests.inference.server.http_client import talking

pytestmark = pytest.mark.anyio


def values(metrics: Metrics) -> dict[str, float]:
    """Samples by name and labels, the model's and the first engine's aside."""
    return samples(metrics.render()[0].decode())


def samples(text: str) -> dict[str, float]:
    found = {}
    for family in text_string_to_metric_families(text):
        for name, labels, value, *_ in family.samples:
            aside = {("model_name", "tiny"), ("engine", "0")}
            rest = [f"{k}={v}" for k, v in labels.items() if (k, v) not in aside]
            found[" ".join([name, *rest])] = value
            assert labels.get("model_name", "tiny") == "tiny"
    return found


async def test_requests_are_counted_and_timed():
    engine = FakeEngine(delay=0.002, limits=QueueLimits(requests=2))
    for size in (5, 9):
        params = SamplingParams(max_tokens=size)
        async for _ in Reading(engine.client.submit([1, 2, 3], params)):
            pass
    left = Reading(engine.client.submit([1], SamplingParams(max_tokens=100)))
    await anext(left)
    left.cancel()
    engine.hold = True
    for _ in range(6):
        engine.client.submit([1], SamplingParams())
    with pytest.raises(Overloaded):
        engine.client.submit([1], SamplingParams())
    found = values(Metrics(engine.client, "tiny"))
    engine.fail()
    assert values(Metrics(engine.client, "tiny"))["ptq:num_requests_in_flight"] == 0
    assert found["ptq:engine_ready"] == 1
    assert found["ptq:num_requests_in_flight"] == 6
    assert found["ptq:prompt_tokens_total"] == 7
    assert found["ptq:generation_tokens_total"] == 15
    assert found["ptq:overloaded_requests_total"] == 1
    reasons = {"length": 2, "abort": 1, "stop": 0, "error": 0, "refused": 0}
    for reason, count in reasons.items():
        assert found[f"ptq:request_success_total finished_reason={reason}"] == count
    assert found["ptq:time_to_first_token_seconds_count"] == 3
    assert found["ptq:inter_token_latency_seconds_count"] == 12
    assert 12 * 0.002 < found["ptq:inter_token_latency_seconds_sum"] < 2
    assert found["ptq:e2e_request_latency_seconds_count"] == 3
    assert found["ptq:request_generation_tokens_bucket le=5.0"] == 2
    assert found["ptq:request_generation_tokens_sum"] == 15


@pytest.mark.parametrize(
    ("name", "largest"),
    [
        ("time_to_first_token_seconds", 2560.0),
        ("inter_token_latency_seconds", 80.0),
        ("e2e_request_latency_seconds", 7680.0),
    ],
)
def test_times_have_the_bounds_of_vllm(name, largest):
    """As in `vllm/v1/metrics/loggers.py`: requests of minutes are told apart, too."""
    found = values(Metrics(FakeEngine().client, "tiny"))
    bounds = [key.split("le=")[1] for key in found if key.startswith(f"ptq:{name}_bucket")]
    assert max(float(bound) for bound in bounds if bound != "+Inf") == largest


def test_answers_are_counted_by_route_and_status():
    metrics = Metrics(FakeEngine().client, "tiny")
    for status in (200, 200, 429):
        metrics.answered("POST", "/v1/completions", status, 0.01)
    found = values(metrics)
    labels = "method=POST route=/v1/completions"
    assert found[f"ptq:http_requests_total {labels} status=200"] == 2
    assert found[f"ptq:http_requests_total {labels} status=429"] == 1
    assert found[f"ptq:http_request_duration_seconds_count {labels}"] == 3


def test_both_formats_are_given():
    metrics = Metrics(FakeEngine().client, "tiny")
    plain, kind = metrics.render("*/*")
    assert kind.startswith("text/plain")
    text, kind = metrics.render("application/openmetrics-text; version=1.0.0")
    assert kind.startswith("application/openmetrics-text")
    names = {f.name for f in openmetrics.text_string_to_metric_families(text.decode())}
    assert "ptq:time_to_first_token_seconds" in names
    assert b"# TYPE ptq:time_to_first_token_seconds histogram" in plain


def test_a_value_on_a_bound_counts_below_it():
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        histogram.add(value)
    assert histogram.counts == [2, 2, 1]
    assert histogram.total == 14


async def test_the_route_shows_what_was_asked():
    async with talking() as (client, _):
        await client.post("/v1/completions", json={"prompt": [1, 2], "max_tokens": 3})
        await client.post("/v1/completions", json={"prompt": []})
        await client.get("/v1/models/tiny")
        await client.request("BREW", "/made/up")
        answer = await client.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain")
        found = samples(answer.text)
    counts = {k: v for k, v in found.items() if k.startswith("ptq:http_requests_total")}
    assert sorted((k.split(" ", 1)[1], v) for k, v in counts.items()) == [
        ("method=GET route=/v1/models/{model:path} status=200", 1),
        ("method=POST route=/v1/completions status=200", 1),
        ("method=POST route=/v1/completions status=400", 1),
        ("method=other route=none status=404", 1),
    ]
    assert found["ptq:generation_tokens_total"] == 3
