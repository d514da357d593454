"""Workers and the server killed, stopped and cut off at random: each sample once, and everybody's notes agree."""

from pathlib import Path

import pytest

from evenstep import UserError
from evenstep.service import chaos


@pytest.mark.slow
def test_each_sample_is_committed_once_whatever_is_killed(tmp_path: Path) -> None:
    lines: list[str] = []
    found = chaos.run(tmp_path / "chaos", workers=4, kills=3, lease_seconds=1.0, seed=1, say=lines.append)
    assert found.sound, found
    assert [epoch.rows for epoch in found.epochs] == [1, 1, 1]
    assert found.workers_killed >= 3 and found.servers_killed >= 3
    assert found.acknowledged > 0.5 * 3 * found.size, "the notes say something"
    said = (tmp_path / "chaos" / "server.log").read_text()
    assert "Traceback" not in said, said


def test_notes_that_contradict_each_other_are_found(tmp_path: Path) -> None:
    """Or agreement would prove nothing."""
    (tmp_path / "a.jsonl").write_text('{"will": [[0, 0, 5]]}\n{"did": [[0, 0, 5]]}\n')
    (tmp_path / "b.jsonl").write_text('{"will": [[0, 4, 9]]}\n{"did": [[0, 4, 9]]}\n')
    epoch = chaos.Audited(session="s", epoch=0, size=10, once=10, repeated=0, lost=0, rows=1, over=True)
    found = chaos.Outcome(epochs=[epoch], size=10, workers_killed=0, servers_killed=0, stalls=0, cuts=0)
    assert found.sound
    chaos.compare(tmp_path, found)
    assert "acknowledged twice: (0, 4) by a and b" in found.contradictions[0]
    assert "nobody committed it: [(0, 9)]" in found.contradictions[1]
    assert not found.sound


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(UserError, match="is not empty"):
        chaos.run(tmp_path, say=str)
