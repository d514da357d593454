"""Single samples of a data set, whatever they are made of: what is in them, whether it is finite, its hash."""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


def one(data: Any, index: int) -> Any:
    """A sample, as its data set gives it."""
    return data.gather(np.array([index], dtype=np.int64)) if hasattr(data, "gather") else data[index]


def leaves(sample: Any) -> Iterator[Any]:
    """The values in a sample, from the outside in, always in the same order."""
    if isinstance(sample, Mapping):
        for name in sorted(sample, key=str):
            yield str(name)
            yield from leaves(sample[name])
    elif isinstance(sample, (list, tuple)):
        for part in sample:
            yield from leaves(part)
    else:
        yield sample


def finite(sample: Any) -> bool:
    """Whether all numbers in it are finite."""
    return all(_finite(leaf) for leaf in leaves(sample))


def _finite(leaf: Any) -> bool:
    if isinstance(leaf, (float, np.ndarray, np.generic)):
        values = np.asarray(leaf)
        return values.dtype.kind not in "fc" or bool(np.isfinite(values).all())
    return not isinstance(leaf, Tensor) or not leaf.is_floating_point() or bool(leaf.isfinite().all())


def digest(sample: Any) -> str | None:
    """A hash of all that is in it; None where something is of a kind that has no content we know of."""
    hashed = hashlib.sha256()
    for leaf in leaves(sample):
        content = _content(leaf)
        if content is None:
            return None
        kind = f"{type(leaf).__name__} {getattr(leaf, 'dtype', '')} {tuple(getattr(leaf, 'shape', ()))} "
        hashed.update(kind.encode() + len(content).to_bytes(8) + content)
    return hashed.hexdigest()


def _content(leaf: Any) -> bytes | None:
    if isinstance(leaf, Tensor):
        if leaf.layout != torch.strided:
            return None
        return leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    if isinstance(leaf, (np.ndarray, np.generic)):
        return None if leaf.dtype.hasobject else leaf.tobytes()
    if leaf is None or isinstance(leaf, (bool, int, float, str)):
        return repr(leaf).encode()
    if isinstance(leaf, bytes):
        return leaf
    return leaf.tobytes() if hasattr(leaf, "tobytes") else None  # images of PIL have it
