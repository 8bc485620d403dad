"""What is held: shards, gathered buckets, gradients. Owns every long-lived tensor."""

from .bucket import Bucket, Draft, Member
from .clone import clone_unit, place_clone
from .flat_shard import FlatShard, norms
from .gradient_set import OptimizerView
from .gradients import Gradients, GradState
from .lookup import members_of, names_of, units_of
from .parameter import OriginalParameter, RowShard, local_of, plain_access, retire, successor_of
from .staleness import Clock
from .tensor_parallel import SpmdMesh
from .unit import State, Unit, owner_of, refuse_meta

__all__ = [
    "Bucket",
    "Clock",
    "Draft",
    "FlatShard",
    "GradState",
    "Gradients",
    "Member",
    "OptimizerView",
    "OriginalParameter",
    "RowShard",
    "SpmdMesh",
    "State",
    "Unit",
    "clone_unit",
    "local_of",
    "members_of",
    "names_of",
    "norms",
    "owner_of",
    "place_clone",
    "plain_access",
    "refuse_meta",
    "retire",
    "successor_of",
    "units_of",
]
