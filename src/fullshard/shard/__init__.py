"""Units, buckets and gradients: shards and gathered memory. Owns every long-lived tensor."""

from .asked import CHECKS, When, ask
from .bucket import Bucket
from .build import BuildSettings, build_unit, plan_unit, policy_of, settings_of, share_over
from .checks import check_parameters
from .copy import clone_unit, place_clone
from .delivery import Delivery
from .find import Found, Rehearsal, check_ties, find_parameters, find_shared, show_shared, walk
from .gradients import Gradients, GradState, has_gradient, has_gradients, refuse_unreduced, release_all
from .hooks import sees_gradients, shown_empty
from .lookup import all_ranks_hold, members_of, names_of, refuse_meta, units_of
from .messages import tokens_not_counted
from .offload import Home, home_of, settle
from .optimizer_view import FlatView, OptimizerView
from .parking import Mover, is_parked, offload_unit, park_unit, refuse_parked, resume_unit
from .reduce_buffer import PlannedReduction
from .scaling import MEAN, REDUCTIONS, ReduceSettings
from .share import Share
from .tokens import TokenCount
from .unit import State, Unit
from .views import add_views, follow_views, run_of

__all__ = [
    "CHECKS",
    "MEAN",
    "REDUCTIONS",
    "Bucket",
    "BuildSettings",
    "Delivery",
    "FlatView",
    "Found",
    "GradState",
    "Gradients",
    "Home",
    "Mover",
    "OptimizerView",
    "PlannedReduction",
    "ReduceSettings",
    "Rehearsal",
    "Share",
    "State",
    "TokenCount",
    "Unit",
    "When",
    "add_views",
    "all_ranks_hold",
    "ask",
    "build_unit",
    "check_parameters",
    "check_ties",
    "clone_unit",
    "find_parameters",
    "find_shared",
    "follow_views",
    "has_gradient",
    "has_gradients",
    "home_of",
    "is_parked",
    "members_of",
    "names_of",
    "offload_unit",
    "park_unit",
    "place_clone",
    "plan_unit",
    "policy_of",
    "refuse_meta",
    "refuse_parked",
    "refuse_unreduced",
    "release_all",
    "resume_unit",
    "run_of",
    "sees_gradients",
    "settings_of",
    "settle",
    "share_over",
    "show_shared",
    "shown_empty",
    "tokens_not_counted",
    "units_of",
    "walk",
]
