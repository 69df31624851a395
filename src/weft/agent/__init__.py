"""netplugin: the agent. One per node; gives workloads their network and keeps it as the store says."""

from weft.runtime.memory_trim import import_aiohttp

import_aiohttp()
