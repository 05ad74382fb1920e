"""`python -m bench [CASE ...] [--out FOLDER] [--pairs N]`, from the root of a checkout."""

import argparse
import sys
from pathlib import Path

from bench import CASES, run_cases
from bench.measure import LEAST_PAIRS
from eyeline.core.errors import EXPECTED, Refused
from eyeline.parallel.threads import calm_threads


def main() -> None:
    """Run the cases that the command line names; an expected error is one message and its exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measure Eyeline against peers, both sides in one go.")
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"{', '.join(CASES)}; all whose peers are installed if none is named")
    parser.add_argument("--out", type=Path, default=Path("bench/results"), help="folder of the results (bench/results)")
    parser.add_argument("--pairs", type=int, default=LEAST_PAIRS, help=f"measurements of each side; under {LEAST_PAIRS} is a trial")
    asked = parser.parse_args()
    calm_threads()
    try:
        if asked.pairs < 1:
            raise Refused(f"--pairs is {asked.pairs}; it must be at least 1.")
        run_cases(asked.cases, asked.out, asked.pairs)
    except EXPECTED as error:
        sys.stderr.write(f"bench: {error}\n")
        sys.exit(error.code)


if __name__ == "__main__":
    main()
