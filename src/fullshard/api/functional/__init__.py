"""`fully_shard` and the methods that it adds to a module (the FSDP2 interface)."""

from .fully_shard import fully_shard
from .module import FSDPModule, UnshardHandle, register_fsdp_forward_method, share_comm_ctx

__all__ = ["FSDPModule", "UnshardHandle", "fully_shard", "register_fsdp_forward_method", "share_comm_ctx"]
