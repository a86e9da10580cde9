"""Import of other formats as versions of the model repository, in bounded memory.

``arrays``: the common form of files that hold named arrays (npz, safetensors, PyTorch); ``plan``: which
array becomes which table; ``import_model``: writes the version."""

from hps.models.importers.import_model import ImportSettings, import_model
from hps.models.importers.plan import ImportPlan, ImportTable, TableChoice
from hps.models.importers.sources import SOURCES, plan_import

__all__ = [
    "SOURCES",
    "ImportPlan",
    "ImportSettings",
    "ImportTable",
    "TableChoice",
    "import_model",
    "plan_import",
]
