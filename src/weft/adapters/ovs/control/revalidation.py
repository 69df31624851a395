"""When a change holds for every packet: the switch goes on for a moment by what it did with earlier ones.

It answers for a change first. Then its revalidators go through all that it remembers of packets, and only at the end of
that is nothing left of before. They tell when they have come to an end, but not what it was the end of.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from weft.adapters.ovs.control.unixctl import Refusal, ask_switch, asking

_WAIT = "revalidator/wait"


def settle(switch: Path, trigger_revalidation: Callable[[], None]) -> None:
    """Return when all that the switch was told before holds. `trigger_revalidation` makes its revalidators begin anew.

    What they are at may have begun before the change, so its end is waited for, and that of the next. By themselves
    they would begin within half a second. A switch with datapaths of two kinds refuses to wait: nothing is to be done.
    """
    ask_switch(switch, "version")  # by then the revalidators have been told of the change
    try:
        for _ in range(2):
            with asking(switch, _WAIT) as wait_for_end:  # asked before they begin: they may be done in no time
                trigger_revalidation()
                wait_for_end()
    except Refusal:
        return
