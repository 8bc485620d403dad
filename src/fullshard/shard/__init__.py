"""What is held: shards, gathered buckets, gradients. Owns every long-lived tensor."""

from .bucket import Bucket
from .build import BuildSettings, build_unit, plan_unit
from .changes import note_change
from .checks import check_parameters
from .copy import clone_unit, place_clone
from .delivery import Delivery
from .find import Found, Rehearsal, check_ties, find_parameters, find_shared, show_shared, walk
from .forms import (
    ATTRIBUTE,
    FlatParameter,
    FlatParameterForm,
    FlatParamShardMetadata,
    FlatShard,
    LocalForm,
    RowShard,
    full_of,
    norms,
    shard_metadata,
)
from .gradients import Gradients, GradState
from .hooks import sees_gradients, shown_empty
from .ignored import Ignored
from .lookup import members_of, names_of, refuse_meta, units_of
from .member import NAME_KEY, PART_KEY, SUCCESSOR_KEY, Draft, Member, successor_of
from .offload import Home, home_of
from .optimizer_view import FlatView, OptimizerView
from .place import Place
from .reduction import Reduction, collect, has_gradients
from .retired import OriginalParameter, retire
from .split import SpmdMesh
from .unit import State, Unit, owner_of
from .views import add_views

__all__ = [
    "ATTRIBUTE",
    "NAME_KEY",
    "PART_KEY",
    "SUCCESSOR_KEY",
    "Bucket",
    "BuildSettings",
    "Delivery",
    "Draft",
    "FlatParamShardMetadata",
    "FlatParameter",
    "FlatParameterForm",
    "FlatShard",
    "FlatView",
    "Found",
    "GradState",
    "Gradients",
    "Home",
    "Ignored",
    "LocalForm",
    "Member",
    "OptimizerView",
    "OriginalParameter",
    "Place",
    "Reduction",
    "Rehearsal",
    "RowShard",
    "SpmdMesh",
    "State",
    "Unit",
    "add_views",
    "build_unit",
    "check_parameters",
    "check_ties",
    "clone_unit",
    "collect",
    "find_parameters",
    "find_shared",
    "full_of",
    "has_gradients",
    "home_of",
    "members_of",
    "names_of",
    "norms",
    "note_change",
    "owner_of",
    "place_clone",
    "plan_unit",
    "refuse_meta",
    "retire",
    "sees_gradients",
    "shard_metadata",
    "show_shared",
    "shown_empty",
    "successor_of",
    "units_of",
    "walk",
]
