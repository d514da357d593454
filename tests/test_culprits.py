"""Who is to blame is a pure function: proven on made-up trainings, and on the cases that people meet."""

import dataclasses
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.watch import stacks
from evenstep.watch.culprits import Condition, Finding, Helper, Statement, judge
from evenstep.watch.patience import LONG
from evenstep.watch.pulse import BACKWARD, DATA, EVALUATE, FORWARD, NOTES, UPDATE, WEIGHTS, Where
from evenstep.watch.stacks import Frame, Stack
from evenstep.watch.verdict import pronounce, statement_of, verdict_of

TASK = Frame("/home/me/task.py", 57, "losses")
LOOP = Frame(f"{stacks.OURS}/loop.py", 100, "_taken")
ALL_REDUCE = Frame("/x/site-packages/torch/distributed/distributed_c10d.py", 3151, "all_reduce")
ENGINE = Frame("/x/site-packages/torch/autograd/graph.py", 979, "_engine_run_backward")
DEBUGGER = Frame("/usr/lib/python3.11/bdb.py", 95, "user_line")
COMPILER = Frame("/x/site-packages/torch/_dynamo/eval_frame.py", 40, "_fn")

OWN_CODE = (LOOP, TASK)
IN_EXCHANGE = (LOOP, TASK, ALL_REDUCE)
IN_BACKWARD = (LOOP, ENGINE)  # nothing tells whether it computes or waits


def told(
    rank: int,
    phase: int,
    stack: Stack,
    *,
    step: int = 3,
    exchanges: int | None = None,
    condition: Condition = Condition.ANSWERS,
    still: float = 31.0,
    patience: float = 30.0,
) -> Statement:
    return Statement(
        rank=rank,
        host=f"h{rank // 2}",
        pid=100 + rank,
        created=1.5,
        condition=condition,
        where=Where(0, step, 0, phase),
        still=still,
        patience=patience,
        exchanges=exchanges,
        stack=stack,
    )


def found(*statements: Statement) -> Finding | None:
    return judge(statements)


# Cases


@pytest.mark.parametrize("phase", [DATA, FORWARD, UPDATE, EVALUATE])
@pytest.mark.parametrize("victims", [IN_EXCHANGE, IN_BACKWARD])
def test_a_rank_stuck_in_its_own_code_is_named_and_its_victims_are_not(phase: int, victims: Stack) -> None:
    culprit = told(1, phase, OWN_CODE, exchanges=8)
    others = [told(rank, BACKWARD, victims, exchanges=9) for rank in (0, 2)]
    assert found(others[0], culprit, others[1]) == Finding((1,))


def test_two_ranks_stuck_at_the_same_place_are_both_named() -> None:
    stuck = [told(rank, DATA, OWN_CODE, exchanges=8) for rank in (0, 2)]
    assert found(stuck[0], told(1, BACKWARD, IN_BACKWARD, exchanges=9), stuck[1]) == Finding((0, 2))


@pytest.mark.parametrize("condition", [Condition.STOPPED, Condition.SILENT, Condition.GONE])
def test_a_rank_that_does_not_answer_is_named(condition: Condition) -> None:
    lost = told(0, BACKWARD, (), condition=condition)
    assert found(lost, told(1, BACKWARD, IN_BACKWARD, exchanges=9), told(2, NOTES, IN_EXCHANGE, exchanges=9)) == (
        Finding((0,))
    )


def test_a_rank_that_keeps_the_interpreter_to_itself_is_named_by_the_stack_another_process_saw() -> None:
    held = told(0, FORWARD, OWN_CODE, condition=Condition.SILENT)
    assert found(held, told(1, BACKWARD, IN_BACKWARD, exchanges=9)) == Finding((0,))


def test_a_rank_that_only_answers_late_is_not_named_for_it() -> None:
    """Its stack, which another process saw, says that it waits as the others do."""
    late = told(0, NOTES, IN_EXCHANGE, condition=Condition.SILENT, exchanges=9)
    culprit = told(1, DATA, OWN_CODE, exchanges=8)
    assert found(late, culprit, told(2, NOTES, IN_EXCHANGE, exchanges=9)) == Finding((1,))


def test_a_rank_that_has_come_to_its_end_is_named_where_others_wait_for_it() -> None:
    ended = told(2, WEIGHTS, (), condition=Condition.DONE, exchanges=8)
    assert found(told(0, NOTES, IN_EXCHANGE, exchanges=9), ended) == Finding((2,))
    assert found(told(0, BACKWARD, IN_BACKWARD, exchanges=9), ended) == Finding((2,))


