"""Where a process's random numbers are: torch's, its device's, Python's and NumPy's, as tensors, and back."""

import math
import random
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from evenstep.snapshots.manifest import Damaged

WORDS = 624  # of a Mersenne twister's state


def states(device: torch.device) -> dict[str, Tensor]:
    """The random states of this process, as they are now."""
    _, words, gauss = random.getstate()
    found = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor([*words, math.nan if gauss is None else gauss], dtype=torch.float64),
    }
    numpys = np.random.get_state(legacy=False)
    if numpys["bit_generator"] == "MT19937":  # unless somebody has put another in its place
        twister = numpys["state"]
        numbers = [*twister["key"], twister["pos"], numpys["has_gauss"], numpys["gauss"]]
        found["numpy"] = torch.tensor(np.array(numbers, dtype=np.float64))
    if device.type == "cuda":
        found["device"] = torch.cuda.get_rng_state(device)
    elif device.type == "mps":
        found["device"] = torch.mps.get_rng_state()
    return found


def go_on(found: Mapping[str, Tensor], device: torch.device) -> None:
    """Draw on from these states; Damaged where they are none."""
    try:
        torch.set_rng_state(found["torch"])
        *words, gauss = found["python"].tolist()
        random.setstate((3, tuple(map(_whole, words)), None if math.isnan(gauss) else gauss))
        if "numpy" in found:
            *key, place, has_gauss, gauss = found["numpy"].tolist()
            if len(key) != WORDS or not 0 <= place <= WORDS:
                raise ValueError("NumPy's is beyond its end")  # where NumPy would read on
            whole = np.array(list(map(_whole, key)), dtype=np.uint32)
            np.random.set_state(("MT19937", whole, _whole(place), _whole(has_gauss), gauss))
        if "device" in found:
            if device.type == "cuda":
                torch.cuda.set_rng_state(found["device"], device)
            elif device.type == "mps":
                torch.mps.set_rng_state(found["device"])
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise Damaged(f"its random states are none: {error!r:.200}") from None


def _whole(number: float) -> int:
    if not number.is_integer():
        raise ValueError(f"{number} is not whole")
    return int(number)
