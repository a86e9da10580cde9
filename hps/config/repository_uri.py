"""Locations of model repositories: a local folder, or the URI of an object store or web server."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Self
from urllib.parse import SplitResult, urlsplit

from pydantic_core import core_schema

from hps.errors import ConfigError
from hps.suggestions import did_you_mean

WEB_SCHEMES = ("https", "http")
ARROW_SCHEMES = ("s3", "gs", "abfs", "abfss", "hdfs")
SCHEMES = (*ARROW_SCHEMES, *WEB_SCHEMES)
# A user name in these names a container, the user of HDFS, or anonymous access; never a secret.
_WITH_USER = ("abfs", "abfss", "hdfs", "gs")
_SCHEME = re.compile(r"[a-z][a-z0-9+.\-]*")
_EXAMPLE = "s3://bucket/models"


class RepositoryUri(str):
    """A validated URI of a remote repository, without credentials; see `parse_location`."""

    __slots__ = ()

    @classmethod
    def parse(cls, text: str) -> Self:
        """Check a URI. Raises ConfigError with the cause and the remedy; secrets in it are masked."""
        shown = mask(text)
        scheme, separator, rest = text.partition("://")
        scheme = scheme.lower()
        if not separator or not _SCHEME.fullmatch(scheme):
            raise ConfigError(f"{shown} is not a URI; write it as {_EXAMPLE}")
        try:
            parts = urlsplit(f"{scheme}://{rest}")
            _ = parts.port
        except ValueError as error:
            raise ConfigError(f"{shown} is not a URI ({error}); write it as {_EXAMPLE}") from None
        if scheme == "file":
            raise ConfigError(f"{shown}: a local repository is a path; write {parts.path or '/'}")
        _check_secrets(parts, shown)
        if scheme not in SCHEMES and scheme not in fsspec_schemes():
            hint = did_you_mean(scheme, SCHEMES)
            raise ConfigError(
                f"{shown}: unknown scheme '{scheme}'{hint}; use one of {', '.join(SCHEMES)}, or install "
                "fsspec and the package that it needs for this store"
            )
        if not parts.netloc and scheme in SCHEMES:
            what = "host" if scheme in WEB_SCHEMES or scheme == "hdfs" else "bucket"
            raise ConfigError(f"{shown}: the {what} is missing; write it as {_example(scheme)}")
        if any(part in (".", "..") for part in parts.path.split("/")):
            raise ConfigError(f"{shown}: the path must not contain '.' or '..'")
        return cls(f"{scheme}://{rest.rstrip('/')}")

    @property
    def scheme(self) -> str:
        return self.partition("://")[0]

    @property
    def host(self) -> str:
        """The bucket, container or host, as written."""
        return self.partition("://")[2].partition("/")[0]

    @property
    def path(self) -> str:
        """The path below the host, without a leading slash."""
        return self.partition("://")[2].partition("/")[2]

    @property
    def is_read_only(self) -> bool:
        return self.scheme in WEB_SCHEMES

    @classmethod
    def __get_pydantic_core_schema__(cls, _source: Any, _handler: Any) -> core_schema.CoreSchema:
        return core_schema.json_or_python_schema(
            json_schema=core_schema.str_schema(pattern="://"),
            python_schema=core_schema.is_instance_schema(cls),
            serialization=core_schema.to_string_ser_schema(),
        )


Location = Path | RepositoryUri
"""A local folder, or a remote repository."""


def parse_location(text: str) -> Location:
    """The location that a user wrote. Raises ConfigError for a URI that cannot be used."""
    if "://" in text:
        return RepositoryUri.parse(text)
    if re.match(rf"({'|'.join(SCHEMES)}):/", text):
        raise ConfigError(f"{mask(text)}: a URI has two slashes after the colon, as in {_EXAMPLE}")
    return Path(text)


def mask(text: str) -> str:
    """``text`` without a user, a password and the query of a URI."""
    shown = re.sub(r"(?<=:/)(/?)[^/]*@", r"\1********@", text)
    return re.sub(r"\?.*", "?********", shown)


def fsspec_schemes() -> list[str]:
    """Schemes of fsspec's stores, which PyArrow can use; none if it is not installed."""
    try:
        from fsspec import available_protocols
    except ImportError:
        return []
    return list(available_protocols())


def _check_secrets(parts: SplitResult, shown: str) -> None:
    remedy = (
        "credentials come from the environment, as the store's SDK reads them "
        "(docs/remote-repositories.md); remove them from the URI"
    )
    if parts.password is not None:
        raise ConfigError(f"{shown}: a URI must not contain a password; {remedy}")
    if parts.username is not None and parts.scheme not in _WITH_USER:
        raise ConfigError(f"{shown}: a URI must not contain a user; {remedy}")
    if parts.query or parts.fragment:
        raise ConfigError(f"{shown}: a URI must not contain a query or a fragment; {remedy}")


def _example(scheme: str) -> str:
    examples = {
        "abfs": "abfs://container@account.dfs.core.windows.net/models",
        "abfss": "abfss://container@account.dfs.core.windows.net/models",
        "hdfs": "hdfs://namenode:8020/models",
    }
    return examples.get(
        scheme, f"{scheme}://{'host' if scheme in WEB_SCHEMES else 'bucket'}/models"
    )
