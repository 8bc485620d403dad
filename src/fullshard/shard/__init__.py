"""What is held: shards, gathered buckets, gradients. Owns every long-lived tensor."""

from .bucket import Bucket
from .clone import clone_unit, place_clone
from .flat_parameter import FlatParameter, FlatParamShardMetadata, shard_metadata
from .flat_shard import FlatShard, norms
from .gradient_set import OptimizerView
from .gradients import Gradients, GradState
from .local_bucket import FlatBucket, LocalBucket, registry_of
from .lookup import members_of, names_of, units_of
from .member import Draft, Member
from .parameter import OriginalParameter, RowShard, local_of, plain_access, read_grad, retire, successor_of
from .staleness import Clock
from .tensor_parallel import SpmdMesh
from .unit import State, Unit, owner_of, refuse_meta
from .view_making import add_views
from .whole import gather_whole, whole_views

__all__ = [
    "Bucket",
    "Clock",
    "Draft",
    "FlatBucket",
    "FlatParamShardMetadata",
    "FlatParameter",
    "FlatShard",
    "GradState",
    "Gradients",
    "LocalBucket",
    "Member",
    "OptimizerView",
    "OriginalParameter",
    "RowShard",
    "SpmdMesh",
    "State",
    "Unit",
    "add_views",
    "clone_unit",
    "gather_whole",
    "local_of",
    "members_of",
    "names_of",
    "norms",
    "owner_of",
    "place_clone",
    "plain_access",
    "read_grad",
    "refuse_meta",
    "registry_of",
    "retire",
    "shard_metadata",
    "successor_of",
    "units_of",
    "whole_views",
]
