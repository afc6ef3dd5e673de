"""Whether folded and real gloo ranks agree on random examples, faults included: a nightly run.

Usage: python scripts/agreement.py --examples 500 [--seed 0]. Exit code 1 if any disagrees.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rankfold.agreement_search import compare_many


def main() -> int:
    """Compare, and say at the end how many agreed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--examples", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    started = time.monotonic()
    done = wrong = faulty = 0
    for compared in compare_many(arguments.examples, arguments.seed):
        done += 1
        faulty += compared.fault is not None
        if compared.wrong is not None:
            wrong += 1
            print(f"DISAGREE {compared}", flush=True)
        elif done % 50 == 0:
            print(f"{done} examples, {time.monotonic() - started:.0f} s", flush=True)
    print(f"{done - wrong} of {done} examples agree, {faulty} of them with a fault")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
