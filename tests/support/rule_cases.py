"""The cases of every operator's rule, which register themselves."""

from __future__ import annotations

import rule_cases_indexing
import rule_cases_pointwise
import rule_cases_products
import rule_cases_reduction
import rule_cases_views
from rule_draws import CASES

__all__ = [
    "CASES",
    "rule_cases_indexing",
    "rule_cases_pointwise",
    "rule_cases_products",
    "rule_cases_reduction",
    "rule_cases_views",
]
