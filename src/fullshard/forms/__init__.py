"""The parameters of a sharded model: where each is registered, this rank's part of it, and its form while sharded."""

from .changes import OWNER_KEY, Owner, Touched, Untouched, all_hold, mark_view, note_change, owner_of
from .elementwise import SPLIT_OF_ROWS
from .flat_parameter import ATTRIBUTE, FlatParameter, FlatParameterForm, FlatParamShardMetadata, shard_metadata
from .flat_shard import SHARDED_TYPES, FlatShard
from .form import Form
from .full import Full, GatherPlan
from .local import LocalForm
from .member import (
    NAME_KEY,
    PART_KEY,
    SUCCESSOR_KEY,
    WHOLE_KEY,
    Draft,
    Member,
    attributes_of,
    explicit_grad_dtype,
    hooks_onto,
    identity_of,
    successor_of,
    take_grad_dtype,
)
from .messages import kind_and_shape
from .place import Ignored, Place
from .placeholders import HiddenParameter, retire, stand_in_for
from .row_shard import RowShard, full_of, split_alike
from .rows import RowsForm, RunsForm
from .scratch import Scratch
from .split import SpmdMesh, TensorParallel
from .subclass import (
    Chunks,
    SubclassForm,
    as_gathered,
    chunk_of,
    is_extension,
    rows_on_rank,
    with_parts,
)
