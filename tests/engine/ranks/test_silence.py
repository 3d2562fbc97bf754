"""engine/ranks/silence.py: what counts as a rank's silence, and what does not."""

import os
import threading
import time

from engine.ranks.silence import Silence, active_s


def test_a_rank_that_does_nothing_is_silent_for_as_long_as_it_is_looked_at() -> None:
    silence = Silence(10.0, lambda: 5.0)
    assert silence.look(10.1, b"first", 2.0) == 0
    for index in range(1, 11):
        silent_s = silence.look(10.1 + 0.1 * index, b"first", 2.0)
    assert abs(silent_s - 1.0) < 1e-9
    assert silence.look(11.2, b"second", 2.0) == 0
    assert abs(silence.look(11.3, b"second", 2.0) - 0.1) < 1e-9


def test_a_time_in_which_nobody_looked_is_not_counted() -> None:
    silence = Silence(0.0, lambda: 0.0)
    silence.look(0.1, b"", 2.0)
    assert silence.look(60.0, b"", 2.0) == 0.25


def test_computing_and_waiting_for_a_core_are_excused_up_to_a_limit() -> None:
    active = [7.0]
    silence = Silence(0.0, lambda: active[0])
    silence.look(0.0, b"", 2.0)
    for index in range(1, 61):
        active[0] += 0.1
        silent_s = silence.look(0.1 * index, b"", 2.0)
        assert abs(silent_s - max(0.0, 0.1 * index - 2.0)) < 1e-9
    assert silent_s > 3.9


def test_what_a_rank_did_while_nobody_waited_for_it_is_of_no_account() -> None:
    active = [0.0]
    silence = Silence(0.0, lambda: active[0])
    silence.look(0.1, b"", 2.0)
    silence.look(0.2, b"", 2.0)
    silence.rest(9.0)
    active[0] = 1.5
    assert silence.look(9.1, b"", 2.0) == 0
    assert abs(silence.look(9.2, b"", 2.0) - 0.1) < 1e-9


def test_the_kernel_tells_how_long_a_process_was_active() -> None:
    before = active_s(os.getpid())
    until = time.process_time() + 0.05
    while time.process_time() < until:
        pass
    assert active_s(os.getpid()) >= before + 0.04
    assert active_s(1 << 30) == 0.0


def test_threads_that_load_for_a_rank_that_waits_for_them_are_its_activity() -> None:
    before, done = active_s(os.getpid()), threading.Event()

    def load() -> None:
        until = time.thread_time() + 0.05
        while time.thread_time() < until:
            pass
        while not done.is_set():
            done.wait(0.01)

    thread = threading.Thread(target=load)
    thread.start()
    while active_s(os.getpid()) < before + 0.04:
        thread.join(0.01)
    done.set()
    thread.join()


def test_threads_excuse_no_more_than_the_time_that_went_by() -> None:
    active = [0.0]
    silence = Silence(0.0, lambda: active[0])
    silence.look(0.0, b"", 2.0)
    active[0] = 3.0  # of thirty threads
    assert abs(silence.look(0.1, b"", 2.0)) < 1e-9
    for index in range(2, 12):
        silent_s = silence.look(0.1 * index, b"", 2.0)
    assert abs(silent_s - 1.0) < 1e-9
