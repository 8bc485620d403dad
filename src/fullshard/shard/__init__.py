"""What is held: shards, gathered buckets, gradients. Owns every long-lived tensor."""

from .bucket import Bucket, Draft, Member
from .flat_shard import FlatShard, norms
from .gradients import Gradients, GradState, OptimizerView
from .lookup import members_of, names_of, units_of
from .parameter import OriginalParameter, RowShard, local_of, retire, successor_of
from .unit import State, Unit

__all__ = [
    "Bucket",
    "Draft",
    "FlatShard",
    "GradState",
    "Gradients",
    "Member",
    "OptimizerView",
    "OriginalParameter",
    "RowShard",
    "State",
    "Unit",
    "local_of",
    "members_of",
    "names_of",
    "norms",
    "retire",
    "successor_of",
    "units_of",
]
