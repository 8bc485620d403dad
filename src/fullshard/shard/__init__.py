"""Units, buckets and gradients: shards and gathered memory. Owns every long-lived tensor."""

from .asked import UNDOABLE, When, ask, before_step, follow_views, refuse_meta, refuse_undoable, refuse_unready
from .bucket import Bucket, share_over
from .build import build_unit, plan_unit, policy_of
from .clone import clone_unit, place_clone
from .delivery import Delivery
from .find import Found, Rehearsal, check_parameters, check_ties, find_parameters, find_shared, show_shared, walk
from .gradients import Gradients, GradState, has_gradient, has_gradients, refuse_unreduced, release_all
from .hooks import sees_gradients, shown_empty
from .messages import tokens_not_counted
from .offload import Home, home_of, settle
from .parking import Mover, is_parked, offload_unit, park_unit, resume_unit
from .plan_bucket import BuildSettings
from .reduce_buffer import PlannedReduction
from .scaling import MEAN, REDUCTIONS, ReduceSettings, TokenCount
from .share import Share
from .unit import State, Unit, all_ranks_hold, members_of, units_of
from .views import FlatView, run_of
