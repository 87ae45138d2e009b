"""No garbage is collected in a block, whoever else has one. That captures have such a block: train/test_replay.py."""

import gc
import threading
from concurrent.futures import ThreadPoolExecutor

from octavo._util.collector import no_collection


def test_two_threads_capture_one_after_the_other() -> None:
    """Otherwise the first to end would enable the collector during the capture of the second."""
    inside = threading.Event()

    def second() -> bool:
        inside.set()
        with no_collection():
            return gc.isenabled()

    with ThreadPoolExecutor(1) as pool:
        with no_collection(), no_collection():
            late = pool.submit(second)
            assert inside.wait(60) and not gc.isenabled() and not late.done()
        assert not late.result(60)
    assert gc.isenabled()
