"""netplugin: the agent. One per node; gives workloads their network and keeps it as the store says."""

from weft.runtime.lean import import_aiohttp

import_aiohttp()
