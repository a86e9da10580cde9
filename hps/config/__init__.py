"""Settings and ``model.yaml``: the only place that reads YAML and the environment."""

from hps.config.config_errors import InvalidConfiguration
from hps.config.loading import Configuration, as_configuration, configuration_from, load_config
from hps.config.model_file import apply_override, dump_model_spec, load_model_spec
from hps.config.model_schema import ModelSpec
from hps.config.ps_json.legacy import LegacyModel
from hps.config.schema import Settings

__all__ = [
    "Configuration",
    "InvalidConfiguration",
    "LegacyModel",
    "ModelSpec",
    "Settings",
    "apply_override",
    "as_configuration",
    "configuration_from",
    "dump_model_spec",
    "load_config",
    "load_model_spec",
]
