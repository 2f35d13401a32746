"""Caches of the package: bounded, and each keeps what is in use."""

import threading

from logitless._cache import Cache, ThreadCache


def test_entries_in_use_stay_and_others_are_dropped():
    cache = Cache(8)
    cache.remember("hot", 0)
    for key in range(100):
        assert cache.remembered(key, lambda: key + 1) == key + 1
        assert cache.find("hot") == 0
        assert len(cache) <= 8
    assert {99, "hot"} <= cache.entries().keys() and cache.find(1) is None
    assert cache[99] == 100
    cache.remember(99, "other")
    assert cache.find(99) == "other" and len(cache) <= 8


def test_one_entry_is_the_least():
    cache = Cache(1)
    cache.remember(1, "one")
    assert cache.find(1) == "one" and len(cache) == 1


def test_forgotten_entries_are_gone():
    cache = Cache(4)
    for key in range(4):
        cache.remember(key, key + 1)
    cache.forget(0, 3, 7)
    assert cache.entries() == {1: 2, 2: 3}


def test_failures_are_not_cached():
    cache = Cache(4)
    for _ in range(2):
        try:
            cache.remembered(1, lambda: 1 / 0)
        except ZeroDivisionError:
            pass
    assert len(cache) == 0 and cache.remembered(1, lambda: 2) == 2


def test_threads_have_their_own():
    cache, seen = ThreadCache(4), []
    cache.remember(1, "main")
    thread = threading.Thread(target=lambda: (seen.append(cache.find(1)), cache.remember(1, "other")))
    thread.start()
    thread.join()
    assert seen == [None] and cache.find(1) == "main"
