"""Sampling values and a sequence's own bookkeeping, at their edges; no device."""

from __future__ import annotations

import numpy as np
import pytest

from flashnext_drv.engine.edits import edit_list
from flashnext_drv.engine.sequence import Edits, Sampling, Sequence, checked_ids
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


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("repetition", 0.01),
        ("repetition", 100),
        ("presence", -100.0),
        ("presence", np.float32(2)),
        ("frequency", 100.0),
        ("bias", ((0, -1000.0), (5, 1000.0))),
        ("bias", ((7, float("-inf")),)),
        ("bias", tuple((i, 1.0) for i in range(1024))),
        ("min_new_tokens", 2**31 - 1),
        ("min_new_tokens", np.int64(3)),
        ("stop_ids", tuple(range(1024))),
    ],
)
def test_edits_take_their_edges(name: str, value: object) -> None:
    assert getattr(Edits(**{name: value}), name) == value


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("repetition", 0.0099, "outside"),
        ("repetition", 100.1, "outside"),
        ("repetition", float("nan"), "outside"),
        ("repetition", True, "no number"),
        ("presence", 100.5, "outside"),
        ("presence", "1", "no number"),
        ("frequency", float("inf"), "outside"),
        ("frequency", None, "no number"),
        ("bias", ((1, 1000.5),), "outside"),
        ("bias", ((1, float("nan")),), "outside"),
        ("bias", ((1, float("inf")),), "outside"),
        ("bias", ((1, "2"),), "no number"),
        ("bias", ((1.5, 2.0),), "pairs"),
        ("bias", ((1, 2.0, 3.0),), "pairs"),
        ("bias", {1: 2.0}, "pairs"),
        ("bias", None, "pairs"),
        ("bias", ((1, 2.0), (1, 3.0)), "twice"),
        ("bias", tuple((i, 1.0) for i in range(1025)), "too many"),
        ("min_new_tokens", -1, "an integer"),
        ("min_new_tokens", 2**31, "an integer"),
        ("min_new_tokens", 1.0, "an integer"),
        ("min_new_tokens", False, "an integer"),
        ("stop_ids", ("a",), "a list of ids"),
        ("stop_ids", 3, "a list of ids"),
        ("stop_ids", range(1025), "too many"),
    ],
)
def test_edits_refuse(name: str, value: object, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        Edits(**{name: value})  # type: ignore[arg-type]


def test_edits_that_change_nothing_are_not_active() -> None:
    assert not Edits().active and not Edits(stop_ids=(1,)).active and not Edits(min_new_tokens=3).active
    assert Edits(bias=((2, 0.0),)).active and Edits(frequency=-0.1).active and Edits(repetition=0.9).active
    assert Edits(bias=[(5, 1), (2, -1)], stop_ids=[9, 9, 4]) == Edits(  # type: ignore[arg-type]
        bias=((2, -1.0), (5, 1.0)), stop_ids=(4, 9))


@pytest.mark.parametrize("repetition", [1.0, 1.3])
@pytest.mark.parametrize(("n_prompt", "end"), [(None, 5), (3, 5), (3, 8), (5, 5)])
def test_the_list_of_edits(repetition: float, n_prompt: int | None, end: int) -> None:
    """Every id once with what is known of it, from the ids up to `end`."""
    edits = Edits(repetition, 0.5, 0.25, bias=((9, 2.0), (4, -1.0)), min_new_tokens=6, stop_ids=(4, 70))
    ids = [4, 9, 4, 30, 4, 31, 30, 30, 8]
    sequence = Sequence(0, 64, edits=edits, ids=ids, n_prompt=n_prompt, first_position=100)
    head, entries = edit_list(sequence, end)
    n = n_prompt or end
    prompt, output = set(ids[:n]) if repetition != 1 else set(), ids[n:end]
    wanted = {
        token: (int(token in prompt) + 2 * (token in (4, 70)) + 4 * output.count(token),
                dict(edits.bias).get(token, 0.0))
        for token in prompt | set(output) | {9, 4, 70}
    }
    assert {int(e["id"]): (int(e["seen"]), float(e["bias"])) for e in entries} == wanted
    assert head["n_entries"] == len(entries) == len(wanted)
    assert head["counted"] == 100 + end and head["stops_from"] == 100 + n - 1 + 6
    assert [float(head[name][0]) for name in ("repetition", "presence", "frequency")] == [
        float(np.float32(repetition)), 0.5, 0.25]


def test_when_a_list_must_be_sent_anew() -> None:
    sequence = Sequence(0, 64, edits=Edits(presence=1.0), ids=[1, 2, 3, 4], n_done=3)
    assert not sequence.lists(3), "never sent"
    sequence.drew(2)
    assert sequence.n_prompt == 2 and sequence.lists(3) and sequence.lists(2)
    assert not sequence.lists(4) and not sequence.lists(1)
    sequence.drew(3)
    assert sequence.n_prompt == 2, "the first draw's"
    sequence.edits = Edits(presence=1.0)
    assert not sequence.lists(3), "another one"
