# SPDX-License-Identifier: Apache-2.0
"""Settings of an elastic launch as one object; see horovod.runner.common.util.settings."""
from horovod.runner.common.util.settings import BaseSettings


class ElasticSettings(BaseSettings):
    """With the hosts (a HostDiscovery), and how many ranks there may be."""

    defaults = {"discovery": None, "min_num_proc": None, "max_num_proc": None,
                "elastic_timeout": None, "reset_limit": None, "cooldown_range": None,
                **BaseSettings.defaults, "elastic": True}
