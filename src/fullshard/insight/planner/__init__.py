"""Plans a training run before it runs: memory, traffic and time of a step, from the engine's own units."""

from .planner import Plan, Plans, assumed_rates, plan, tokens_to_loss
from .rates import measure_rates
from .schedule import Rates
from .solve import solve
from .strategy import Strategy, strategies

__all__ = [
    "Plan",
    "Plans",
    "Rates",
    "Strategy",
    "assumed_rates",
    "measure_rates",
    "plan",
    "solve",
    "strategies",
    "tokens_to_loss",
]
