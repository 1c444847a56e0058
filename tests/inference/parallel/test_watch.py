"""What is said, and done, where a rank's device does not come back; ranks here answer alone."""

from __future__ import annotations

import time
from threading import Event, Thread

import pytest

from formats.errors import EngineEndedError
from inference.config import EngineConfig
from inference.parallel.group import Progress
from inference.parallel.messages import Heartbeat, RankSpec
from inference.parallel.ranks import Ranks


class Answering:
    """A rank that says where it is, and does nothing; see `inference.parallel.ranks.Member`."""

    def __init__(self, rank, tasks, news):
        self.name, self._over = f"rank {rank} (alone)", Event()
        self._ends = tasks, news
        news.send(Heartbeat(0, "running step 7"))

    def kill(self):
        self._over.set()

    def ended(self, seconds):
        for end in self._ends:
            end.close()
        return "ended"


class Held:
    """What is called before ranks end, and after a failure."""

    def __init__(self, ranks):
        self.calls = []
        ranks.before_end(self.release)
        ranks.on_failure(self.give_up)

    def release(self):
        self.calls.append("release")

    def give_up(self):
        self.calls.append("give up")


@pytest.fixture
def ranks():
    progress = Progress()
    made = Ranks([RankSpec(1, 2, dict, EngineConfig(), dict, "", 1, dict)], progress, Answering)
    made.progress = progress
    yield made
    made.close()


def test_a_device_that_does_not_come_back_is_named_with_every_rank_and_its_step(ranks):
    """Ranks are at the same number: none is later than another, and nothing else would end this."""
    held, start = Held(ranks), time.monotonic()
    with ranks.together("running step 8"), ranks.progress.waiting(0.3):
        assert ranks._failed.wait(5)
    assert 0.3 <= time.monotonic() - start < 2
    message = (
        r"rank 0 of 2 has waited too long for its GPU while running step 8: .* does not end\. "
        r"rank 1 \(alone\) of 2 is running step 7\."
    )
    with pytest.raises(EngineEndedError, match=message):
        ranks.check()
    assert held.calls == ["give up"]


def test_a_device_that_comes_back_in_time_is_no_failure(ranks):
    held = Held(ranks)
    with ranks.progress.waiting(0.6):
        time.sleep(0.3)
    time.sleep(0.6)
    ranks.check()
    assert held.calls == []
    ranks.close()
    assert held.calls == ["release"], "graphs go before what connects the ranks"


def test_what_is_gone_is_not_called(ranks):
    Thread(target=Held, args=(ranks,)).run()
    ranks.close()
    with pytest.raises(EngineEndedError, match="have been ended"):
        ranks.check()