def test_a_rank_that_has_come_to_its_end_is_not_to_blame_for_what_another_does_alone() -> None:
    ended = told(1, WEIGHTS, (), condition=Condition.DONE, exchanges=8)
    assert found(told(0, WEIGHTS, OWN_CODE, exchanges=8), ended) == Finding((0,))


def test_a_rank_that_left_out_an_exchange_is_named_though_it_waits_as_well() -> None:
    waiting = [told(rank, FORWARD, IN_EXCHANGE, exchanges=9) for rank in (0, 2)]
    further = told(1, BACKWARD, IN_BACKWARD, exchanges=9)
    assert found(waiting[0], further, waiting[1]) == Finding((1,), apart=True)
    further = told(1, NOTES, (LOOP, ALL_REDUCE), exchanges=9)
    assert found(waiting[0], further, waiting[1]) == Finding((1,), apart=True)
    assert found(waiting[0], further) == Finding((1,), apart=True)


@pytest.mark.parametrize("stack", [IN_EXCHANGE, IN_BACKWARD, OWN_CODE])
def test_nobody_is_named_where_all_are_at_the_same_place(stack: Stack) -> None:
    """The network between them, or what they all read from, has failed."""
    assert found(*(told(rank, BACKWARD, stack, exchanges=9) for rank in range(3))) == Finding(())


def test_a_rank_that_is_alone_is_named() -> None:
    assert found(told(0, BACKWARD, IN_BACKWARD)) == Finding((0,))


def test_who_may_take_its_time_is_waited_for() -> None:
    victim = told(1, BACKWARD, IN_BACKWARD, exchanges=9)
    for excused in (
        told(0, WEIGHTS, OWN_CODE, exchanges=8, patience=LONG),
        told(0, FORWARD, (*OWN_CODE, DEBUGGER), exchanges=8, still=10 * LONG),
        told(0, FORWARD, (*OWN_CODE, COMPILER), exchanges=8),
        told(0, FORWARD, (), condition=Condition.TRACED),
        told(0, WEIGHTS, (), condition=Condition.SILENT, patience=LONG),
    ):
        assert found(excused, victim) is None
    assert found(told(0, FORWARD, (*OWN_CODE, COMPILER), exchanges=8, still=2 * LONG), victim) == Finding((0,))
    assert found(told(0, WEIGHTS, OWN_CODE, exchanges=8, patience=LONG, still=2 * LONG), victim) == Finding((0,))


# A made-up training: ranks go through the same places, and meet at some of them


@st.composite
def standstills(draw: st.DrawFn) -> tuple[list[Statement], set[int]]:
    """A training in which some ranks get stuck at a place of their own, and the others wait for them."""
    world = draw(st.integers(2, 6))
    places = [
        (step, phase, meets)
        for step in range(3)
        for phase, meets in ((DATA, False), (FORWARD, draw(st.booleans())), (BACKWARD, True), (UPDATE, False))
    ]
    stuck_at = draw(st.sampled_from([n for n, (_, phase, _) in enumerate(places[:-1]) if phase != BACKWARD]))
    culprits = draw(st.sets(st.integers(0, world - 1), min_size=1, max_size=world - 1))
    waits_at = next(n for n in range(stuck_at, len(places)) if places[n][2])
    before = sum(meets for _, _, meets in places[:stuck_at])
    statements = []
    for rank in range(world):
        step, phase, _ = places[stuck_at if rank in culprits else waits_at]
        stack = OWN_CODE if rank in culprits else IN_BACKWARD if phase == BACKWARD else IN_EXCHANGE
        begun = before + (rank not in culprits)
        statements.append(told(rank, phase, stack, step=step, exchanges=begun))
    return statements, culprits


@given(standstills(), st.randoms(use_true_random=False))
def test_exactly_the_stuck_ranks_are_named(
    standstill: tuple[list[Statement], set[int]], chance: random.Random
) -> None:
    statements, culprits = standstill
    chance.shuffle(statements)
    finding = judge(statements)
    assert finding is not None and set(finding.culprits) == culprits and not finding.apart


anything = st.builds(
    told,
    rank=st.just(0),
    phase=st.sampled_from([DATA, FORWARD, BACKWARD, UPDATE, NOTES, EVALUATE]),
    stack=st.sampled_from([OWN_CODE, IN_EXCHANGE, IN_BACKWARD, ()]),
    step=st.integers(0, 2),
    exchanges=st.none() | st.integers(0, 4),
    condition=st.sampled_from([*[Condition.ANSWERS] * 4, *Condition]),
    patience=st.sampled_from([30.0, LONG]),
)


@given(st.lists(anything, min_size=1, max_size=6))
def test_who_waits_in_an_exchange_is_never_named_while_another_has_not_come_to_it(drawn: list[Statement]) -> None:
    statements = [dataclasses.replace(one, rank=rank) for rank, one in enumerate(drawn)]
    finding = judge(statements)
    if finding is None or finding.apart:
        return
    for named in (statements[rank] for rank in finding.culprits):
        if named.condition is not Condition.DONE:
            assert not named.waits
            assert not named.excused or named.condition is Condition.GONE


