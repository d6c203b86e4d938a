"""Exceptions of ExeGPT, drawn as a tree.

ExeGPTError
├── ConfigError           a key, a value or a file the user named is wrong
│   ├── ModelError        a model's config.json describes what cannot be planned for
│   ├── TraceError        a trace, prompt or length file cannot be read
│   ├── WeightsError      weights are missing, truncated or of another model
│   ├── ProfileError      a profile is corrupt or belongs to another device or model
│   └── ScheduleError     a schedule file is corrupt or does not fit model or cluster
├── DistributionError     lengths that form no probability distribution
├── ProfileRangeError     a cost was asked for outside what was profiled
├── CapacityError         a request or a model needs more memory than there is
├── RequestError          one request cannot be served (the others go on)
└── LaunchError           the launcher or a rank failed

A message says what is wrong, where (file and key), what is allowed and the way out. The entry
point prints it alone, without a traceback, and exits with code 2.
"""


class ExeGPTError(Exception):
    """Root of every error that a user can act on."""


class ConfigError(ExeGPTError):
    """A key, a value or a file named in the configuration is wrong."""


class ModelError(ConfigError):
    """A model's config.json describes layers that cannot be planned for, or lacks what describes them."""


class TraceError(ConfigError):
    """A trace, prompt or length file cannot be read as one."""


class WeightsError(ConfigError):
    """Weights are missing, truncated, or belong to another model."""


class ProfileError(ConfigError):
    """A profile is corrupt, or measured for another model or device."""


class ScheduleError(ConfigError):
    """A schedule file is corrupt, or does not fit the model or the cluster."""


class DistributionError(ExeGPTError):
    """Lengths that form no probability distribution."""


class ProfileRangeError(ExeGPTError):
    """A cost was asked for outside the range that was profiled."""


class CapacityError(ExeGPTError):
    """A request or a model needs more memory than a device has."""


class RequestError(ExeGPTError):
    """One request cannot be served; the others are not affected."""


class LaunchError(ExeGPTError):
    """The launcher or a rank ended before its work was done."""
