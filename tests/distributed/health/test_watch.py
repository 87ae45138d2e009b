"""Verdicts on the reports of four ranks."""

import pytest

from octavo.distributed.health.watch import UNHURRIED, RankMonitor, Report

TIMEOUT = 30.0


def reports(beat, step=7, collectives=40, **changed):
    """Return the reports of four ranks, of which some are others."""
    given = {int(name[-1]): report for name, report in changed.items()}
    return {rank: given.get(rank, Report(beat, step, collectives, False)) for rank in range(4)}


def watched(*rounds):
    """Return a watch that has seen reports, one a second."""
    watch = RankMonitor(ranks=4, timeout=TIMEOUT)
    for second, found in enumerate(rounds):
        watch.update(found, float(second))
    return watch


def test_nothing_is_wrong_while_all_are_heard_and_move():
    watch = watched(*(reports(second, collectives=second) for second in range(100)))
    assert watch.diagnose() is None


def test_a_rank_that_is_not_heard_is_gone_after_the_timeout():
    gone = Report(3, 6, 39, False)
    rounds = [reports(second, collectives=second, rank_2=gone) for second in range(32)]
    assert watched(*rounds[:31]).diagnose() is None
    verdict = watched(*rounds).diagnose()
    assert verdict.blamed == (2,)
    assert verdict.text == "rank 2 of 4 is gone: no report, for 31 s, at step 6."


def test_after_an_alarm_it_is_gone_within_seconds():
    watch = watched(*(reports(second, collectives=second, rank_2=Report(3, 6, 39, False)) for second in range(5)))
    assert watch.diagnose() is None
    watch.alarm = 4.0
    assert watch.diagnose().blamed == (2,)


def test_a_rank_that_was_never_heard_is_gone():
    watch = watched(*({rank: Report(second, 0, 0, False) for rank in (0, 1, 3)} for second in range(32)))
    assert watch.diagnose().text == "rank 2 of 4 is gone: no report, for 31 s, before the first step."


def test_the_rank_that_is_behind_hangs():
    watch = watched(*(reports(second, rank_1=Report(second, 7, 39, False)) for second in range(32)))
    verdict = watch.diagnose()
    assert verdict.blamed == (1,)
    assert verdict.text.startswith("rank 1 of 4 is missing: it has not entered a collective")
    assert verdict.text.endswith("for 31 s, at step 7.")


def test_a_rank_that_is_silent_is_no_less_gone_where_the_others_wait_for_it():
    gone = Report(3, 7, 40, False)
    assert watched(*(reports(second, rank_2=gone) for second in range(32))).diagnose().blamed == (2,)


def test_nobody_hangs_while_one_moves():
    rounds = (reports(second, rank_1=Report(second, 7, second // 20, False)) for second in range(60))
    assert watched(*rounds).diagnose() is None


def test_where_nobody_is_behind_nobody_is_blamed():
    verdict = watched(*(reports(second) for second in range(32))).diagnose()
    assert verdict.blamed == ()
    assert verdict.text.startswith("no rank has made progress at step 7")


@pytest.mark.parametrize("step", [UNHURRIED])
def test_a_rank_may_take_its_time_where_it_says_so(step):
    watch = watched(*(reports(second, rank_0=Report(second, step, 2, False)) for second in range(90)))
    assert watch.diagnose() is None


def test_a_rank_that_has_left_is_not_missed():
    left = Report(3, 9, 99, True)
    watch = watched(*(reports(second, collectives=second, rank_3=left) for second in range(90)))
    assert watch.diagnose() is None


def test_a_process_that_was_stopped_itself_blames_nobody():
    watch = watched(*(reports(second, collectives=second) for second in range(3)))
    watch.update(reports(2, collectives=2), 500.0)
    assert watch.diagnose() is None
