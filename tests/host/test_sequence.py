"""Sampling values and a sequence's own bookkeeping, at their edges; no device."""

from __future__ import annotations

import numpy as np
import pytest

from flashnext_drv.engine.sequence import Sampling, Sequence, checked_ids
from flashnext_drv.errors import CapacityError, UsageError

pytestmark = pytest.mark.host


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0.0),
        ("temperature", 100.0),
        ("temperature", np.float32(0.5)),
        ("top_p", 1.0),
        ("top_p", 1),
        ("top_p", 1e-9),
        ("min_p", 0.0),
        ("min_p", 1.0),
        ("top_k", 0),
        ("top_k", 2**32 - 1),
        ("seed", 0),
        ("seed", 2**64 - 1),
        ("seed", np.uint64(2**64 - 1)),
    ],
)
def test_sampling_takes_its_edges(name: str, value: float) -> None:
    assert getattr(Sampling(**{name: value}), name) == value


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("temperature", -1e-9, "outside"),
        ("temperature", 100.1, "outside"),
        ("temperature", float("inf"), "outside"),
        ("temperature", float("nan"), "outside"),
        ("temperature", "1", "no number"),
        ("temperature", True, "no number"),
        ("top_p", 0.0, "above 0"),
        ("top_p", 1.0001, "outside"),
        ("top_p", None, "no number"),
        ("min_p", -0.1, "outside"),
        ("min_p", 1.1, "outside"),
        ("min_p", False, "no number"),
        ("top_k", 1.0, "no integer"),
        ("top_k", True, "no integer"),
        ("top_k", -1, "outside"),
        ("top_k", 2**32, "outside"),
        ("seed", 2.0, "no integer"),
        ("seed", False, "no integer"),
        ("seed", -1, "outside"),
        ("seed", 2**64, "outside"),
    ],
)
def test_sampling_refuses_what_lies_beyond(name: str, value: object, text: str) -> None:
    with pytest.raises(UsageError, match=f"{name} .*{text}"):
        Sampling(**{name: value})  # type: ignore[arg-type]


def test_a_sequence_is_filled_to_its_capacity_and_no_further() -> None:
    made = Sequence(0, 5)
    made.extend([1, 2, 3])
    made.extend([4, 5])
    assert (made.n_pending, made.position) == (5, 0)
    with pytest.raises(CapacityError, match="tokens=6, capacity=5"):
        made.extend([6])
    assert made.ids == [1, 2, 3, 4, 5]
    made.n_done = 2
    assert (made.n_pending, made.position) == (3, 2)


def test_capacity_counts_what_came_before_the_first_token() -> None:
    made = Sequence(0, 5, first_position=3)
    made.extend([1, 2])
    with pytest.raises(CapacityError, match="tokens=6"):
        made.extend([3])


def test_tokens_in_front() -> None:
    fresh = Sequence(0, 9, ids=[10, 11, 12])
    assert [fresh.token_before(i, d, 7) for i in range(3) for d in (1, 2)] == [7, 7, 10, 7, 11, 10]
    later = Sequence(0, 9, ids=[10, 11], before=(21, 20))
    assert [later.token_before(i, d, 7) for i in range(2) for d in (1, 2)] == [21, 20, 10, 21]
    assert later.token_before(0, 3, 7) == 7, "only two tokens are kept"


def test_ids_at_the_edge_of_the_vocabulary() -> None:
    assert checked_ids([0, 511], 512) == [0, 511] == checked_ids(np.array([0, 511], np.uint16), 512)
    for wrong, index in (([0, 512], 1), ([-1, 3], 0)):
        with pytest.raises(UsageError, match=f"index={index}, id={wrong[index]}, vocab=512"):
            checked_ids(wrong, 512)
    for shape in ([], [[1, 2]]):
        with pytest.raises(UsageError, match="non-empty list"):
            checked_ids(shape, 512)
    for kind in ([1.0], [True], ["1"]):
        with pytest.raises(UsageError, match="are integers"):
            checked_ids(kind, 512)
