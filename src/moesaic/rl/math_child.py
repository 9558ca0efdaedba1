"""A process that compares mathematical answers by ``math-verify``, one line of JSON at a time; see ``MathVerifier``.

It is run by path, with nothing of moesaic imported. The kernel ends it where one comparison takes too long: its own
interpreter may be deep in one operation (``9^9^9^9``), in which no handler would run. The processor's seconds count, so
that a reward doesn't depend on what else the host does.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
from typing import Any

SPARE_S = 30.0
"""Seconds by the clock on top, for a process that waits instead of computing."""
MAX_MEMORY = 8 << 30
"""Bytes of address space: such an operation must not take the host's memory either."""


def main() -> None:
    """``{"text", "gold"}`` a line in, ``{"score", "pred"}`` or ``{"error"}`` a line out; first, one that says ready.

    The only argument is the seconds that one comparison may take.
    """
    timeout_s = float(sys.argv[1])
    for name in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(name, signal.SIG_DFL)  # which ends the process; a parent's "ignore" would have been inherited
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to handle
    # Libraries that print must not write between the answers.
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    logging.disable(logging.WARNING)  # it warns that its own time-outs are off
    limit_memory()
    try:
        import math_verify  # noqa: F401
    except ImportError as error:
        print(json.dumps({"error": str(error)}), file=out, flush=True)
        return
    print(json.dumps({"ready": True}), file=out, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        set_timers(timeout_s, timeout_s + SPARE_S)
        try:
            answer = compare(asked["text"], asked["gold"])
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        set_timers(0, 0)
        print(json.dumps(answer), file=out, flush=True)


def compare(text: str, gold: str) -> dict[str, Any]:
    """``pred`` is what is found in ``text``, or None. Raises ValueError where there is nothing in ``gold``."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    boxed = gold if "\\boxed" in gold else f"\\boxed{{{gold}}}"
    wanted = parse(boxed, extraction_config=[LatexExtractionConfig()], parsing_timeout=None)
    if not wanted:
        raise ValueError(f"the answer of the row isn't one that math-verify can read: {gold[:200]!r}")
    kinds = [ExprExtractionConfig(), LatexExtractionConfig()]
    found = parse(text, extraction_config=kinds, parsing_timeout=None)
    is_right = bool(found) and verify(wanted, found, timeout_seconds=None)
    # math-verify gives the expression, then the text that it was read from.
    return {"score": float(is_right), "pred": str(found[-1]) if found else None}


def set_timers(computing_s: float, waiting_s: float) -> None:
    """The kernel ends this process after so many seconds of the processor, or by the clock; 0: never."""
    signal.setitimer(signal.ITIMER_PROF, computing_s)
    signal.setitimer(signal.ITIMER_REAL, waiting_s)


def limit_memory() -> None:
    """Hold this process to ``MAX_MEMORY``, where the system can."""
    import resource

    with contextlib.suppress(ValueError, OSError):  # macOS can't
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))


if __name__ == "__main__":
    main()
