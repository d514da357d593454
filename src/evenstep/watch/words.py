"""Numbers of ranks and samples, as people read them."""

from collections.abc import Sequence


def ranks(numbers: Sequence[int]) -> str:
    """`rank 3`, `ranks 0, 1 and 2`, `ranks 0 to 62`."""
    ordered = sorted(numbers)
    if len(ordered) == 1:
        return f"rank {ordered[0]}"
    if len(ordered) > 3 and ordered[-1] - ordered[0] == len(ordered) - 1:
        return f"ranks {ordered[0]} to {ordered[-1]}"
    return f"ranks {', '.join(map(str, ordered[:-1]))} and {ordered[-1]}"


def samples(numbers: Sequence[int], shown: int = 16) -> str:
    """`sample 3`, `samples 3, 1, 4 and 61 more`."""
    more = f" and {len(numbers) - shown} more" if len(numbers) > shown else ""
    return f"sample{'' if len(numbers) == 1 else 's'} {', '.join(map(str, numbers[:shown]))}{more}"


def step(epoch: int, number: int) -> str:
    """As a person counts."""
    return f"step {number + 1} of epoch {epoch + 1}"
