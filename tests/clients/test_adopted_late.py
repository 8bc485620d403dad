"""Modules that were imported before `adopt`, and hold PyTorch's objects otherwise than by a name of their own."""

from __future__ import annotations

import pytest
from small import script

HOLDER = '''
import functools
from collections import OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass
from typing import Union

import torch.distributed.fsdp as theirs
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, FSDPModule, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

Pair = namedtuple("Pair", "name wrapper")
BY_NAME = {"fsdp": FullyShardedDataParallel, "deep": [({"in": FullyShardedDataParallel},)]}
BY_CLASS = {FullyShardedDataParallel: "one", int: "two", (FSDPModule, "key"): "three"}
LIST, DEQUE, SET = [fully_shard, 1], deque([fully_shard]), {FSDPModule, int}
TUPLE, FROZEN, NAMED = (FSDPModule, FullyShardedDataParallel), frozenset({FSDPModule}), Pair("a", FSDPModule)
EITHER, ANY = FSDPModule | FullyShardedDataParallel, Union[FSDPModule, FullyShardedDataParallel]
ORDERED, DEFAULT = OrderedDict(a=FSDPModule), defaultdict(list, a=FSDPModule)
PARTIAL = functools.partial(functools.partial(FullyShardedDataParallel, use_orig_params=True), sync_module_states=True)
POLICY = functools.partial(print, ModuleWrapPolicy, strategy=ShardingStrategy)


def default(wrapper=FullyShardedDataParallel, *, policy=CPUOffloadPolicy):
    return wrapper, policy


def maker():
    wrapper, empty = FullyShardedDataParallel, []

    def made():
        return wrapper, empty

    return made


closure = maker()


def decorated(function):
    @functools.wraps(function)
    def called(*args):
        return function(*args)

    return called


@decorated
def wrapped(shard=fully_shard):
    return shard


class Config:
    wrapper = FullyShardedDataParallel
    modes = {"fsdp2": fully_shard}

    def __init__(self):
        self.shard, self.nested = fully_shard, {"a": FSDPModule}

    @staticmethod
    def static(shard=fully_shard):
        return shard

    @classmethod
    def of_class(cls, shard=fully_shard):
        return shard

    @property
    def shown(self, shard=fully_shard):
        return shard

    def method(self, shard=fully_shard):
        return shard


@dataclass
class Fields:
    wrapper: type = FullyShardedDataParallel


config, bound = Config(), Config().method


class Mine(FullyShardedDataParallel):
    def __init__(self, module):
        super().__init__(module, use_orig_params=True)


class Loop:
    """Refers to itself."""


loop = Loop()
loop.me = [loop, (loop,), fully_shard]
'''

PROGRAM = """
import holder as h
import torch, torch.distributed as dist
import fullshard

told = str(fullshard.adopt())
WRAPPER, UNIT, shard = fullshard.FullyShardedDataParallel, fullshard.FSDPModule, fullshard.fully_shard
assert h.BY_NAME == {"fsdp": WRAPPER, "deep": [({"in": WRAPPER},)]}
assert h.BY_CLASS == {WRAPPER: "one", int: "two", (UNIT, "key"): "three"} and list(h.BY_CLASS)[1] is int
assert h.LIST == [shard, 1] and list(h.DEQUE) == [shard] and h.SET == {UNIT, int}
assert h.TUPLE == (UNIT, WRAPPER) and h.FROZEN == {UNIT} and h.NAMED == h.Pair("a", UNIT)
assert h.EITHER == UNIT | WRAPPER and h.ANY.__args__ == (UNIT, WRAPPER)
assert h.ORDERED == {"a": UNIT} and h.DEFAULT == {"a": UNIT} and h.DEFAULT["b"] == []
assert h.PARTIAL.func is WRAPPER and h.PARTIAL.keywords == {"use_orig_params": True, "sync_module_states": True}
assert h.POLICY.args == (fullshard.wrap.ModuleWrapPolicy,)
assert h.POLICY.keywords["strategy"] is fullshard.ShardingStrategy
assert h.default() == (WRAPPER, fullshard.CPUOffloadPolicy) and h.closure()[0] is WRAPPER
assert h.wrapped() is shard and h.maker()()[0] is WRAPPER
assert h.Config.wrapper is WRAPPER and h.Config.modes == {"fsdp2": shard}
assert h.Config.static() is h.Config.of_class() is h.config.method() is h.config.shown is h.bound() is shard
assert h.config.shard is shard and h.config.nested == {"a": UNIT}
assert h.Fields().wrapper is WRAPPER and h.loop.me[2] is shard
assert issubclass(h.Mine, WRAPPER) and h.Mine.__mro__[1] is WRAPPER
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = h.Mine(torch.nn.Linear(2, 2))
model(torch.ones(1, 2)).sum().backward()
assert isinstance(model, h.EITHER) and isinstance(fullshard.fully_shard(torch.nn.Linear(2, 2)), h.ANY)
for path in ("holder.BY_NAME['fsdp']", "holder.TUPLE[1]", "holder.Config.wrapper", "wrapper in holder.closure()"):
    assert "held earlier as " + path in told, told
"""

RUNNING = """
import sys, warnings
import fullshard


def main():
    from torch.distributed.fsdp import FullyShardedDataParallel as Wrapper

    return fullshard.adopt(lenient="lenient" in sys.argv), Wrapper


if "lenient" in sys.argv:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        main()
    text = str(told[0].message)
else:
    try:
        main()
    except fullshard.PhaseError as error:
        text = str(error)
    else:
        raise AssertionError("a function keeps PyTorch's class")
    from torch.distributed.fsdp import FullyShardedDataParallel
    assert FullyShardedDataParallel.__module__.startswith("torch."), "something was replaced"
assert "'Wrapper' in main()" in text and "program.py:" in text and "--lenient" in text, text
"""

DERIVED = '''
import fullshard
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


class Policy(ModuleWrapPolicy):
    """Settings of PyTorch's classes are taken as they are."""


class Both(FullyShardedDataParallel, fullshard.FullyShardedDataParallel):
    """Would have one base twice."""


try:
    fullshard.adopt()
except fullshard.PhaseError as error:
    assert "class __main__.Both is derived from FullyShardedDataParallel" in str(error), error
    assert "Policy" not in str(error), error
else:
    raise AssertionError("adopted a program with a wrapper of its own")
'''


PROGRAMS = {
    "what a module holds is replaced": (PROGRAM,),
    "a running function is refused by name": (RUNNING,),
    "or warned of": (RUNNING, "lenient"),
    "a derived class has our base or is refused": (DERIVED,),
}


@pytest.mark.parametrize("what", PROGRAMS)
def test_what_was_imported_before(tmp_path, what):
    program, *arguments = PROGRAMS[what]
    (tmp_path / "holder.py").write_text(HOLDER)
    (tmp_path / "program.py").write_text(program)
    script(str(tmp_path / "program.py"), *arguments)
