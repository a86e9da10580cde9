"""Tables of rows by 64-bit key, with HierarchicalKV's operations: `Table`.

    from hps.table import Table

    table = Table(dim=16, init_capacity=1 << 20, max_capacity=1 << 24)
    table.insert_or_assign(keys, rows)
    rows, found, scores = table.find(keys)

docs/table.md describes the API. Nothing here needs a server, a model or a configuration.
"""

from hps.table.policy import Policy
from hps.table.results import FoundRows, TableRows
from hps.table.table import Table

__all__ = ["FoundRows", "Policy", "Table", "TableRows"]
