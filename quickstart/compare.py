"""Accuracy before and after; fails unless it rose by at least 15 points.

python -m quickstart.compare before.json after.json
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

MIN_GAIN = 0.15


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    arguments = parser.parse_args()
    before, after = (json.loads(path.read_text()) for path in (arguments.before, arguments.after))
    gain = after["accuracy"] - before["accuracy"]
    answer = after["sums"][0]
    print(f"the exported model, asked {answer['question']!r}, says {answer['generated']!r}")
    print(f"accuracy on {after['num_sums']} held-out sums: {before['accuracy']:.3f} -> {after['accuracy']:.3f}")
    if gain < MIN_GAIN:
        print(f"a gain of {gain:.3f}, less than {MIN_GAIN}: something is wrong", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
