"""Choices of an option for each group, against all choices there are."""

import itertools
import random

import pytest

from ptq.search.choice import frontier


def drawn(seed: int, groups: int, options: int, most: int = 60) -> list[list[tuple[int, float]]]:
    """Bytes and costs of options, of which the larger mostly cost less."""
    rng = random.Random(seed)
    sizes = [[rng.randint(1, most) for _ in range(rng.randint(1, options))] for _ in range(groups)]
    return [[(n, rng.random() * most / n) for n in size] for size in sizes]


def every(groups):
    for choice in itertools.product(*map(range, map(len, groups))):
        taken = [options[i] for options, i in zip(groups, choice, strict=True)]
        yield sum(nbytes for nbytes, _ in taken), sum(kl for _, kl in taken)


@pytest.mark.parametrize("seed", range(12))
def test_it_finds_what_trying_all_choices_finds(seed):
    groups = drawn(seed, groups=5, options=4)
    found, known = frontier(groups), list(every(groups))
    for limit in [0.0, 0.9, 2.0, 4.0, 9.0, 20.0, 90.0]:
        best = min((b for b, kl in known if kl <= limit + 1e-12), default=None)
        point = found.smallest(limit + 1e-12)
        assert (point.nbytes if point else None) == best
    for room in (3, 40, 90, 150, 400):
        least = min((kl for b, kl in known if b <= room), default=None)
        point = found.best(room)
        assert (point.kl if point else None) == (pytest.approx(least) if point else least)


def test_points_tell_their_choice_and_none_beats_another():
    groups = drawn(3, groups=6, options=4)
    found = frontier(groups)
    for i in range(len(found)):
        point = found.point(i)
        taken = [options[j] for options, j in zip(groups, point.choice, strict=True)]
        assert point.nbytes == sum(nbytes for nbytes, _ in taken)
        assert point.kl == pytest.approx(sum(kl for _, kl in taken))
    points = [found.point(i) for i in range(len(found))]
    assert all(a.nbytes < b.nbytes and a.kl > b.kl for a, b in itertools.pairwise(points))


def test_a_choice_off_the_convex_hull_is_found():
    point = frontier([[(1, 10.0), (6, 6.0), (10, 0.0)]]).best(9)
    assert point is not None
    assert point.choice == (1,)


def test_a_thinned_front_loses_little_and_keeps_sums_exact():
    groups = drawn(5, groups=40, options=6, most=9000)
    whole, thin = frontier(groups), frontier(groups, cells=200)
    assert len(thin) <= 201 < len(whole)
    assert thin.point(0).nbytes == whole.point(0).nbytes
    assert thin.point(-1).kl == pytest.approx(whole.point(-1).kl)
    for kl in (30.0, 60.0, 100.0):
        rough, exact = thin.smallest(kl), whole.smallest(kl)
        assert rough is not None
        assert exact is not None
        assert exact.nbytes <= rough.nbytes <= 1.02 * exact.nbytes
        taken = [options[j] for options, j in zip(groups, rough.choice, strict=True)]
        assert rough.nbytes == sum(nbytes for nbytes, _ in taken)


def test_a_budget_that_everything_meets_takes_the_smallest():
    groups = drawn(7, groups=4, options=3)
    point = frontier(groups).smallest(1e9)
    assert point is not None
    assert point.nbytes == sum(min(options)[0] for options in groups)
