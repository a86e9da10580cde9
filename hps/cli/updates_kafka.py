"""Options of ``hps updates`` commands for the Kafka cluster."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hps.cli.store_open import read_config
from hps.errors import ConfigError

if TYPE_CHECKING:
    from hps.config import Configuration
    from hps.config.update_settings import KafkaSettings

BrokersOption = Annotated[
    str | None,
    typer.Option(
        "--brokers",
        "-b",
        metavar="HOST:PORT",
        help="Kafka brokers, host:port; several separated by commas.",
    ),
]
SomeConfig = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        metavar="FILE",
        help="Configuration file; its updates.kafka names the brokers.",
    ),
]


def configuration_of(config: Path | None, overrides: list[str] | None) -> Configuration | None:
    if config is None and overrides:
        raise ConfigError("--set changes a setting of --config; give that as well")
    return None if config is None else read_config(config, overrides)


def kafka_settings(brokers: str | None, configuration: Configuration | None) -> KafkaSettings:
    """The configuration's settings, with ``brokers`` if given. Raises ConfigError without either."""
    from hps.config.update_settings import KafkaSettings

    # The command reports errors of Kafka's client itself.
    logging.getLogger("hps").addHandler(logging.NullHandler())
    found = None if configuration is None else configuration.settings.updates.kafka
    if found is not None:
        return found if brokers is None else found.model_copy(update={"brokers": brokers})
    if not brokers:
        raise ConfigError("no Kafka is named: give --brokers, or --config with updates.kafka")
    return KafkaSettings(brokers=brokers)
