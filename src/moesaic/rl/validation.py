"""Scores on held-out prompts, over several completions each: the mean, the best of k, the majority's.

Names are verl's: ``<section>/<data source>/<score>/mean@n``, ``best@k/mean``, ``maj@n/mean``. ``val-core`` is the
section of what counts of a source: all n completions' accuracy (``acc``) where it has one, else their reward;
``val-aux`` that of the rest. verl draws the k with replacement, 1,000 times; here they are k different completions, and
the expectation is exact: ``best@n`` is the best there is.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """One completion of one held-out prompt.

    Attributes:
        source: the prompt's data source: scores are told apart by it.
        prompt: number of the prompt.
        scores: by name: ``reward``, and what the reward functions' components and extra numbers are.
        answer: what the completion comes to, for the majority; None: unknown.
    """

    source: str
    prompt: int
    scores: Mapping[str, float]
    answer: str | None = None


def summarize(scored: Iterable[Scored]) -> dict[str, float]:
    """Means over prompts, by data source and score. Of n completions each: ``mean@n``; ``best@k/mean`` for k = 2, 4, ..
    and n; ``maj@n/mean`` where answers are known and n > 1. What a function gave no score for is left out of the mean,
    and the prompt of the other two."""
    by_source: defaultdict[str, defaultdict[int, list[Scored]]] = defaultdict(lambda: defaultdict(list))
    for each in scored:
        by_source[each.source][each.prompt].append(each)
    metrics: dict[str, float] = {}
    for source, prompts in by_source.items():
        names = sorted({name for group in prompts.values() for each in group for name in each.scores})
        core, most = "acc" if "acc" in names else "reward", max(map(len, prompts.values()))
        for name in names:
            found = [of_group(group, name) for group in prompts.values()]
            for key in {key: None for each in found for key in each}:
                values = [each[key] for each in found if key in each]
                is_core = name == core and key.partition("/")[0].endswith(f"@{most}")
                metrics[f"val-{'core' if is_core else 'aux'}/{source}/{name}/{key}"] = sum(values) / len(values)
    return metrics


def of_group(group: Sequence[Scored], name: str) -> dict[str, float]:
    """Of one prompt's n completions. Example: scores 0, 1, 0, 0: ``mean@4`` 0.25, ``best@2/mean`` 0.5,
    ``best@4/mean`` 1."""
    values = [each.scores[name] for each in group if name in each.scores]
    num = len(group)
    metrics = {f"mean@{num}": sum(values) / len(values)} if values else {}
    if len(values) == num > 1:
        sizes = [2**power for power in range(1, num.bit_length()) if 2**power < num] + [num]
        metrics |= {f"best@{size}/mean": expected_best(values, size) for size in sizes}
        if all(each.answer is not None for each in group):
            metrics[f"maj@{num}/mean"] = majority_score(group, name)
    return metrics


def expected_best(values: Sequence[float], size: int) -> float:
    """The expected largest of ``size`` values drawn without putting back: the i-th smallest (from 0) is the largest of
    a draw in C(i, size - 1) of C(n, size) cases."""
    ordered = sorted(values)
    cases = math.comb(len(values), size)
    return sum(value * math.comb(place, size - 1) / cases for place, value in enumerate(ordered))


def majority_score(group: Sequence[Scored], name: str) -> float:
    """The mean score of the answer that most completions come to; of answers equally many come to, their mean."""
    by_answer: defaultdict[str, list[float]] = defaultdict(list)
    for each in group:
        by_answer[each.answer or ""].append(each.scores[name])
    most = max(len(values) for values in by_answer.values())
    winners = [values for values in by_answer.values() if len(values) == most]
    return sum(sum(values) / len(values) for values in winners) / len(winners)
