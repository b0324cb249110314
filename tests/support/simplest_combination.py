"""Looks for the simplest combination of options that is wrong, from one that is: see test_combinations.py.

From the repository's root::

    PYTHONPATH=.:tools python tests/support/simplest_combination.py "llama tensor_ranks=3 clip=norm"
"""

from __future__ import annotations

import sys

from combination_runs import simplest
from combinations import given

if __name__ == "__main__":
    verdict = simplest(given(" ".join(sys.argv[1:])), print)
    print(f"{verdict.reason}\n{verdict.outcome}: {verdict.combination}")
