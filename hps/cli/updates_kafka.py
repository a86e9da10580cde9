"""Options of ``hps updates`` commands for the Kafka cluster."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hps.cli.command_options import option
from hps.cli.options import ReportOptions, SetOption
from hps.cli.store_open import read_config
from hps.errors import ConfigError

if TYPE_CHECKING:
    from hps.config import Configuration
    from hps.config.update_settings import KafkaSettings


@dataclass(frozen=True, kw_only=True)
class KafkaOptions(ReportOptions):
    """The Kafka cluster of a command: its brokers, or a configuration with ``updates.kafka``."""

    brokers: str | None = option(None, "--brokers", "-b", metavar="HOST:PORT")
    """Kafka brokers, host:port; several separated by commas."""
    config: Path | None = option(None, "--config", "-c", metavar="FILE")
    """Configuration file; its updates.kafka names the brokers."""
    overrides: SetOption = None

    def read(self) -> Configuration | None:
        if self.config is None and self.overrides:
            raise ConfigError("--set changes a setting of --config; give that as well")
        return None if self.config is None else read_config(self.config, self.overrides)

    def kafka(self, configuration: Configuration | None) -> KafkaSettings:
        """The configuration's settings, with ``brokers`` if given. Raises ConfigError without either."""
        from hps.config.update_settings import KafkaSettings

        # The command reports errors of Kafka's client itself.
        logging.getLogger("hps").addHandler(logging.NullHandler())
        found = None if configuration is None else configuration.settings.updates.kafka
        if found is not None:
            brokers = self.brokers
            return found if brokers is None else found.model_copy(update={"brokers": brokers})
        if not self.brokers:
            raise ConfigError("no Kafka is named: give --brokers, or --config with updates.kafka")
        return KafkaSettings(brokers=self.brokers)
