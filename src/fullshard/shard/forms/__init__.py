"""How parameters show while their unit is sharded: one protocol (`Form`), one file a form."""

from .flat import FlatParameterForm
from .flat_parameter import ATTRIBUTE, FlatParameter, FlatParamShardMetadata, shard_metadata
from .flat_shard import FlatShard
from .local import LocalForm
from .norms import norms
from .protocol import Form
from .row_shard import RowShard, full_of
from .rows import RowsForm
from .runs import RunsForm
from .stand_in import HiddenParameter
from .subclass import SubclassForm, chunk_of, is_extension

__all__ = [
    "ATTRIBUTE",
    "FlatParamShardMetadata",
    "FlatParameter",
    "FlatParameterForm",
    "FlatShard",
    "Form",
    "HiddenParameter",
    "LocalForm",
    "RowShard",
    "RowsForm",
    "RunsForm",
    "SubclassForm",
    "chunk_of",
    "full_of",
    "is_extension",
    "norms",
    "shard_metadata",
]
