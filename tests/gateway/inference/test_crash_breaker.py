from gateway.inference.crash_breaker import CRASHES_MAX, REMEMBERED_S, SUSPECTS_MAX, Suspects, fingerprint


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_two_crashes_refuse_a_request_for_a_while() -> None:
    clock = Clock()
    suspects = Suspects(clock)
    for crashes in range(CRASHES_MAX):
        assert suspects.crashes(b"a") == crashes
        assert not suspects.refused(b"a")
        suspects.note(b"a")
    assert suspects.refused(b"a")
    assert not suspects.refused(b"b")
    clock.now += REMEMBERED_S + 1
    assert not suspects.refused(b"a")


def test_only_the_latest_are_remembered() -> None:
    suspects = Suspects(Clock())
    for i in range(SUSPECTS_MAX + 10):
        suspects.note(b"%d" % i)
    assert suspects.crashes(b"9") == 0
    assert suspects.crashes(b"10") == 1
    assert suspects.crashes(b"%d" % (SUSPECTS_MAX + 9)) == 1


def test_a_fingerprint_knows_model_account_and_tokens() -> None:
    prints = {
        fingerprint("@cf/a/b", b"s" * 16, b"tokens"),
        fingerprint("@cf/a/c", b"s" * 16, b"tokens"),
        fingerprint("@cf/a/b", b"t" * 16, b"tokens"),
        fingerprint("@cf/a/b", b"s" * 16, b"tokenz"),
    }
    assert len(prints) == 4
    assert fingerprint("@cf/a/b", b"s" * 16, b"tokens") in prints