@given(st.lists(anything, min_size=1, max_size=6))
def test_who_left_an_exchange_out_has_come_further_or_is_in_the_minority(drawn: list[Statement]) -> None:
    statements = [dataclasses.replace(one, rank=rank) for rank, one in enumerate(drawn)]
    finding = judge(statements)
    if finding is None or not finding.apart:
        return
    rest = [one for one in statements if one.rank not in finding.culprits]
    assert any(one.waits for one in rest), "somebody has to wait in what they left out"


@given(st.lists(anything, min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_whose_turn_it_is_to_speak_changes_nothing(drawn: list[Statement], chance: random.Random) -> None:
    statements = [dataclasses.replace(one, rank=rank) for rank, one in enumerate(drawn)]
    finding = judge(statements)
    chance.shuffle(statements)
    again = judge(statements)
    assert (finding and set(finding.culprits)) == (again and set(again.culprits))


# What is said


def said(*statements: Statement) -> list[str]:
    finding = judge(statements)
    assert finding is not None
    return [one.sentence for one in pronounce(statements, finding).culprits]


def test_the_sentence_says_who_where_in_what_and_who_waits() -> None:
    victims = [told(rank, BACKWARD, IN_BACKWARD, exchanges=9) for rank in (0, 2)]
    stuck = told(1, FORWARD, OWN_CODE, exchanges=8)
    assert said(victims[0], stuck, victims[1]) == [
        "rank 1 on h0 (pid 101) is stuck in forward of step 4 of epoch 1, at /home/me/task.py:57 in losses; "
        "ranks 0 and 2 wait for it"
    ]
    held = told(1, FORWARD, OWN_CODE, condition=Condition.SILENT)
    assert said(victims[0], held) == [
        "rank 1 on h0 (pid 101) is stuck in forward of step 4 of epoch 1, where some code keeps the interpreter "
        "to itself, at /home/me/task.py:57 in losses; rank 0 waits for it"
    ]
    stopped = told(1, DATA, (), condition=Condition.STOPPED)
    assert said(victims[0], stopped) == [
        "rank 1 on h0 (pid 101) does not answer: it is stopped, as by SIGSTOP, last seen in data of step 4 of "
        "epoch 1; rank 0 waits for it"
    ]
    further = told(1, NOTES, (LOOP, ALL_REDUCE), exchanges=9)
    waiting = told(0, FORWARD, IN_EXCHANGE, exchanges=9)
    assert said(waiting, further) == [
        f"rank 1 on h0 (pid 101) is in comparing notes of step 4 of epoch 1, at {ALL_REDUCE.in_words}, and left "
        "out the exchange in which rank 0 waits: forward of step 4 of epoch 1, at /home/me/task.py:57 in losses"
    ]


def test_a_data_loading_process_is_named_for_its_rank() -> None:
    victim = told(0, BACKWARD, IN_BACKWARD, exchanges=9)
    reading = told(1, DATA, (LOOP,), exchanges=8)
    slow = dataclasses.replace(reading, helpers=(Helper(pid=7, stopped=False, stack=OWN_CODE),))
    assert (
        "data of step 4 of epoch 1: its data loading process 7 is at /home/me/task.py:57 in losses"
        in (said(victim, slow)[0])
    )
    stopped = dataclasses.replace(reading, helpers=(Helper(pid=7, stopped=True, stack=()),))
    assert "its data loading process 7 is stopped, as by SIGSTOP" in said(victim, stopped)[0]


def test_where_nobody_is_to_blame_the_first_rank_speaks_for_all() -> None:
    alike = [told(rank, BACKWARD, IN_BACKWARD, exchanges=9) for rank in range(5)]
    (sentence,) = said(*alike)
    assert sentence.startswith("rank 0 on h0 (pid 100) is in backward and sync of step 4 of epoch 1")
    assert "so are all ranks" in sentence


@given(st.lists(anything, min_size=1, max_size=4))
def test_what_hangs_on_the_board_is_what_was_said(drawn: Sequence[Statement]) -> None:
    """Through JSON, as the ranks' common store keeps it."""
    import json

    statements = [dataclasses.replace(one, rank=rank) for rank, one in enumerate(drawn)]
    assert [statement_of(json.loads(json.dumps(one.as_note()))) for one in statements] == statements
    finding = judge(statements)
    if finding is not None:
        verdict = pronounce(statements, finding)
        assert verdict_of(json.loads(json.dumps(verdict.as_note()))) == verdict
        assert verdict.text
