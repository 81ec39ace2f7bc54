"""The error tree: facts are fields, the message is one line made from them."""

from __future__ import annotations

import pickle

import pytest

from flashnext_drv import errors
from flashnext_drv.errors import DriverError, FlashNextError, LeakError, OutOfMemory, UsageError, bytes_text


def test_message_is_made_from_the_facts() -> None:
    error = UsageError("pages ran out", because="held by a, b", do="close one", free_pages=3, wanted_pages=5)
    assert str(error) == "pages ran out (free_pages=3, wanted_pages=5): held by a, b; close one"
    assert (error.free_pages, error.facts["wanted_pages"], error.do) == (3, 5, "close one")


def test_driver_errors_name_call_values_and_code() -> None:
    error = OutOfMemory("cuMemAlloc", 2, "CUDA_ERROR_OUT_OF_MEMORY", size_bytes=2147483648,
                        because="free 1.2 GiB, largest holder experts.cache 18.0 GiB",
                        do="lower expert_lines")
    assert str(error) == ("cuMemAlloc(size_bytes=2147483648) returned CUDA_ERROR_OUT_OF_MEMORY: free "
                          "1.2 GiB, largest holder experts.cache 18.0 GiB; lower expert_lines")
    assert (error.call, error.code, error.size_bytes) == ("cuMemAlloc", 2, 2147483648)
    assert isinstance(error, DriverError) and isinstance(error, FlashNextError)


@pytest.mark.parametrize("name", [n for n in errors.__all__ if n != "bytes_text"])
def test_every_error_belongs_to_the_tree(name: str) -> None:
    assert issubclass(getattr(errors, name), FlashNextError)
    assert name in (errors.__doc__ or "")


def test_errors_survive_another_process() -> None:
    error = pickle.loads(pickle.dumps(UsageError("a", because="b", do="c", n=1)))
    assert str(error) == "a (n=1): b; c" and error.n == 1
    assert "one" in str(pickle.loads(pickle.dumps(LeakError("left", entries=("one",)))))


@pytest.mark.parametrize(("size", "text"),
                         [(0, "0 B"), (512, "512 B"), (1536, "1.5 KiB"), (2 << 20, "2.0 MiB"),
                                            (18 << 30, "18.0 GiB"), (5 << 40, "5120.0 GiB")])
def test_sizes_for_people(size: int, text: str) -> None:
    assert bytes_text(size) == text
