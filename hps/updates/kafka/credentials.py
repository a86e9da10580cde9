"""SASL user and password, read again from their files when these change, without a restart."""

from __future__ import annotations

import logging
import time
from typing import Any

from hps.config.secrets import Secret
from hps.config.update_settings import KafkaSettings

log = logging.getLogger(__name__)

# Kubernetes updates a changed secret within a minute or two.
_CHECK_EVERY_S = 2.0
_NAMES = "sasl.username", "sasl.password"


class SaslCredentials:
    """Credentials of one client; one thread at a time may renew them."""

    def __init__(self, settings: KafkaSettings) -> None:
        """Raises ConfigError for an unreadable file."""
        options, files = settings.options, settings.options_files
        self._secrets = [
            Secret(
                str(options[name]) if name in options else None,
                files.get(name),
                f"updates.kafka.options_files.{name}",
            )
            for name in _NAMES
        ]
        self._may_change = any(name in files for name in _NAMES)
        self._used = self._now()
        self._checked_at = time.monotonic()

    def renew(self, client: Any) -> None:
        """Pass changed credentials to ``client`` (of confluent-kafka), which uses them to reconnect."""
        if not self._may_change or time.monotonic() - self._checked_at < _CHECK_EVERY_S:
            return
        self._checked_at = time.monotonic()
        now = self._now()
        if now != self._used and None not in now:
            client.set_sasl_credentials(*now)
            self._used = now
            log.info("Kafka's user and password have changed; using the new ones")

    def _now(self) -> list[str | None]:
        return [secret.now() for secret in self._secrets]
