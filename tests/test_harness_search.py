import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_fsdp.amounts import parse_bytes
from lightning_fsdp.harness.amounts import format_bytes
from lightning_fsdp.harness.command_line import Interrupted
from lightning_fsdp.harness.search import largest_that_fits


def up_to(limit):
    return lambda size: None if size <= limit else f"{size} is more than {limit}"


def sizes(search):
    return [tried.size for tried in search.tried if not tried.is_verification]


@given(limit=st.integers(0, 300), cap=st.integers(1, 300))
def test_it_finds_the_limit_or_the_cap_and_tries_no_size_twice(limit, cap):
    search = largest_that_fits(up_to(limit), cap=cap)
    assert search.largest == (min(limit, cap) or None)
    assert len(set(sizes(search))) == len(sizes(search)) <= 2 * cap.bit_length() + 1
    assert max(sizes(search)) <= cap
    assert all((tried.failure is None) == (tried.size <= limit) for tried in search.tried)


@given(limit=st.integers(0, 300), cap=st.integers(1, 300), guess=st.integers(-5, 400))
def test_a_guess_changes_the_way_and_not_the_end(limit, cap, guess):
    search = largest_that_fits(up_to(limit), cap=cap, guess=lambda: guess)
    assert search.largest == (min(limit, cap) or None)
    assert len(set(sizes(search))) == len(sizes(search)) <= 2 * cap.bit_length() + 4
    assert max(sizes(search)) <= cap
    assert all((tried.failure is None) == (tried.size <= limit) for tried in search.tried)


def test_a_good_guess_saves_most_attempts():
    right = largest_that_fits(up_to(100), cap=1000, guess=lambda: 100)
    assert sizes(right) == [1, 2, 100, 101]
    near = largest_that_fits(up_to(99), cap=1000, guess=lambda: 100)
    assert sizes(near) == [1, 2, 100, 99]


def test_nothing_fits_where_the_smallest_fails():
    search = largest_that_fits(up_to(0), cap=64)
    assert search.largest is None
    assert sizes(search) == [1]
    assert search.limit == "1: 1 is more than 0"


def test_the_limit_is_the_reason_of_the_size_above():
    assert largest_that_fits(up_to(5), cap=64).limit == "6: 6 is more than 5"
    assert largest_that_fits(up_to(99), cap=8).limit == "nothing larger was tried: the cap is 8"


@given(limit=st.integers(0, 100), full=st.integers(0, 100), cap=st.integers(1, 100))
def test_what_is_found_has_passed_at_full_length(limit, full, cap):
    verified = []

    def verify(size):
        verified.append(size)
        return up_to(full)(size)

    search = largest_that_fits(up_to(limit), cap=cap, verify=verify)
    assert search.largest == (min(limit, full, cap) or None)
    assert [tried.size for tried in search.tried if tried.is_verification] == verified
    assert verified == sorted(set(verified), reverse=True)
    if search.largest is not None:
        assert verified[-1] == search.largest
    if full < min(limit, cap):
        assert "at full length" in search.limit


@pytest.mark.parametrize(
    ("in_attempt", "largest", "limit"),
    [(3, 2, "4: interrupted"), (5, 4, "6: interrupted"), (7, 5, "at full length, 5: interrupted")],
)
def test_an_interrupt_leaves_the_attempts_so_far(in_attempt, largest, limit):
    attempts = []

    def attempt(size):
        attempts.append(size)
        if len(attempts) == in_attempt:
            raise KeyboardInterrupt
        return up_to(5)(size)

    with pytest.raises(Interrupted) as raised:
        largest_that_fits(attempt, cap=64, verify=lambda size: attempt(size))
    found = raised.value.part
    assert (found.largest, found.limit) == (largest, limit)
    assert [tried.size for tried in found.tried] == attempts


def test_an_interrupt_of_the_first_attempt_leaves_nothing():
    def attempt(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as raised:
        largest_that_fits(attempt, cap=64)
    assert not isinstance(raised.value, Interrupted)


def test_a_cap_below_one_is_refused():
    with pytest.raises(ValueError, match="cap: expected at least 1, got 0"):
        largest_that_fits(up_to(1), cap=0)


def test_amounts_are_read_and_written():
    assert parse_bytes("80GB") == 80 * 10**9
    assert parse_bytes("1.5 gib") == 3 * 2**29
    assert parse_bytes("512") == 512
    assert [format_bytes(n) for n in (1_500_000, 2_350_000_000)] == ["1.5 MB", "2.35 GB"]
    for wrong in ("", "0GB", "-1GB", "GB", "1 QB", "80 G B", "9" * 400):
        with pytest.raises(ValueError, match="expected an amount of memory"):
            parse_bytes(wrong)
