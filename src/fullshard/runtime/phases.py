"""The table of phases: what a unit does at each happening, by phase. Pure.

    phase         the unit is ...
    IDLE          sharded, or kept gathered; none of its code is running
    FORWARD       in its forward
    PARTLY        between the forwards of its modules, some of which have run; it stays shown for the others
    RECOMPUTING   in its forward again, within a backward (activation checkpointing)
    RECOMPUTED    gathered, and its backward comes next
    BACKWARD      between its output's gradient and its input's
    BETWEEN       between two backwards of a kept graph (create_graph)

    happening     what happened
    ENTER         its forward is called
    REENTER       its forward is called within a backward
    LEAVE         its forward ended
    LEAVE_PARTLY  the forward of one of several modules ended; others will follow
    BROKEN        its forward raised (a checkpoint's early stop does too)
    PASS_END      the root's forward ended, or raised
    OUTPUT_GRAD   an output got its gradient
    INPUT_GRAD    a watched input got its gradient: all parameters of the call have their gradients
    INPUT_GRAD_KEPT  the same, in a backward whose graph will be differentiated again
    OVERTAKEN     another unit was recomputed after this one: its backward is not next
    END           the backward is over
    RESET         the engine recovers from an exception
    UNSHARD, RESHARD  the user asked for it

`ACTS` lists the happenings that act, `REFUSED` those that raise: `PhaseError` if a user asked for it, else
`AssertionError`. All others change nothing: the unit stays in its phase.
"""

from __future__ import annotations

from enum import IntEnum


class Phase(IntEnum):
    """See the module's docstring."""

    IDLE = 0
    FORWARD = 1
    PARTLY = 2
    RECOMPUTING = 3
    RECOMPUTED = 4
    BACKWARD = 5
    BETWEEN = 6


class Happening(IntEnum):
    """See the module's docstring."""

    ENTER = 0
    REENTER = 1
    LEAVE = 2
    LEAVE_PARTLY = 3
    BROKEN = 4
    PASS_END = 5
    OUTPUT_GRAD = 6
    INPUT_GRAD = 7
    INPUT_GRAD_KEPT = 8
    OVERTAKEN = 9
    END = 10
    RESET = 11
    UNSHARD = 12
    RESHARD = 13


P, H = Phase, Happening

ACTS: dict[Phase, dict[Happening, tuple[str, Phase]]] = {
    # happening        action (a method of Runner; "": none)        next phase
    P.IDLE: {
        H.ENTER: ("open_forward", P.FORWARD),
        H.REENTER: ("open_recompute", P.RECOMPUTING),
        H.BROKEN: ("break_forward", P.IDLE),  # while it was being opened, or after it was closed
        H.PASS_END: ("settle", P.IDLE),
        H.OUTPUT_GRAD: ("open_backward", P.BACKWARD),
        H.END: ("finish", P.IDLE),
        H.RESET: ("reset", P.IDLE),
        H.UNSHARD: ("gather_for_user", P.IDLE),
        H.RESHARD: ("free_for_user", P.IDLE),
    },
    P.FORWARD: {
        H.LEAVE: ("close_forward", P.IDLE),
        H.LEAVE_PARTLY: ("", P.PARTLY),
        H.BROKEN: ("break_forward", P.IDLE),
        H.RESET: ("reset", P.IDLE),
    },
    P.PARTLY: {
        H.ENTER: ("", P.FORWARD),
        H.REENTER: ("", P.FORWARD),
        H.BROKEN: ("break_forward", P.IDLE),
        H.PASS_END: ("close_forward", P.IDLE),
        H.OUTPUT_GRAD: ("open_backward", P.BACKWARD),
        H.RESET: ("reset", P.IDLE),
        H.RESHARD: ("free_for_user", P.IDLE),
    },
    P.RECOMPUTING: {
        H.LEAVE: ("close_recompute", P.RECOMPUTED),
        H.LEAVE_PARTLY: ("close_recompute", P.RECOMPUTED),
        H.BROKEN: ("close_recompute", P.RECOMPUTED),
        H.RESET: ("reset", P.IDLE),
    },
    P.RECOMPUTED: {
        H.ENTER: ("open_forward", P.FORWARD),
        H.REENTER: ("open_recompute", P.RECOMPUTING),
        H.BROKEN: ("break_forward", P.IDLE),
        H.OUTPUT_GRAD: ("open_backward", P.BACKWARD),
        H.OVERTAKEN: ("release", P.IDLE),
        H.END: ("finish", P.IDLE),
        H.RESET: ("reset", P.IDLE),
        H.RESHARD: ("free_for_user", P.IDLE),
    },
    P.BACKWARD: {
        H.INPUT_GRAD: ("close_backward", P.IDLE),
        H.INPUT_GRAD_KEPT: ("", P.BETWEEN),
        H.END: ("finish", P.IDLE),
        H.RESET: ("reset", P.IDLE),
    },
    P.BETWEEN: {
        H.ENTER: ("open_forward", P.FORWARD),
        H.REENTER: ("open_recompute", P.RECOMPUTING),
        H.BROKEN: ("break_forward", P.IDLE),
        H.OUTPUT_GRAD: ("open_backward", P.BACKWARD),
        H.END: ("hide", P.IDLE),  # it stays gathered for the next backward
        H.RESET: ("reset", P.IDLE),
        H.RESHARD: ("free_for_user", P.IDLE),
    },
}
REFUSED: dict[Phase, tuple[Happening, ...]] = {
    P.IDLE: (H.LEAVE, H.LEAVE_PARTLY),
    P.FORWARD: (H.RESHARD,),
    P.PARTLY: (H.LEAVE, H.LEAVE_PARTLY),
    P.RECOMPUTING: (H.PASS_END, H.RESHARD),
    P.RECOMPUTED: (H.LEAVE, H.LEAVE_PARTLY),
    P.BACKWARD: (H.RESHARD,),
    P.BETWEEN: (H.LEAVE, H.LEAVE_PARTLY),
}


def row(phase: Phase, happening: Happening) -> tuple[str, Phase] | None:
    """Return the action and the next phase; None if the happening is refused. Unlisted happenings change nothing."""
    return None if happening in REFUSED[phase] else ACTS[phase].get(happening, ("", phase))
