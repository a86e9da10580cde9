"""Tables whose rows are in a mapped file, with newer rows and deletions in RocksDB; see ``tier.py``.

In reading order: ``overlaid_table`` (the file and which of its rows RocksDB replaces), ``row_marks``,
``overlay_rows`` (writes), ``ordered_scan``, ``tier``, ``file_tier`` (files without RocksDB),
``verified_files`` (the files' checksums) and ``checks`` (the same in the background)."""

from hps.tiers.mapped.checks import MappedChecks
from hps.tiers.mapped.file_tier import MappedFileTier
from hps.tiers.mapped.tier import MappedTier

__all__ = ["MappedChecks", "MappedFileTier", "MappedTier"]
