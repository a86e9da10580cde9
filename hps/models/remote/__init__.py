"""Remote model repositories: object stores, HDFS and web servers, behind a local cache."""

from hps.models.remote.cancellation import CancelOn
from hps.models.remote.opening import open_repository, repository_of

__all__ = ["CancelOn", "open_repository", "repository_of"]
