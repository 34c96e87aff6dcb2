# SPDX-License-Identifier: Apache-2.0
"""Settings of a launch as one object, for programs that pass them around.

To launch with them, give them to horovod.run() or to horovodrun.
"""

_DEFAULTS = {"num_proc": None, "verbose": 0, "ssh_port": None, "ssh_identity_file": None,
             "extra_mpi_args": None, "tcp_flag": None, "binding_args": None, "key": None,
             "start_timeout": None, "output_filename": None, "run_func_mode": None, "nics": None,
             "elastic": False, "prefix_output_with_timestamp": False}


class BaseSettings:
    """Takes its settings by name; what is not given has its default."""

    defaults = _DEFAULTS

    def __init__(self, **given):
        unknown = sorted(set(given) - set(self.defaults))
        if unknown:
            raise TypeError(f"{type(self).__name__} has no setting {', '.join(unknown)}; it has "
                            f"{', '.join(self.defaults)}")
        for name, default in self.defaults.items():
            setattr(self, name, given.get(name, default))

    def __repr__(self):
        """Without the key, for logs."""
        shown = {name: value for name, value in vars(self).items() if name != "key"}
        return f"{type(self).__name__}({shown})"


class Settings(BaseSettings):
    """With the hosts: "a:2,b:4"."""

    defaults = {"hosts": None, **_DEFAULTS}
