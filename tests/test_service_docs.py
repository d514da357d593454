"""docs/service.md: its commands and its script run as they stand, its recipe for other languages is the order."""

import hashlib
import re
import shlex
import socket
from pathlib import Path

import pytest

import commands
from evenstep.order.plan import Plan
from evenstep.service import order_pb2 as pb
from evenstep.service.handlers import CODES

PAGE = Path(__file__).parent.parent / "docs" / "service.md"
TEXT = PAGE.read_text()


@pytest.mark.slow
def test_what_the_page_tells_to_run_runs(tmp_path: Path) -> None:
    """At a port that is free here: 7077 may not be."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    said = ""
    server: commands.Command | None = None
    try:
        for kind, block in re.findall(r"```(sh|python)\n(.*?)```", TEXT, flags=re.DOTALL):
            block = block.replace("7077", port)
            if kind == "python":
                (tmp_path / "script.py").write_text(block)
                ran = commands.run("script.py", folder=tmp_path)
                assert (ran.code, ran.out.split()) == (0, ["20000"]), ran.err
                continue
            for line in block.splitlines():
                first, *words = shlex.split(line)
                assert first == "evenstep"
                if words[-1] == "&":
                    server = commands.start(*words[:-1], folder=tmp_path)
                    until_serving(server)
                    continue
                words += {"session": ["--server", f"127.0.0.1:{port}"], "serve": ["--port", port]}.get(
                    words[0], []
                )
                ran = commands.run(*words, folder=tmp_path)
                assert ran.code == 0, f"{line}: {ran.err}"
                said += ran.out
    finally:
        if server is not None:
            server.send(commands.signal.SIGTERM)
            server.wait()
    assert "session clicks: 10,000 samples" in said and "0 repeated, 0 lost" in said and "all 2 over" in said


def until_serving(server: commands.Command) -> None:
    server.until(lambda: "order service at" in server.said(), "serving")


# The recipe, followed word by word, with nothing of ours

WORD = 1 << 64


def mix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) % WORD
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % WORD
    return x ^ (x >> 31)


def samples(size: int, seed: int, epoch: int, positions: range) -> list[int]:
    text = f"str:shuffle\0int:{seed}\0int:{epoch}"
    key = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")

    def word(i: int) -> int:
        return mix((mix(key) + i * 0x9E3779B97F4A7C15) % WORD)

    if size <= 65536:
        order = sorted(range(size), key=word)
        return [order[position] for position in positions]
    bits = (size - 1).bit_length()
    d = [word(i) >> (64 - bits) for i in range(9)]

    def sample(x: int) -> int:
        while True:
            x = (x + d[0]) % (1 << bits)
            for i in range(1, 9):
                x = x * (d[i] | 1) % (1 << bits)
                x ^= x >> ((bits + 1) // 2)
            if x < size:
                return x

    return [sample(position) for position in positions]


@pytest.mark.parametrize("size", [1, 2, 1000, 65536, 65537, 1 << 20, 10**12, (1 << 62) - 1])
def test_the_recipe_for_other_languages_is_the_order(size: int) -> None:
    for seed, epoch in ((0, 0), (7, 3), (1 << 61, 1 << 40)):
        last = min(size, 20)
        ours = Plan(size=size, global_batch=1, seed=seed).block(epoch, 0, last)
        assert samples(size, seed, epoch, range(last)) == ours.tolist()


def test_the_test_values_are_right() -> None:
    rows = re.findall(r"\| ([\d,]+) \| ([\d, ]+) \|", TEXT)
    assert len(rows) == 3
    for size, expected in rows:
        assert samples(int(size.replace(",", "")), 0, 0, range(5)) == [int(n) for n in expected.split(", ")]


def test_the_codes_that_the_messages_speak_of_are_those_that_are_sent() -> None:
    proto = (Path(pb.__file__).with_name("order.proto")).read_text()
    told = set(re.findall(r"^//   ([A-Z_]+)  ", proto, flags=re.MULTILINE))
    assert told == {code.name for code in CODES.values()} | {"UNAUTHENTICATED"}
