"""Groups of ranks from Python: threads, callbacks, and MPI as in docs/use/groups.md."""

import re
import subprocess
import sys
import threading
import types
from pathlib import Path

import numpy as np
import pytest
from logitless import Communicator, LogitlessError
from ports import held_port

PAGE = Path(__file__).parents[2] / "docs/use/groups.md"


def run(bodies):
    """Runs each function in a thread; returns what each returned or raised."""
    results = [None] * len(bodies)

    def one(i):
        try:
            results[i] = bodies[i]()
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=one, args=(i,)) for i in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def exchange(communicator):
    size, rank = communicator.size, communicator.rank
    mine, all = np.full(5, rank, np.int64), np.empty((size, 5), np.int64)
    communicator.all_gather(mine, all)
    assert (all == np.arange(size)[:, None]).all()
    all[:] = -1
    communicator.all_gather_host(mine, all)
    assert (all == np.arange(size)[:, None]).all()
    slices = np.arange(size, dtype=np.int32) + 100 * rank
    of_all = np.empty_like(slices)
    communicator.all_to_all(slices, of_all)
    assert (of_all == 100 * np.arange(size) + rank).all()
    communicator.all_gather(b"", bytearray())
    return "ok"


def test_threads():
    assert run([lambda c=c: exchange(c) for c in Communicator.threads(3)]) == ["ok"] * 3


def test_a_rank_that_gives_up():
    ranks = Communicator.threads(2, limit=3600.0)
    ranks[1].abort("no memory")
    (raised,) = run([lambda: exchange(ranks[0])])
    assert isinstance(raised, LogitlessError) and "rank 1 gave up: no memory" in str(raised)


PROCESS = """
import sys
import numpy as np
from logitless import Communicator, LogitlessError
rank, port = map(int, sys.argv[1:])
c = Communicator.tcp("127.0.0.1", port, rank, 3)
all = np.empty((3, 5), np.int64)
c.all_gather(np.full(5, rank), all)
assert (all == np.arange(3)[:, None]).all()
if rank == 1:
    c.abort("no memory")
else:
    try:
        c.all_gather(b"", bytearray())
    except LogitlessError as error:
        assert "rank 1 gave up: no memory" in str(error), error
    else:
        raise AssertionError("it went on")
"""


def test_processes():
    with held_port() as port:
        ranks = [subprocess.Popen([sys.executable, "-c", PROCESS, str(rank), str(port)], stderr=subprocess.PIPE, text=True)
                 for rank in range(3)]
        try:
            assert [rank.communicate(timeout=60)[1] for rank in ranks] == [""] * 3
            assert [rank.returncode for rank in ranks] == [0] * 3
        finally:
            for rank in ranks:
                rank.kill()


def test_what_a_callback_raises_is_the_cause():
    def fails(mine, all):
        raise KeyError("the link")

    reasons = []
    communicator = Communicator.callbacks(0, 1, fails, fails, abort=reasons.append)
    for _ in range(2):
        with pytest.raises(LogitlessError, match=r"call 1 \(all_gather of 2 bytes\) on rank 0") as raised:
            communicator.all_gather(b"ab", bytearray(2))
        assert isinstance(raised.value.__cause__, KeyError)
    # Others may still wait for this rank: its caller gets the reason, once.
    communicator.abort("it has failed")
    communicator.abort("once more")
    assert reasons == ["it has failed"]
    Communicator.callbacks(0, 1, fails, fails, abort=reasons.append).abort("stop")
    assert reasons == ["it has failed", "stop"]


def test_refusals():
    with pytest.raises(ValueError, match="size: expected 1 or more, got 0"):
        Communicator.threads(0)
    with pytest.raises(ValueError, match=r"rank: expected one in \[0, 2\), got 2"):
        Communicator.callbacks(2, 2, exchange, exchange)
    with pytest.raises(ValueError, match=r"port: expected one in \[1, 65535\], got 0"):
        Communicator.tcp("localhost", 0, 0, 2)
    (one,) = Communicator.threads(1)
    with pytest.raises(ValueError, match="expected 3 bytes, got 4"):
        one.all_gather(b"abc", bytearray(4))
    with pytest.raises(ValueError, match="memory that can be written"):
        one.all_gather(b"abc", b"abc")
    pair = Communicator.threads(2)
    with pytest.raises(ValueError, match="a multiple of 2 bytes, got 3"):
        pair[0].all_to_all(b"abc", bytearray(3))


class FakeMpi:
    """The calls of an mpi4py communicator that the page makes, between threads."""

    def __init__(self, mine):
        self.mine = mine

    def Get_rank(self):
        return self.mine.rank

    def Get_size(self):
        return self.mine.size

    def Allgather(self, sent, received):
        assert sent[1] == received[1] == "byte"
        self.mine.all_gather(sent[0], received[0])

    def Alltoall(self, sent, received):
        assert sent[1] == received[1] == "byte"
        self.mine.all_to_all(sent[0], received[0])

    def Abort(self, code):
        self.mine.abort(f"code {code}")


def test_mpi_as_the_page_brings_it(monkeypatch):
    (snippet,) = [code for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "mpi4py" in code]
    module = types.ModuleType("mpi4py")
    module.MPI = types.SimpleNamespace(BYTE="byte")
    monkeypatch.setitem(sys.modules, "mpi4py", module)
    space = {}
    exec(snippet, space)
    inner = Communicator.threads(3)
    ranks = [space["from_mpi"](FakeMpi(c)) for c in inner]
    assert run([lambda c=c: exchange(c) for c in ranks]) == ["ok"] * 3
    ranks[2].abort("stop")
    (raised,) = run([lambda: exchange(ranks[0])])
    assert isinstance(raised, LogitlessError) and "rank 2 gave up: code 1" in str(raised.__cause__)


def test_a_rank_that_closes_has_left():
    first, second = Communicator.threads(2)
    second.close()
    second.close()  # once is enough
    with pytest.raises(LogitlessError, match="rank 1 of 2 left"):
        exchange(first)
    for call in (second.all_gather, second.all_gather_host, second.all_to_all):
        with pytest.raises(ValueError, match=r"communicator: expected one that is open"):
            call(b"12", bytearray(4))
