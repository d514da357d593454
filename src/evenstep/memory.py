"""The C library's allocator, on behalf of a training on CPU: what one step frees, the next one takes.

By itself it gives large pieces back to the kernel as soon as they are freed, and gets them again, page by page
and each page zeroed, in the next step: a fifth of the time of a step of ViT-B/32.
"""

import ctypes

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4  # of malloc.h
GROW_BY = 1 << 26  # bytes


def keep_what_is_freed() -> None:
    """From now on this process keeps its memory. Where the C library is not glibc, nothing is changed."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_MMAP_MAX, 0)  # no mappings of their own for large pieces
    mallopt(_TRIM_THRESHOLD, -1)
    mallopt(_TOP_PAD, GROW_BY)
