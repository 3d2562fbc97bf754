from gateway.inference.crash_breaker import (
    CRASH_MEMORY_S,
    CRASHES_MAX,
    FINGERPRINTS_MAX,
    CrashBreaker,
    request_fingerprint,
)
from tests.support.waiting import StoppedClock


def test_two_crashes_refuse_a_request_for_a_while() -> None:
    clock = StoppedClock()
    suspects = CrashBreaker(clock)
    for crashes in range(CRASHES_MAX):
        assert suspects.crashes(b"a") == crashes
        assert not suspects.is_open(b"a")
        suspects.record_crash(b"a", crashes)
        suspects.record_crash(b"a", crashes)  # as of a second call of the same prompt
    assert suspects.is_open(b"a")
    assert not suspects.is_open(b"b")
    clock.now_s += CRASH_MEMORY_S + 1
    assert not suspects.is_open(b"a")


def test_only_the_latest_are_remembered() -> None:
    suspects = CrashBreaker(StoppedClock())
    for i in range(FINGERPRINTS_MAX + 10):
        suspects.record_crash(b"%d" % i, i)
    assert suspects.crashes(b"9") == 0
    assert suspects.crashes(b"10") == 1
    assert suspects.crashes(b"%d" % (FINGERPRINTS_MAX + 9)) == 1


def test_a_fingerprint_knows_model_account_and_tokens() -> None:
    prints = {
        request_fingerprint("@cf/a/b", b"s" * 16, b"tokens"),
        request_fingerprint("@cf/a/c", b"s" * 16, b"tokens"),
        request_fingerprint("@cf/a/b", b"t" * 16, b"tokens"),
        request_fingerprint("@cf/a/b", b"s" * 16, b"tokenz"),
    }
    assert len(prints) == 4
    assert request_fingerprint("@cf/a/b", b"s" * 16, b"tokens") in prints
