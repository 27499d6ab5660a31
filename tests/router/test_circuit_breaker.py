import pytest

from pdserve_router.workers.circuit_breaker import CircuitBreaker
from support.clock import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock) -> CircuitBreaker:
    return CircuitBreaker(clock=clock)


def fail(breaker: CircuitBreaker, times: int) -> None:
    for _ in range(times):
        breaker.report_failure()


def test_three_failures_in_a_row_open_it(breaker) -> None:
    fail(breaker, 2)
    assert breaker.retry_in_s == 0
    fail(breaker, 1)
    assert breaker.is_open
    assert breaker.retry_in_s == 1


def test_a_success_between_them_starts_the_count_anew(breaker) -> None:
    fail(breaker, 2)
    breaker.report_success()
    fail(breaker, 2)
    assert not breaker.is_open


def test_failures_of_what_was_under_way_do_not_make_it_longer(breaker) -> None:
    fail(breaker, 200)
    assert breaker.retry_in_s == 1


def test_it_stays_open_until_it_is_closed(breaker, clock) -> None:
    fail(breaker, 3)
    breaker.report_success()  # of what was under way
    clock.now_s += 100
    assert breaker.is_open
    assert breaker.retry_in_s == 0
    breaker.close()
    assert not breaker.is_open
    breaker.report_success()
    fail(breaker, 3)
    assert breaker.retry_in_s == 1


def test_failing_trials_double_the_backoff_up_to_thirty_seconds(breaker, clock) -> None:
    fail(breaker, 3)
    waits = []
    for _ in range(7):
        waits.append(breaker.retry_in_s)
        clock.now_s += breaker.retry_in_s
        breaker.open()
    assert waits == [1, 2, 4, 8, 16, 30, 30]


def test_one_that_must_not_open_counts_and_opens_with_the_next_failure(breaker) -> None:
    for _ in range(5):
        breaker.report_failure(may_open=False)
    assert not breaker.is_open
    breaker.report_failure()
    assert breaker.is_open


def test_closing_it_keeps_the_backoff(breaker) -> None:
    fail(breaker, 3)
    breaker.close()
    assert breaker.retry_in_s == 0
    fail(breaker, 3)
    assert breaker.retry_in_s == 2
