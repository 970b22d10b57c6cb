"""What to try next: knobs as Optuna distributions, samplers, and the search itself."""

from tuner.search.points import neighbours, random_points
from tuner.search.search import Candidate, Search

__all__ = ["Candidate", "Search", "neighbours", "random_points"]
