"""What is held: shards, gathered buckets, gradients. Owns every long-lived tensor."""

from .bucket import Bucket, Draft, Member
from .flat_shard import FlatShard, norms
from .gradients import Gradients, GradState, OptimizerView
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
    "norms",
    "retire",
    "successor_of",
]
